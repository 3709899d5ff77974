"""POST /v1/completions"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from pagemill_gateway.choice import Choice, TokenLogprob
from pagemill_gateway.completion_body import CompletionBody
from pagemill_gateway.echo import Echo, echo_of, prompt_logprobs
from pagemill_gateway.encoding import encode_prompts
from pagemill_gateway.engine import Engine, Generation
from pagemill_gateway.exchange import Exchange
from pagemill_gateway.logprobs import completion_lists, finite
from pagemill_gateway.streaming import ChoiceEvents, quote, send_stream, send_whole
from pagemill_gateway.tokenizer import TextTokenizer

_NO_ECHO = Echo("", None)


async def completions(engine: Engine, exchange: Exchange, raw: bytes) -> None:
    arrived = time.monotonic()
    body = await engine.parse(CompletionBody, raw)
    engine.resolver.check(body)
    grammar = await engine.grammars.check(body.constraint)
    explicit = "max_tokens" in body.model_fields_set
    prompts = await encode_prompts(engine, body, body.prompts, "prompt", body.max_tokens if explicit else None)
    await engine.connection.until_able()
    engine.check_prompt_logprobs(
        prompts, body.told_of_prompt, "logprobs" if body.echo else "prompt_logprobs", body.stream
    )
    limits = [engine.max_tokens(len(prompt), body.max_tokens, explicit, "prompt", "max_tokens") for prompt in prompts]
    generation = engine.generation(
        body, prompts, limits, body.logprobs, body.request_id or exchange.request_id, arrived, {}, grammar
    )
    envelope = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": engine.name,
    }
    if body.stream:
        await send_stream(exchange, generation, CompletionEvents(engine.tokenizer, envelope, body, generation))
    else:
        await send_whole(
            engine,
            exchange,
            generation,
            lambda: generation.answer_size(body.num_logprobs, body.told_of_prompt),
            lambda: envelope | _whole(engine.tokenizer, generation, body),
        )


def _whole(tokenizer: TextTokenizer, generation: Generation, body: CompletionBody) -> dict[str, Any]:
    choices = []
    for choice in generation.answers():
        text, entries = choice.take()
        prompt = generation.prompt_of(choice)
        echo = echo_of(tokenizer, prompt, body.logprobs) if body.echo else _NO_ECHO
        lists = None
        if body.logprobs is not None:
            lists = _joined(echo, completion_lists(tokenizer, entries, len(echo.text)))
        item: dict[str, Any] = {
            "index": choice.index,
            "text": echo.text + text,
            "logprobs": lists,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if body.ranked:
            item["score"] = finite(choice.score)
        if body.return_token_ids:
            item |= {"prompt_token_ids": list(choice.prompt_token_ids), "token_ids": choice.take_token_ids()}
        if body.prompt_logprobs is not None:
            item["prompt_logprobs"] = prompt_logprobs(tokenizer, prompt, body.prompt_logprobs)
        choices.append(item)
    return {"choices": choices, "usage": generation.usage}


def _joined(echo: Echo, lists: dict[str, list[Any]]) -> dict[str, list[Any]]:
    head = echo.logprobs
    return lists if head is None else {name: head[name] + items for name, items in lists.items()}


class CompletionEvents(ChoiceEvents):
    """Events of a text completion; its choices come interleaved, each behind its prompt where that is echoed."""

    def __init__(
        self, tokenizer: TextTokenizer, envelope: dict[str, Any], body: CompletionBody, generation: Generation
    ) -> None:
        super().__init__(envelope, body)
        self._tokenizer = tokenizer
        self._generation = generation
        self._echoes = body.echo
        self._alternatives = body.logprobs
        self._echoed: dict[Choice, int] = {}
        """How long the prompt of each choice that has begun is, in characters."""
        self._after = f',"logprobs":null,"finish_reason":null}}]{self.tail}'

    def opening(self, choice: Choice) -> str:
        if not self.return_token_ids:
            return ""
        return self._event(choice, '""', "null", f'null,"prompt_token_ids":{list(choice.prompt_token_ids)}')

    def news(self, choice: Choice) -> str:
        if self._echoes and choice not in self._echoed:
            # Not before its first news: only then all has come that was to be told of the prompt.
            echo = echo_of(self._tokenizer, self._generation.prompt_of(choice), self._alternatives)
            self._echoed[choice] = len(echo.text)
            logprobs = json.dumps(echo.logprobs, ensure_ascii=False)
            return self._event(choice, quote(echo.text), logprobs, "null") + super().news(choice)
        return super().news(choice)

    def piece(self, choice: Choice, text: str, entries: Sequence[TokenLogprob], more: str) -> str:
        if not entries and not more:
            return f'{self.head}{{"index":{choice.index},"text":{quote(text)}{self._after}'
        logprobs = "null"
        if entries:
            lists = completion_lists(self._tokenizer, entries, self._echoed.get(choice, 0))
            logprobs = json.dumps(lists, ensure_ascii=False)
        return self._event(choice, quote(text), logprobs, "null" + more)

    def ending(self, choice: Choice) -> str:
        return self._event(choice, '""', "null", self.finish(choice, choice.finish_reason))

    def _event(self, choice: Choice, text: str, logprobs: str, finish: str) -> str:
        return (
            f'{self.head}{{"index":{choice.index},"text":{text},"logprobs":{logprobs},'
            f'"finish_reason":{finish}}}]{self.tail}'
        )
