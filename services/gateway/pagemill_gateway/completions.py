"""POST /v1/completions"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from pagemill_gateway.choice import Choice, TokenLogprob
from pagemill_gateway.completion_body import CompletionBody
from pagemill_gateway.engine import Engine, Generation
from pagemill_gateway.errors import ApiError
from pagemill_gateway.exchange import Exchange, json_text
from pagemill_gateway.logprobs import completion_lists, finite
from pagemill_gateway.streaming import EventWriter, collect, quote, send_stream
from pagemill_gateway.tokenizer import TextTokenizer


async def completions(engine: Engine, exchange: Exchange, raw: bytes) -> None:
    arrived = time.monotonic()
    body = await engine.parse(CompletionBody, raw)
    engine.resolver.check(body)
    grammar = await engine.grammars.check(body.constraint)
    prompts = await _encode(engine, body)
    await engine.connection.until_able()
    explicit = "max_tokens" in body.model_fields_set
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
        await send_stream(exchange, generation, CompletionEvents(engine.tokenizer, envelope, body))
    elif await collect(exchange, generation):
        size = generation.answer_size(body.num_logprobs)
        await exchange.send_json_text(
            await engine.sized(size, lambda: json_text(envelope | _whole(engine.tokenizer, generation, body)))
        )


async def _encode(engine: Engine, body: CompletionBody) -> list[list[int]]:
    encoded = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            encode = partial(engine.tokenizer.encode, prompt, add_special_tokens=body.add_special_tokens)
            ids = await engine.sized(len(prompt), encode)
            if not ids:
                raise ApiError(400, "prompt: the text has no tokens", param="prompt", code="invalid_value")
        else:
            ids = prompt
        engine.check_ids(ids, "prompt")
        encoded.append(ids)
    return encoded


def _whole(tokenizer: TextTokenizer, generation: Generation, body: CompletionBody) -> dict[str, Any]:
    choices = []
    for choice in generation.answers():
        text, entries = choice.take()
        item: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": None if body.logprobs is None else completion_lists(tokenizer, entries),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if body.ranked:
            item["score"] = finite(choice.score)
        if body.return_token_ids:
            item |= {"prompt_token_ids": list(choice.prompt_token_ids), "token_ids": choice.take_token_ids()}
        choices.append(item)
    return {"choices": choices, "usage": generation.usage}


class CompletionEvents(EventWriter):
    """Events of a text completion; its choices come interleaved."""

    def __init__(self, tokenizer: TextTokenizer, envelope: dict[str, Any], body: CompletionBody) -> None:
        super().__init__(envelope, body)
        self._tokenizer = tokenizer
        self._after = f',"logprobs":null,"finish_reason":null}}]{self.tail}'

    def opening(self, choice: Choice) -> str:
        if not self.return_token_ids:
            return ""
        return self._event(choice, '""', "null", f'null,"prompt_token_ids":{list(choice.prompt_token_ids)}')

    def piece(self, choice: Choice, text: str, entries: Sequence[TokenLogprob], more: str) -> str:
        if not entries and not more:
            return f'{self.head}{{"index":{choice.index},"text":{quote(text)}{self._after}'
        logprobs = json.dumps(completion_lists(self._tokenizer, entries), ensure_ascii=False) if entries else "null"
        return self._event(choice, quote(text), logprobs, "null" + more)

    def ending(self, choice: Choice) -> str:
        return self._event(choice, '""', "null", self.finish(choice))

    def _event(self, choice: Choice, text: str, logprobs: str, finish: str) -> str:
        return (
            f'{self.head}{{"index":{choice.index},"text":{text},"logprobs":{logprobs},'
            f'"finish_reason":{finish}}}]{self.tail}'
        )
