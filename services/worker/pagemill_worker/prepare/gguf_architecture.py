"""Which architectures a GGUF file may hold, and how each maps to transformers: configuration and tensors.

A new architecture is a new entry of `ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.gguf_file import GgufFile, GgufTensor
from pagemill_worker.prepare.gguf_metadata import Metadata
from pagemill_worker.prepare.gguf_rope import rope_parameters

Shape = tuple[int, ...]
Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor of the prepared model and where its rows come from."""

    name: str
    source: GgufTensor
    order: npt.NDArray[np.intp] | None = None
    """The file's row number of each prepared row; None keeps the order."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One ``general.architecture`` of GGUF and its class in transformers."""

    model_type: str
    causal_lm: str
    layer: dict[str, tuple[str, Callable[[Config], Shape]]]
    """By name in the file without ``blk.N.``: name in transformers without ``model.layers.N.``, and shape."""
    layer_biases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By configuration key: the projections (names as in ``layer``, without ``.weight``) that then all have a bias."""
    rope_permuted: tuple[str, ...] = ()
    """Projections (as above) whose rows the file interleaves per head for its own rotary embedding."""


def _query(config: Config) -> int:
    return int(config["num_attention_heads"] * config["head_dim"])


def _key(config: Config) -> int:
    return int(config["num_key_value_heads"] * config["head_dim"])


_DECODER_LAYER: dict[str, tuple[str, Callable[[Config], Shape]]] = {
    "attn_norm.weight": ("input_layernorm.weight", lambda c: (c["hidden_size"],)),
    "attn_q.weight": ("self_attn.q_proj.weight", lambda c: (_query(c), c["hidden_size"])),
    "attn_k.weight": ("self_attn.k_proj.weight", lambda c: (_key(c), c["hidden_size"])),
    "attn_v.weight": ("self_attn.v_proj.weight", lambda c: (_key(c), c["hidden_size"])),
    "attn_output.weight": ("self_attn.o_proj.weight", lambda c: (c["hidden_size"], _query(c))),
    "ffn_norm.weight": ("post_attention_layernorm.weight", lambda c: (c["hidden_size"],)),
    "ffn_gate.weight": ("mlp.gate_proj.weight", lambda c: (c["intermediate_size"], c["hidden_size"])),
    "ffn_up.weight": ("mlp.up_proj.weight", lambda c: (c["intermediate_size"], c["hidden_size"])),
    "ffn_down.weight": ("mlp.down_proj.weight", lambda c: (c["hidden_size"], c["intermediate_size"])),
}

ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama",
        causal_lm="LlamaForCausalLM",
        layer=_DECODER_LAYER,
        layer_biases={
            "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
            "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
        },
        rope_permuted=("attn_q", "attn_k"),
    ),
}

_ROPE_FACTORS = "rope_freqs.weight"


def architecture_of(file: GgufFile) -> Architecture:
    """Raises: ConfigurationError: it is not one of `ARCHITECTURES`; the message names those."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigurationError(
            f"{file.path} holds a model of architecture {name!r}; supported in GGUF files: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def model_config(file: GgufFile, architecture: Architecture) -> Config:
    """The ``config.json`` that transformers loads as it is.

    Raises:
        ConfigurationError: the file lacks an entry, or asks for what the architecture's class does not do.
    """
    meta = Metadata(file, file.metadata["general.architecture"])
    if (parts := Metadata(file, "split").integer("count", 1)) > 1:
        raise ConfigurationError(f"{file.path} is one of {parts} parts of a split model: join them into one file first")
    if meta.integer("expert_count", 0):
        raise ConfigurationError(f"{file.path} is a mixture-of-experts model, which is not supported in GGUF files")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigurationError(f"{file.path} holds no token embedding (`token_embd.weight`)")
    heads, hidden = meta.integer("attention.head_count", minimum=1), meta.integer("embedding_length", minimum=1)
    head_dim = meta.integer("attention.key_length", 0) or meta.integer("rope.dimension_count", hidden // heads)
    if head_dim < 2 or head_dim % 2:
        raise ConfigurationError(f"{file.path} has heads of {head_dim} dimensions, which cannot be rotated in pairs")
    if meta.integer("rope.dimension_count", head_dim) != head_dim:
        raise ConfigurationError(f"{file.path} rotates only a part of each head, which is not supported")
    if meta.integer("attention.value_length", head_dim) != head_dim:
        raise ConfigurationError(f"{file.path} has keys and values of different length, which is not supported")
    key_heads = meta.integer("attention.head_count_kv", heads, minimum=1)
    if heads % key_heads:
        raise ConfigurationError(f"{file.path} is damaged: {heads} heads cannot share {key_heads} key heads evenly")
    layers = meta.integer("block_count", minimum=1)
    if layers > len(file.tensors):
        raise ConfigurationError(f"{file.path} is damaged: {layers} layers, but {len(file.tensors)} tensors")
    factors = file.tensors.get(_ROPE_FACTORS)
    config: Config = {
        "architectures": [architecture.causal_lm],
        "model_type": architecture.model_type,
        "dtype": "float32",
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": meta.integer("feed_forward_length", minimum=1),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": meta.integer("context_length", minimum=1),
        "rms_norm_eps": meta.decimal("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(
            meta, head_dim, None if factors is None else np.concatenate(list(factors.rows())).reshape(-1)
        ),
        # The file holds an output projection only where it is not the embedding.
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_dropout": 0.0,
        "use_cache": True,
    }
    for key, projections in architecture.layer_biases.items():
        config[key] = any(f"blk.0.{projection}.bias" in file.tensors for projection in projections)
    tokens = Metadata(file, "tokenizer.ggml")
    for key, entry in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("pad", "padding_token_id")):
        config[f"{key}_token_id"] = tokens.token_id(entry)
    return config


