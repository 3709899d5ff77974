"""Prompts in answers: ``echo`` of text completions, and ``prompt_logprobs``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagemill_gateway.choice import TokenLogprob
from pagemill_gateway.logprobs import completion_lists, finite
from pagemill_gateway.prompt import Prompt
from pagemill_gateway.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as the head of its completions.

    Attributes:
        logprobs: parallel lists as ``completion_lists`` makes them, None where they were not asked for.
    """

    text: str
    logprobs: dict[str, list[Any]] | None


def echo_of(tokenizer: TextTokenizer, prompt: Prompt, alternatives: int | None) -> Echo:
    """The prompt's text, token by token where log-probabilities are wanted: the pieces joined are the text.

    Args:
        alternatives: how many beside each token, None for no log-probabilities.
    """
    pieces = _pieces(tokenizer, prompt)
    text = "".join(pieces)
    if alternatives is None:
        return Echo(text, None)
    entries = prompt.logprobs()
    offset = len(pieces[0])
    for entry, piece in zip(entries, pieces[1:], strict=True):
        entry.top = entry.top[:alternatives]
        entry.piece, entry.offset = piece, offset
        offset += len(piece)
    lists = completion_lists(tokenizer, entries)
    # Nothing comes before the first token that could make it likely.
    first = {"text_offset": 0, "token_logprobs": None, "tokens": pieces[0], "top_logprobs": None}
    return Echo(text, {name: [first[name], *items] for name, items in lists.items()})


def _pieces(tokenizer: TextTokenizer, prompt: Prompt) -> list[str]:
    """[P] each token's share of the text; control tokens are written as they are called."""
    detokenizer = tokenizer.detokenizer((), skip_special_tokens=False)
    pieces = [
        detokenizer.push(token) if position >= prompt.first_shown else ""
        for position, token in enumerate(prompt.token_ids)
    ]
    pieces[-1] += detokenizer.finish()
    return pieces


def prompt_logprobs(tokenizer: TextTokenizer, prompt: Prompt, alternatives: int) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each token but the first an object with one entry per token id, its own first."""
    return [None, *(_by_token(tokenizer, entry, alternatives) for entry in prompt.logprobs())]


def _by_token(tokenizer: TextTokenizer, entry: TokenLogprob, alternatives: int) -> dict[str, Any]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(token, value, rank) for rank, (token, value) in enumerate(entry.top[:alternatives], 1)]
    return {
        str(token): {
            "logprob": finite(value),
            "rank": rank,
            "decoded_token": tokenizer.token_bytes(token).decode("utf-8", "replace"),
        }
        for token, value, rank in reversed(ranked)
    }
