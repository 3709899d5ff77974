"""What the manifest says about a model, read from its prepared files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

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
    text = outer.get("text_config")  # models of text and images keep the text's part apart
    config: Json = {**outer, **text} if isinstance(text, dict) else outer
    architectures = outer.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ConfigurationError(f"{folder / 'config.json'} names no architecture (`architectures`)")
    length = next((config[key] for key in _LENGTHS if isinstance(config.get(key), int) and config[key] > 0), None)
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
    """The tokens that the tokenizer's files give a role. Loads the tokenizer, so that a damaged one is found now."""

    def __init__(self, folder: Path) -> None:
        self._roles = {
            **read_json(folder / "special_tokens_map.json"),
            **{k: v for k, v in read_json(folder / "tokenizer_config.json").items() if v is not None},
        }
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no other type
            raise ConfigurationError(f"{path.name} cannot be used: {error}") from None

    def id_of(self, role: str) -> int | None:
        token = self._roles.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        return self._tokenizer.token_to_id(text) if isinstance(text, str) else None


def _embedding_rows(folder: Path) -> int:
    for path in sorted(folder.glob("*.safetensors")):
        for name, shape in read_shapes(path).items():
            if name.endswith(_EMBEDDINGS) and len(shape) == 2:
                return shape[0]
    raise ConfigurationError(f"{folder} holds no token embedding among its weights")
