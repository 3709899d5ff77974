"""The tokenizer of a GGUF file as ``tokenizer.json``, ``tokenizer_config.json`` and chat templates.

``tokenizer.json`` is written as plain JSON, in the format of the ``tokenizers`` library, so that equal files give equal
bytes whichever version of the library is installed. GGUF names its tokenizers after llama.cpp: ``gpt2`` is byte-level
BPE with one of several pre-tokenizers, ``llama`` is SentencePiece BPE with scores in place of merges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.gguf_file import GgufFile
from pagemill_worker.prepare.gguf_metadata import Metadata
from pagemill_worker.prepare.pre_tokenizers import PRE_TOKENIZERS

Json = dict[str, Any]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "▁"  # how SentencePiece spells a space


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    tokenizer: Json
    """Content of ``tokenizer.json``."""
    config: Json
    """Content of ``tokenizer_config.json``."""
    templates: dict[str, str]
    """Chat templates by name; ``default`` is the main one."""


def read_tokenizer(file: GgufFile, max_length: int) -> GgufTokenizer:
    """The tokenizer that ``file`` describes.

    Args:
        max_length: the model's context in tokens.

    Raises:
        ConfigurationError: the file holds none, a damaged one, or one of a kind that is not supported.
    """
    meta = Metadata(file, "tokenizer.ggml")
    kind = meta.text("model")
    if kind not in _KINDS:
        raise ConfigurationError(f"{file.path} has a tokenizer of kind {kind!r}; supported: {', '.join(_KINDS)}")
    vocabulary = _Vocabulary.read(meta)
    parts, adds_bos = _KINDS[kind](meta, vocabulary)
    named = {role: vocabulary.tokens[token] for role, token in _roles(meta).items()}
    adds_bos = meta.flag("add_bos_token", adds_bos) and "bos" in named
    adds_eos = meta.flag("add_eos_token", False) and "eos" in named
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": token for name, token in named.items()},
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    around = ([named["bos"]] if adds_bos else [], [named["eos"]] if adds_eos else [])
    tokenizer: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        **parts,
        "post_processor": _template_processing(*around, vocabulary.ids()) if any(around) else None,
    }
    return GgufTokenizer(tokenizer, config, _templates(file))


def _roles(meta: Metadata) -> dict[str, int]:
    """Token ids by transformers' names."""
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    found = {role: meta.token_id(f"{key}_token_id") for role, key in keys.items()}
    return {role: token for role, token in found.items() if token is not None}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    kinds: list[int]

    @classmethod
    def read(cls, meta: Metadata) -> _Vocabulary:
        tokens = meta.list_of(str, "tokens")
        kinds = list(meta.list_of(int, "token_type", [_NORMAL] * len(tokens)))
        if len(kinds) != len(tokens):
            raise ConfigurationError(f"{meta.path} is damaged: {len(tokens)} tokens but {len(kinds)} token types")
        for role, token in _roles(meta).items():
            if kinds[token] == _UNUSED:
                raise ConfigurationError(f"{meta.path} is damaged: its {role} token {token} is marked as unused")
            if kinds[token] == _NORMAL:  # transformers takes every token with a role as special, whatever its mark
                kinds[token] = _CONTROL
        vocabulary = cls(tokens, kinds)
        if len(vocabulary.ids()) != len(tokens) - kinds.count(_UNUSED):
            raise ConfigurationError(f"{meta.path} is damaged: its vocabulary has the same token twice")
        return vocabulary

    def ids(self) -> dict[str, int]:
        """Without the unused tokens, which only fill up the embedding."""
        return {
            token: i for i, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)) if kind != _UNUSED
        }

    def added_tokens(self) -> list[Json]:
        """Tokens that are found in the text before anything else is done to it."""
        return [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != _USER_DEFINED,
            }
            for i, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN)
        ]


def _byte_level(meta: Metadata, vocabulary: _Vocabulary) -> tuple[Json, bool]:
    name = meta.text("pre", "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise ConfigurationError(
            f"{meta.path} has the pre-tokenizer {name!r}; supported: {', '.join(PRE_TOKENIZERS)}"
            + (" (the file comes from an old converter, which did not say)" if name == "default" else "")
        )
    merges = [merge.split(" ") for merge in meta.list_of(str, "merges")]
    ids = vocabulary.ids()
    for merge in merges:
        if len(merge) != 2 or merge[0] not in ids or merge[1] not in ids or "".join(merge) not in ids:
            raise ConfigurationError(f"{meta.path} is damaged: {' '.join(merge)!r} merges no two tokens to a third")
    parts: Json = {
        "normalizer": pre.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre.steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": _bpe(ids, merges, ignore_merges=pre.whole_words),
    }
    return parts, pre.adds_bos


def _sentencepiece(meta: Metadata, vocabulary: _Vocabulary) -> tuple[Json, bool]:
    scores = meta.list_of(float, "scores")
    if len(scores) != len(vocabulary.tokens):
        raise ConfigurationError(f"{meta.path} is damaged: {len(vocabulary.tokens)} tokens but {len(scores)} scores")
    unknown = meta.token_id("unknown_token_id")
    prefix = meta.flag("add_space_prefix", True)
    spelled: Json = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    steps: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    parts: Json = {
        # llama.cpp begins every stretch of text between special tokens with a space, and so does this.
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, spelled]}
        if prefix
        else spelled,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": _bpe(
            vocabulary.ids(),
            _merges_by_score(vocabulary, scores),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }
    return parts, True


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _merges_by_score(vocabulary: _Vocabulary, scores: list[float]) -> list[list[str]]:
    """SentencePiece joins the two neighbours whose whole has the highest score: every way to make a token of two
    others, best token first."""
    usable = {
        token: i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (_NORMAL, _USER_DEFINED)
    }
    merges: list[tuple[float, int, list[str]]] = []
    for token, i in usable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                merges.append((-scores[i], i, [left, right]))
    merges.sort(key=lambda merge: merge[:2])
    return [pair for _, _, pair in merges]


def _bpe(
    ids: dict[str, int],
    merges: list[list[str]],
    *,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": ids,
        "merges": merges,
    }


def _template_processing(before: list[str], after: list[str], ids: dict[str, int]) -> Json:
    def special(tokens: list[str], sequence: int) -> list[Json]:
        return [{"SpecialToken": {"id": token, "type_id": sequence}} for token in tokens]

    def text(name: str, sequence: int) -> list[Json]:
        return [
            *special(before, sequence),
            {"Sequence": {"id": name, "type_id": sequence}},
            *special(after, sequence),
        ]

    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": text("A", 0) + text("B", 1),
        "special_tokens": {
            token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in dict.fromkeys(before + after)
        },
    }


def _templates(file: GgufFile) -> dict[str, str]:
    meta = Metadata(file, "tokenizer")
    named = {name: meta.text(f"chat_template.{name}") for name in meta.list_of(str, "chat_templates", [])}
    default = meta.text("chat_template", "")
    return {**named, **({"default": default} if default else {})}
