"""What each token id stands for, as bytes: the table behind detokenization and token-level log-probabilities.

Most tokenizers decode by joining per-token bytes: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece
pieces with byte fallback (Llama 2, Mistral, Gemma). For those a table is built once and checked against the tokenizer
itself; a tokenizer that does not decode like that has no table, and the detokenizer takes its general path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_BLANK = "\u2581"  # SentencePiece's lower one eighth block
_CHECKED_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids as bytes.

    Attributes:
        token_bytes: [V] bytes of each id when it stands within a text, None where tokens cannot be decoded one by one.
        texts: [V] the same as text, None for an id whose bytes are not whole characters.
        special_ids: ids that are control tokens, hidden from the text unless the request asks for them.
    """

    token_bytes: Sequence[bytes] | None
    texts: Sequence[str | None]
    special_ids: frozenset[int]


def build_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Reads the tokenizer's table once; takes some tens of milliseconds for 50,000 tokens."""
    special_ids = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    strings = [""] * (max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
    for string, index in tokenizer.get_vocab(with_added_tokens=True).items():
        strings[index] = string
    table = _token_bytes(strings, json.loads(tokenizer.to_str())["decoder"])
    if table is None or not _agrees(table, special_ids, tokenizer):
        return Vocabulary(None, (), special_ids)
    return Vocabulary(table, [_whole_text(data) for data in table], special_ids)


def _token_bytes(strings: Sequence[str], decoder: dict[str, Any] | None) -> list[bytes] | None:
    steps = _steps(decoder)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        alphabet = byte_level_alphabet()
        return [_byte_level(string, alphabet) for string in strings]
    if _joins_pieces(steps):
        return [_piece(string, any(step["type"] == "ByteFallback" for step in steps)) for string in strings]
    return None


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _joins_pieces(steps: list[dict[str, Any]]) -> bool:
    """Whether the decoder writes blanks for U+2581 and joins: Metaspace, or Replace with Fuse, ByteFallback, Strip.

    Strip takes one blank from the head of a whole text. Generated text goes on from a prompt and is never at the head.
    """
    if [step["type"] for step in steps] == ["Metaspace"]:
        return bool(steps[0].get("replacement") == _BLANK)
    replaces = [step for step in steps if step["type"] == "Replace"]
    others = {step["type"] for step in steps} - {"Replace", "Fuse", "ByteFallback", "Strip"}
    return not others and [(r["pattern"], r["content"]) for r in replaces] == [({"String": _BLANK}, " ")]


def byte_level_alphabet() -> dict[str, int]:
    """The printable characters that byte-level BPE writes for the 256 bytes: the published GPT-2 mapping."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in set(kept)]
    return {chr(byte): byte for byte in kept} | {chr(256 + n): byte for n, byte in enumerate(moved)}


def _byte_level(string: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[character] for character in string])
    except KeyError:  # an added token, which stands for itself
        return string.encode("utf-8", "replace")


def _piece(string: str, byte_fallback: bool) -> bytes:
    if byte_fallback and (match := _BYTE_TOKEN.match(string)):
        return bytes([int(match[1], 16)])
    return string.replace(_BLANK, " ").encode("utf-8", "replace")


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _agrees(table: Sequence[bytes], special_ids: frozenset[int], tokenizer: Tokenizer) -> bool:
    """Compares ids, evenly spread over the vocabulary, with the tokenizer's own decoder: each between two others, so
    that what happens at the head of a text alone does not count."""
    ordinary = [i for i, data in enumerate(table) if i not in special_ids and _whole_text(data)]
    ordinary = ordinary[:: max(1, len(ordinary) // _CHECKED_TOKENS)]
    if not ordinary:
        return False
    head = ordinary[0]
    decoded = tokenizer.decode_batch([[head, i, head] for i in ordinary], skip_special_tokens=False)
    context = tokenizer.decode([head], skip_special_tokens=False)
    for i, text in zip(ordinary, decoded, strict=True):
        expected = (table[i] + table[head]).decode("utf-8")
        if text != context + expected:
            return False
    return True
