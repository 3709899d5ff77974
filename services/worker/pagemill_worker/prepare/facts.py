"""What the manifest says about a model, read from its prepared files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.json_file import read_json
from pagemill_worker.prepare.safetensors_stream import read_shapes

Json = dict[str, Any]

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "embedding.weight")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    architecture: str
    vocab_size: int
    max_model_len: int
    bos_token_id: int | None
    eos_token_ids: list[int]


def read_facts(folder: Path) -> ModelFacts:
    """The facts about the model whose files are in ``folder``.

    Raises:
        ConfigurationError: a fact that a server needs is not to be found in them.
    """
    outer = read_json(folder / "config.json")
    config: Json = {**outer, **outer.get("text_config", {})}  # models of text and images keep the text's part apart
    architectures = outer.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ConfigurationError(f"{folder / 'config.json'} names no architecture (`architectures`)")
    length = next((config[key] for key in _LENGTHS if isinstance(config.get(key), int)), None)
    if length is None:
        raise ConfigurationError(f"{folder / 'config.json'} names no context length (`max_position_embeddings`)")
    vocab_size = _embedding_rows(folder)
    generation = read_json(folder / "generation_config.json")
    tokenizer = _SpecialTokens(folder)
    sources = [
        (generation, "generation_config.json"),
        (config, "config.json"),
        (outer, "config.json"),
    ]
    ends = {token for source, name in sources for token in _token_ids(source, "eos_token_id", folder / name)}
    beginnings = [token for source, name in sources for token in _token_ids(source, "bos_token_id", folder / name)]
    if (eos := tokenizer.id_of("eos_token")) is not None:
        ends.add(eos)
    if (bos := tokenizer.id_of("bos_token")) is not None:
        beginnings.insert(0, bos)
    return ModelFacts(
        architecture=str(architectures[0]),
        vocab_size=vocab_size,
        max_model_len=length,
        # An id that the model has no row for is never generated and cannot be asked for.
        bos_token_id=next((token for token in beginnings if 0 <= token < vocab_size), None),
        eos_token_ids=sorted(token for token in ends if 0 <= token < vocab_size),
    )


def _token_ids(source: Json, key: str, path: Path) -> list[int]:
    value = source.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise ConfigurationError(f"{path}: {key} is {value!r}, neither a token id nor a list of them")
    return ids


class _SpecialTokens:
    """The tokens that the tokenizer's files give a role."""

    def __init__(self, folder: Path) -> None:
        self._named = {
            **read_json(folder / "special_tokens_map.json"),
            **{k: v for k, v in read_json(folder / "tokenizer_config.json").items() if v is not None},
        }
        tokenizer = read_json(folder / "tokenizer.json")
        vocabulary = tokenizer.get("model", {}).get("vocab", {})
        # Unigram lists (token, score) in the order of the ids.
        self._ids = dict(vocabulary) if isinstance(vocabulary, dict) else {t[0]: i for i, t in enumerate(vocabulary)}
        self._ids.update({token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])})

    def id_of(self, role: str) -> int | None:
        token = self._named.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        return self._ids.get(text)


def _embedding_rows(folder: Path) -> int:
    for path in sorted(folder.glob("*.safetensors")):
        for name, shape in read_shapes(path).items():
            if name.endswith(_EMBEDDINGS) and len(shape) == 2:
                return shape[0]
    raise ConfigurationError(f"{folder} holds no token embedding among its weights")
