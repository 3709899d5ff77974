"""How byte-level vocabularies cut text into words before merging, by GGUF's ``tokenizer.ggml.pre``.

Each is the ``pre_tokenizer`` that the model's own ``tokenizer.json`` has; GGUF keeps only a name for it. A new one is a
new entry of `PRE_TOKENIZERS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    steps: list[Json]
    whole_words: bool = False
    """A word that is a token is that token, whatever the merges say."""
    adds_bos: bool = False
    """Whether texts begin with the BOS token when the file does not say."""
    normalizer: Json | None = None


def _byte_level(*, split_words: bool) -> Json:
    """``split_words`` applies GPT-2's own expression."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split_words}


def _split(expression: str) -> list[Json]:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(split_words=False)]


_GPT2 = PreTokenizer([_byte_level(split_words=True)])
_SINGLE_DIGITS = PreTokenizer([{"type": "Digits", "individual_digits": True}, _byte_level(split_words=True)])
_LLAMA3_WORDS = PreTokenizer(_split(_LLAMA3), whole_words=True, adds_bos=True)

PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3_WORDS,
    "llama3": _LLAMA3_WORDS,
    "llama-v3": _LLAMA3_WORDS,
    "falcon3": _LLAMA3_WORDS,
    "smaug-bpe": PreTokenizer(_split(_LLAMA3)),
    "dbrx": PreTokenizer(_split(_LLAMA3)),  # Phi-4
    "gpt-4o": PreTokenizer(_split(_GPT4O)),  # Phi-4-mini
    "tekken": PreTokenizer(_split(_TEKKEN), whole_words=True, adds_bos=True),
    "qwen2": PreTokenizer(_split(_QWEN2), normalizer={"type": "NFC"}),
}
