"""POST /v1/chat/completions"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from pagemill_gateway.chat_body import ChatBody, ConversationFields
from pagemill_gateway.choice import Choice, TokenLogprob
from pagemill_gateway.echo import prompt_logprobs
from pagemill_gateway.engine import INLINE_SIZE, Engine, Generation
from pagemill_gateway.errors import ApiError
from pagemill_gateway.exchange import Exchange
from pagemill_gateway.logprobs import chat_entries, finite
from pagemill_gateway.prompt import Prompt
from pagemill_gateway.streaming import ChoiceEvents, quote, send_stream, send_whole
from pagemill_gateway.tokenizer import TextTokenizer
from pagemill_gateway.tool_answers import Tools, ToolStream
from pagemill_gateway.tool_prompt import needs_text, with_tools_as_text


async def chat_completions(engine: Engine, exchange: Exchange, raw: bytes) -> None:
    arrived = time.monotonic()
    body = await engine.parse(ChatBody, raw)
    tools = Tools.of(engine, body)
    generation = await chat_generation(engine, body, tools, body.request_id or exchange.request_id, arrived)
    envelope = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": engine.name,
    }
    if body.stream:
        await send_stream(exchange, generation, ChatEvents(engine.tokenizer, envelope, body, tools))
    else:
        await send_whole(
            engine,
            exchange,
            generation,
            lambda: generation.answer_size(body.num_logprobs, body.told_of_prompt),
            lambda: envelope | _whole(engine.tokenizer, generation, body, tools),
        )


async def chat_generation(
    engine: Engine, body: ChatBody, tools: Tools | None, request_id: str, arrived: float
) -> Generation:
    """All that comes before the first token of an answer to a conversation.

    Raises:
        ApiError: it cannot be served; ``param`` is a field of ``body``.
    """
    engine.resolver.check(body)
    grammar = await engine.grammars.check(body.constraint if tools is None else tools.constraint(body))
    prompt = Prompt(body.truncated(await encode_conversation(engine, body), engine.room(body.output_limit)))
    await engine.connection.until_able()
    engine.check_ids(prompt.token_ids, "messages")
    engine.check_prompt_logprobs([prompt], body.prompt_logprobs, "prompt_logprobs", streamed=False)
    limit_name = _limit_name(body)
    explicit = body.output_limit is not None
    limit = engine.max_tokens(len(prompt), body.output_limit, explicit, "messages", limit_name)
    return engine.generation(
        body,
        [prompt],
        [limit],
        body.num_logprobs,
        request_id,
        arrived,
        {"prompt": "messages", "max_tokens": limit_name},
        grammar,
        frozenset() if tools is None else tools.shown,
    )


_TURN_SIZE = 64
"""What one message costs beside its text, in characters."""
_TOOL_SIZE = 512
"""What a tool costs, about."""


async def encode_conversation(engine: Engine, body: ConversationFields) -> list[int]:
    """The prompt's token ids; long conversations are rendered and tokenized off the event loop.

    Raises:
        ApiError: the template refuses the messages, or is the request's own and not trusted.
    """
    messages = [message.as_template_message() for message in body.messages]
    tools = [tool.as_template_tool() for tool in body.offered_tools]
    tokenizer = engine.tokenizer
    size = sum(_TURN_SIZE + len(message["content"]) for message in messages) + _TOOL_SIZE * len(tools)
    if body.chat_template is not None:
        if not engine.trusts_templates:
            raise ApiError(
                400,
                "chat_template needs a server that was started with --trust-request-chat-template",
                param="chat_template",
                code="unsupported_parameter",
            )
        tokenizer = tokenizer.with_template(body.chat_template)
        size += INLINE_SIZE  # nobody knows for how long it renders
    template = tokenizer.chat_template
    if template is not None and needs_text(messages, tools, template):
        messages, tools = with_tools_as_text(messages, tools, engine.tool_format), []
    return await engine.sized(
        size,
        lambda: tokenizer.encode_chat(
            messages,
            tools=tools,
            add_generation_prompt=body.generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
            add_special_tokens=body.add_special_tokens,
        ),
    )


def _limit_name(body: ChatBody) -> str:
    """The field that is at fault when the answer has no room."""
    if body.max_completion_tokens is not None:
        return "max_completion_tokens"
    return "messages" if body.max_tokens is None else "max_tokens"


def _whole(tokenizer: TextTokenizer, generation: Generation, body: ChatBody, tools: Tools | None) -> dict[str, Any]:
    choices = []
    for choice in generation.answers():
        text, entries = choice.take()
        answer, reason = ({"content": text}, choice.finish_reason) if tools is None else tools.read(choice, text)
        item: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", **answer, "refusal": None},
            "logprobs": {"content": chat_entries(tokenizer, entries)} if body.logprobs else None,
            "finish_reason": reason,
            "stop_reason": choice.stop_reason,
        }
        if body.ranked:
            item["score"] = finite(choice.score)
        if body.return_token_ids:
            item["token_ids"] = choice.take_token_ids()
        choices.append(item)
    whole: dict[str, Any] = {"choices": choices, "usage": generation.usage}
    if body.return_token_ids:
        whole["prompt_token_ids"] = list(generation.output.choices[0].prompt_token_ids)
    if body.prompt_logprobs is not None:
        whole["prompt_logprobs"] = prompt_logprobs(tokenizer, generation.requests[0].prompt, body.prompt_logprobs)
    return whole


class ChatEvents(ChoiceEvents):
    """Events of a chat completion: the role, then content and function calls, then the finish reason."""

    def __init__(self, tokenizer: TextTokenizer, envelope: dict[str, Any], body: ChatBody, tools: Tools | None) -> None:
        super().__init__(envelope, body)
        self._tools = tools
        self._streams: dict[Choice, ToolStream] = {}
        self._tokenizer = tokenizer
        self._after = f'}},"logprobs":null,"finish_reason":null}}]{self.tail}'

    def opening(self, choice: Choice) -> str:
        event = self._event(choice, '{"role":"assistant","content":""}')
        if not self.return_token_ids:
            return event
        return f'{event.removesuffix(self.tail)},"prompt_token_ids":{list(choice.prompt_token_ids)}{self.tail}'

    def piece(self, choice: Choice, text: str, entries: Sequence[TokenLogprob], more: str) -> str:
        if self._tools is not None:
            return self._piece_with_calls(self._tools, choice, text, entries, more)
        if not entries and not more:
            return f'{self.head}{{"index":{choice.index},"delta":{{"content":{quote(text)}{self._after}'
        return self._event(choice, f'{{"content":{quote(text)}}}', self._logprobs(entries), "null" + more)

    def _piece_with_calls(
        self, tools: Tools, choice: Choice, text: str, entries: Sequence[TokenLogprob], more: str
    ) -> str:
        stream = self._streams.setdefault(choice, tools.stream())
        deltas = stream.push(text)
        if not deltas and (entries or more):
            deltas = ['{"content":""}']  # the text is held back, what belongs to it is not
        events = ""
        for delta in deltas:
            events += self._event(choice, delta, self._logprobs(entries), "null" + more)
            entries, more = (), ""
        return events

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> str:
        if not entries:
            return "null"
        return json.dumps({"content": chat_entries(self._tokenizer, entries)}, ensure_ascii=False)

    def ending(self, choice: Choice) -> str:
        if self._tools is None:
            return self._event(choice, "{}", finish=self.finish(choice, choice.finish_reason))
        stream = self._streams.setdefault(choice, self._tools.stream())
        deltas, reason = stream.finish(choice)
        events = "".join(self._event(choice, delta) for delta in deltas)
        return events + self._event(choice, "{}", finish=self.finish(choice, reason))

    def _event(self, choice: Choice, delta: str, logprobs: str = "null", finish: str = "null") -> str:
        return (
            f'{self.head}{{"index":{choice.index},"delta":{delta},"logprobs":{logprobs},'
            f'"finish_reason":{finish}}}]{self.tail}'
        )
