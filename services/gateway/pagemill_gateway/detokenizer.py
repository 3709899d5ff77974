"""Token ids to text, one token at a time, never half a character, never decoding the whole text again.

The joined pieces of a stream equal the text of the whole: bytes that can never become a character turn into U+FFFD at
once (so at most three bytes are ever held back), bytes that may still become one wait for the rest.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from pagemill_gateway.vocabulary import Vocabulary

_UTF8_DECODER = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"
_WINDOW = 16
"""Most tokens that the general path holds back in the hope that they complete a character (four bytes at most)."""
_CONTEXT = 4
"""Tokens that the general path decodes again before each new one, so that blanks between words come out right."""


class Detokenizer(ABC):
    """Turns the tokens of one sequence into pieces of text."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes, "" when it completes none."""

    @abstractmethod
    def finish(self) -> str:
        """What is still held back at the end of the sequence: bytes that never became a character."""


class TableDetokenizer(Detokenizer):
    """The fast path: looks the token's text up; only bytes that are not whole characters go through a decoder."""

    __slots__ = ("_bytes", "_decoder", "_hidden", "_pending", "_texts")

    def __init__(self, vocabulary: Vocabulary, hidden: frozenset[int]) -> None:
        if vocabulary.token_bytes is None:
            raise ValueError("this tokenizer has no table of token bytes")
        self._bytes, self._texts = vocabulary.token_bytes, vocabulary.texts
        self._hidden = hidden
        self._decoder = _UTF8_DECODER(errors="replace")
        self._pending = False

    def push(self, token_id: int) -> str:
        if token_id in self._hidden or token_id >= len(self._bytes):  # padding of the embedding has no text
            return ""
        text = self._texts[token_id]
        if text is not None and not self._pending:
            return text
        text = self._decoder.decode(self._bytes[token_id])
        self._pending = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        self._pending = False
        return self._decoder.decode(b"", True)


class WindowDetokenizer(Detokenizer):
    """The general path: decodes a short window of tokens through the tokenizer and gives what the newest one added."""

    __slots__ = ("_context", "_decode", "_held", "_hidden")

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: Vocabulary, hidden: frozenset[int], prompt: Sequence[int]
    ) -> None:
        self._decode: Callable[..., str] = tokenizer.decode
        self._hidden = hidden
        self._context = [i for i in prompt[-_CONTEXT:] if i not in vocabulary.special_ids]
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._held.append(token_id)
        text = self._text_of_held()
        if text.endswith(_REPLACEMENT) and len(self._held) < _WINDOW:
            return ""
        self._commit()
        return text

    def finish(self) -> str:
        text = self._text_of_held() if self._held else ""
        self._commit()
        return text

    def _text_of_held(self) -> str:
        before = self._decode(self._context, skip_special_tokens=False)
        after = self._decode(self._context + self._held, skip_special_tokens=False)
        return after[len(before) :] if after.startswith(before) else after[len(_common_prefix(before, after)) :]

    def _commit(self) -> None:
        self._context = (self._context + self._held)[-_CONTEXT:]
        self._held = []


def _common_prefix(a: str, b: str) -> str:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]


def new_detokenizer(
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    *,
    skip_special_tokens: bool,
    shown: frozenset[int] = frozenset(),
    prompt: Sequence[int] = (),
) -> Detokenizer:
    """The fastest detokenizer that is right for this tokenizer.

    Args:
        shown: control tokens that are shown even if the others are skipped.
        prompt: ids that the sequence goes on from; the general path needs them to get the first blank right.
    """
    hidden = vocabulary.special_ids - shown if skip_special_tokens else frozenset[int]()
    if vocabulary.token_bytes is not None:
        return TableDetokenizer(vocabulary, hidden)
    return WindowDetokenizer(tokenizer, vocabulary, hidden, prompt)