def map_tensors(file: GgufFile, architecture: Architecture, config: Config) -> list[MappedTensor]:
    """Every tensor of the prepared model, in the order of the layers.

    Raises:
        ConfigurationError: a tensor is missing, has another shape than the configuration says, or is not known.
    """
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    wanted = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocabulary, hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        wanted["output.weight"] = ("lm_head.weight", (vocabulary, hidden))
    biased = {name for key, names in architecture.layer_biases.items() if config[key] for name in names}
    for number in range(config["num_hidden_layers"]):
        for source, (target, shape) in architecture.layer.items():
            wanted[f"blk.{number}.{source}"] = (f"model.layers.{number}.{target}", shape(config))
            if source.removesuffix(".weight") in biased:
                bias = (f"model.layers.{number}.{target.removesuffix('.weight')}.bias", shape(config)[:1])
                wanted[f"blk.{number}.{source.removesuffix('.weight')}.bias"] = bias

    unknown = sorted(file.tensors.keys() - wanted.keys() - {_ROPE_FACTORS})
    if unknown:
        raise ConfigurationError(
            f"{file.path} holds tensors that {architecture.causal_lm} does not have: {', '.join(unknown[:3])}"
            + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
        )
    return [
        MappedTensor(target, _tensor(file, source, expected), _row_order(source, expected, architecture, config))
        for source, (target, expected) in wanted.items()
    ]


def _tensor(file: GgufFile, name: str, shape: Shape) -> GgufTensor:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise ConfigurationError(f"{file.path} lacks the tensor {name!r}")
    if tensor.shape != shape:
        raise ConfigurationError(
            f"{file.path}: tensor {name!r} has shape {list(tensor.shape)}, its metadata says {list(shape)}"
        )
    return tensor


def _row_order(name: str, shape: Shape, architecture: Architecture, config: Config) -> npt.NDArray[np.intp] | None:
    """GGUF pairs the rotated dimensions of a head as (0, 1), (2, 3), …; transformers pairs (0, d/2), (1, d/2 + 1), …"""
    projection, _, _ = name.removeprefix("blk.").partition(".")[2].rpartition(".")
    if projection not in architecture.rope_permuted:
        return None
    # A bias counts as rows of one element.
    pairs = np.arange(shape[0], dtype=np.intp).reshape(-1, config["head_dim"] // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)
