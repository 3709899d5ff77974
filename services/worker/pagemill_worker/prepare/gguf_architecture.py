"""Which architectures a GGUF file may hold, and how each maps to transformers: configuration and tensors.

A new architecture is a new entry of `ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.gguf_file import GgufFile, GgufTensor
from pagemill_worker.prepare.gguf_metadata import Metadata
from pagemill_worker.prepare.gguf_rope import longrope_parameters, rope_factors, rope_parameters

Shape = tuple[int, ...]
Config = dict[str, Any]
Layer = dict[str, tuple[str, Callable[[Config], Shape]]]


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor of the prepared model and where its rows come from."""

    name: str
    source: GgufTensor
    order: npt.NDArray[np.intp] | None = None
    """The file's row number of each prepared row; None keeps the order."""
    offset: float = 0.0
    """Subtracted from each element."""

    def rows(self) -> Iterator[npt.NDArray[np.float32]]:
        """The prepared rows as float32 chunks [rows, elements]; raises as `GgufTensor.rows`."""
        chunks = self.source.rows(self.order)
        return (chunk - np.float32(self.offset) for chunk in chunks) if self.offset else chunks


@dataclass(frozen=True, slots=True)
class Architecture:
    """One ``general.architecture`` of GGUF and its class in transformers."""

    model_type: str
    causal_lm: str
    layer: Layer
    """By name in the file without ``blk.N.``: name in transformers without ``model.layers.N.``, and shape."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """Entry of the configuration, and its value; the file does not name it."""
    biases: tuple[str, ...] = ()
    """The projections (names as in ``layer``, without ``.weight``) that have a bias."""
    layer_biases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By configuration key: the projections that then all have a bias."""
    rope_permuted: tuple[str, ...] = ()
    """Projections whose rows the file interleaves per head for its own rotary embedding."""
    norm_offset: float = 0.0
    """What the file's norms have more than those of transformers."""
    own: Callable[[GgufFile, Metadata, Config], Config] = lambda file, meta, config: {}
    """Entries of the configuration that the others do not have, from those that all have."""
    rope_tensors: tuple[str, ...] = ("rope_freqs.weight",)
    """What holds factors of rotary frequencies and no weights."""
    turns_parts: bool = False
    """Whether only a part of each head may be turned."""


def _query(config: Config) -> int:
    return int(config["num_attention_heads"] * config["head_dim"])


def _key(config: Config) -> int:
    return int(config["num_key_value_heads"] * config["head_dim"])


def _vector(name: str) -> tuple[str, Callable[[Config], Shape]]:
    return f"{name}.weight", lambda c: (c["hidden_size"],)


def _head_vector(name: str) -> tuple[str, Callable[[Config], Shape]]:
    return f"{name}.weight", lambda c: (c["head_dim"],)


_LAYER: Layer = {
    "attn_norm.weight": _vector("input_layernorm"),
    "attn_q.weight": ("self_attn.q_proj.weight", lambda c: (_query(c), c["hidden_size"])),
    "attn_k.weight": ("self_attn.k_proj.weight", lambda c: (_key(c), c["hidden_size"])),
    "attn_v.weight": ("self_attn.v_proj.weight", lambda c: (_key(c), c["hidden_size"])),
    "attn_output.weight": ("self_attn.o_proj.weight", lambda c: (c["hidden_size"], _query(c))),
    "ffn_norm.weight": _vector("post_attention_layernorm"),
    "ffn_gate.weight": ("mlp.gate_proj.weight", lambda c: (c["intermediate_size"], c["hidden_size"])),
    "ffn_up.weight": ("mlp.up_proj.weight", lambda c: (c["intermediate_size"], c["hidden_size"])),
    "ffn_down.weight": ("mlp.down_proj.weight", lambda c: (c["hidden_size"], c["intermediate_size"])),
}
_HEAD_NORMS: Layer = {
    "attn_q_norm.weight": _head_vector("self_attn.q_norm"),
    "attn_k_norm.weight": _head_vector("self_attn.k_norm"),
}
_SANDWICH: Layer = {
    **_LAYER,
    "post_attention_norm.weight": _vector("post_attention_layernorm"),
    "ffn_norm.weight": _vector("pre_feedforward_layernorm"),
    "post_ffw_norm.weight": _vector("post_feedforward_layernorm"),
}
_FUSED: Layer = {
    "attn_norm.weight": _LAYER["attn_norm.weight"],
    "attn_qkv.weight": ("self_attn.qkv_proj.weight", lambda c: (_query(c) + 2 * _key(c), c["hidden_size"])),
    "attn_output.weight": _LAYER["attn_output.weight"],
    "ffn_norm.weight": _LAYER["ffn_norm.weight"],
    "ffn_up.weight": ("mlp.gate_up_proj.weight", lambda c: (2 * c["intermediate_size"], c["hidden_size"])),
    "ffn_down.weight": _LAYER["ffn_down.weight"],
}
_LLAMA_BIASES = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}


def _rope(file: GgufFile, meta: Metadata, config: Config) -> Config:
    """One rotary embedding for all layers."""
    factors = rope_factors(file, "rope_freqs.weight")
    return {"rope_parameters": rope_parameters(meta, config["head_dim"], factors)}


def _smollm3(file: GgufFile, meta: Metadata, config: Config) -> Config:
    """Every fourth layer turns nothing; the file does not say so, llama.cpp knows."""
    return {"no_rope_layers": [int((index + 1) % 4 != 0) for index in range(config["num_hidden_layers"])]} | _rope(
        file, meta, config
    )


