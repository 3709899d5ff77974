"""Prompts of text completions and embeddings to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from pagemill_gateway.engine import Engine
from pagemill_gateway.errors import ApiError
from pagemill_gateway.prompt import Prompt
from pagemill_gateway.tokenizer import TextTokenizer


class Encodable(Protocol):
    """What a body says of how its prompts are encoded."""

    @property
    def add_special_tokens(self) -> bool: ...

    def truncated(self, ids: list[int], room: int) -> list[int]: ...


async def encode_prompts(
    engine: Engine, body: Encodable, prompts: Sequence[str | list[int]], param: str, limit: int | None
) -> list[Prompt]:
    """Long texts are encoded off the event loop.

    Args:
        param: the field that the prompts stand in.
        limit: output tokens that a prompt which is cut to what fits must leave room for; None for one.

    Raises:
        ApiError: 400, a text has no tokens, or the vocabulary does not have an id.
    """
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            encode = partial(engine.tokenizer.encode, prompt, add_special_tokens=body.add_special_tokens)
            ids = await engine.sized(len(prompt), encode)
            if not ids:
                raise ApiError(400, f"{param}: the text has no tokens", param=param, code="invalid_value")
        else:
            ids = prompt
        engine.check_ids(ids, param)
        used = body.truncated(ids, engine.room(limit))
        hides_bos = isinstance(prompt, str) and used[:1] == ids[:1] and _adds_bos(engine.tokenizer, prompt, body)
        encoded.append(Prompt(used, int(hides_bos)))
    return encoded


def _adds_bos(tokenizer: TextTokenizer, text: str, body: Encodable) -> bool:
    return body.add_special_tokens and tokenizer.bos is not None and not text.startswith(tokenizer.bos)
