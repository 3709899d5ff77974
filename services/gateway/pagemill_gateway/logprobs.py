"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagemill_gateway.choice import TokenLogprob
from pagemill_gateway.tokenizer import TextTokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def finite(logprob: float) -> float:
    return max(logprob, LEAST)


def chat_entries(tokenizer: TextTokenizer, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """One object per token; ``token`` is the token alone, so half a character shows as U+FFFD beside its ``bytes``."""
    return [
        _chat_token(tokenizer, entry.token_id, entry.logprob)
        | {"top_logprobs": [_chat_token(tokenizer, token_id, value) for token_id, value in entry.top]}
        for entry in entries
    ]


def _chat_token(tokenizer: TextTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}


def completion_lists(
    tokenizer: TextTokenizer, entries: Sequence[TokenLogprob], first_offset: int = 0
) -> dict[str, list[Any]]:
    """Parallel lists, one item per token. ``tokens`` joined are the text: a token that completes no character is "".

    Args:
        first_offset: where the entries' text begins in the answer's.
    """
    return {
        "text_offset": [first_offset + entry.offset for entry in entries],
        "token_logprobs": [finite(entry.logprob) for entry in entries],
        "tokens": [entry.piece for entry in entries],
        "top_logprobs": [
            {
                _distinct_name(tokenizer, token_id): finite(value)
                for token_id, value in [*entry.top, (entry.token_id, entry.logprob)]
            }
            for entry in entries
        ],
    }


def _distinct_name(tokenizer: TextTokenizer, token_id: int) -> str:
    """The token's text, or its bytes where they are not whole characters."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