def _phi3(file: GgufFile, meta: Metadata, config: Config) -> Config:
    turned = meta.integer("rope.dimension_count", config["head_dim"])
    short, long = (rope_factors(file, f"rope_factors_{kind}.weight") for kind in ("short", "long"))
    return {
        **longrope_parameters(meta, turned, config["head_dim"], short, long),
        "sliding_window": meta.integer("attention.sliding_window", 0) or None,
    }


def _gemma(config: Config, largest: int) -> Config:
    """What Gemma 2 and 3 have in common. The file does not name the scale of attention: llama.cpp tells by the number
    of layers whether it is the largest model, whose scale is not that of its heads.

    Args:
        largest: layers of the largest model.
    """
    is_largest = config["num_hidden_layers"] == largest
    scale = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    return {"query_pre_attn_scalar": scale}


def _layer_types(config: Config, every: int) -> list[str]:
    """The last of ``every`` layers attends to all, the others to a window."""
    return [
        "sliding_attention" if (index + 1) % every else "full_attention" for index in range(config["num_hidden_layers"])
    ]


def _gemma2(file: GgufFile, meta: Metadata, config: Config) -> Config:
    return {
        **_gemma(config, largest=46),
        **_rope(file, meta, config),
        "layer_types": _layer_types(config, 2),
        "sliding_window": meta.integer("attention.sliding_window", 4096, minimum=1),
        "attn_logit_softcapping": meta.decimal("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.decimal("final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile, meta: Metadata, config: Config) -> Config:
    near = {"rope_type": "default", "rope_theta": meta.decimal("rope.freq_base_swa", 10000.0)}
    return {
        **_gemma(config, largest=62),
        "rope_parameters": {
            "full_attention": rope_parameters(meta, config["head_dim"], None, theta=1000000.0),
            "sliding_attention": near,
        },
        "layer_types": _layer_types(config, meta.integer("attention.sliding_window_pattern", 6, minimum=1)),
        "sliding_window": meta.integer("attention.sliding_window", minimum=1),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama",
        causal_lm="LlamaForCausalLM",
        layer=_LAYER,
        layer_biases=_LLAMA_BIASES,
        rope_permuted=("attn_q", "attn_k"),
        own=_rope,
    ),
    "qwen2": Architecture(
        model_type="qwen2",
        causal_lm="Qwen2ForCausalLM",
        layer=_LAYER,
        biases=("attn_q", "attn_k", "attn_v"),
        own=_rope,
    ),
    "qwen3": Architecture(model_type="qwen3", causal_lm="Qwen3ForCausalLM", layer={**_LAYER, **_HEAD_NORMS}, own=_rope),
    "smollm3": Architecture(
        model_type="smollm3",
        causal_lm="SmolLM3ForCausalLM",
        layer=_LAYER,
        layer_biases=_LLAMA_BIASES,
        rope_permuted=("attn_q", "attn_k"),
        own=_smollm3,
    ),
    "phi3": Architecture(
        model_type="phi3",
        causal_lm="Phi3ForCausalLM",
        layer=_FUSED,
        own=_phi3,
        rope_tensors=("rope_factors_long.weight", "rope_factors_short.weight"),
        turns_parts=True,
    ),
    "gemma2": Architecture(
        model_type="gemma2",
        causal_lm="Gemma2ForCausalLM",
        layer=_SANDWICH,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        norm_offset=1.0,
        own=_gemma2,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        causal_lm="Gemma3ForCausalLM",
        layer={**_SANDWICH, **_HEAD_NORMS},
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        norm_offset=1.0,
        own=_gemma3,
    ),
}


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
    if meta.integer("rope.dimension_count", head_dim) != head_dim and not architecture.turns_parts:
        raise ConfigurationError(f"{file.path} rotates only a part of each head, which is not supported")
    if meta.integer("attention.value_length", head_dim) != head_dim:
        raise ConfigurationError(f"{file.path} has keys and values of different length, which is not supported")
    key_heads = meta.integer("attention.head_count_kv", heads, minimum=1)
    if heads % key_heads:
        raise ConfigurationError(f"{file.path} is damaged: {heads} heads cannot share {key_heads} key heads evenly")
    layers = meta.integer("block_count", minimum=1)
    if layers > len(file.tensors):
        raise ConfigurationError(f"{file.path} is damaged: {layers} layers, but {len(file.tensors)} tensors")
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
        architecture.activation[0]: architecture.activation[1],
        "max_position_embeddings": meta.integer("context_length", minimum=1),
        "rms_norm_eps": meta.decimal("attention.layer_norm_rms_epsilon"),
        # The file holds an output projection only where it is not the embedding.
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_dropout": 0.0,
        "use_cache": True,
    }
    config |= architecture.own(file, meta, config)
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
    biased |= set(architecture.biases)
    for number in range(config["num_hidden_layers"]):
        for source, (target, shape) in architecture.layer.items():
            wanted[f"blk.{number}.{source}"] = (f"model.layers.{number}.{target}", shape(config))
            if source.removesuffix(".weight") in biased:
                bias = (f"model.layers.{number}.{target.removesuffix('.weight')}.bias", shape(config)[:1])
                wanted[f"blk.{number}.{source.removesuffix('.weight')}.bias"] = bias

    unknown = sorted(file.tensors.keys() - wanted.keys() - set(architecture.rope_tensors))
    if unknown:
        raise ConfigurationError(
            f"{file.path} holds tensors that {architecture.causal_lm} does not have: {', '.join(unknown[:3])}"
            + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
        )
    return [
        MappedTensor(
            target,
            _tensor(file, source, expected),
            _row_order(source, expected, architecture, config),
            architecture.norm_offset if source.endswith("norm.weight") else 0.0,
        )
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
