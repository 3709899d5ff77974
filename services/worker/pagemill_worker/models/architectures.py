"""Which architectures the fast path runs, and how each one's config.json becomes a description.

An architecture is a function in `ARCHITECTURES`. What they share is `_base`; a variant says in what it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.models.config import ConfigReader
from pagemill_worker.models.description import Activation, DecoderConfig, LayerConfig, LayerNames
from pagemill_worker.models.rotary import read_rope

Json = Mapping[str, Any]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

SANDWICH = LayerNames(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
"""A norm before and one behind."""


def _base(config: Json, *, tied: bool = False, theta: float = 10_000.0) -> DecoderConfig:
    """A decoder whose layers are all alike, without biases.

    Args:
        tied, theta: where config.json does not say; transformers leaves out what is its own default.
    """
    reader = ConfigReader(config)
    named = reader.get("hidden_act", "silu")
    if named not in ACTIVATIONS:
        raise ConfigurationError(
            f"config.json: hidden_act {named!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigurationError(
            f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly"
        )
    head_dim = reader.integer("head_dim", hidden_size // num_heads)
    reader.integer("max_position_embeddings")
    rope = read_rope(config, head_dim, theta)
    return DecoderConfig(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=(LayerConfig(None, rope),) * reader.integer("num_hidden_layers"),
        names=LayerNames(),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=reader.flag("tie_word_embeddings", tied),
        attention_scale=head_dim**-0.5,
        activation=ACTIVATIONS[named],
    )


def _llama(config: Json) -> DecoderConfig:
    reader = ConfigReader(config)
    attention_bias = reader.flag("attention_bias", False)
    return replace(
        _base(config), qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=reader.flag("mlp_bias", False)
    )


def _mistral(config: Json) -> DecoderConfig:
    # Where the entry is missing, transformers takes 4096; null means none.
    return _windowed(_base(config), _window(config, 4096))


def _qwen2(config: Json) -> DecoderConfig:
    return _some_windowed(replace(_base(config), qkv_bias=True), config)


def _qwen3(config: Json) -> DecoderConfig:
    bias = ConfigReader(config).flag("attention_bias", False)
    base = replace(_base(config), names=_with_head_norms(LayerNames()), qkv_bias=bias, out_bias=bias)
    return _some_windowed(base, config)


def _smollm3(config: Json) -> DecoderConfig:
    """Llama with layers whose queries and keys are not turned; windows, if any, are theirs."""
    reader = ConfigReader(config)
    bias = reader.flag("attention_bias", False)
    base = replace(
        _base(config, tied=True, theta=2_000_000.0),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=reader.flag("mlp_bias", False),
    )
    count = len(base.layers)
    interval = reader.integer("no_rope_layer_interval", 4)
    turned = _per_layer(config, "no_rope_layers", [int((index + 1) % interval != 0) for index in range(count)])
    window = _window(config, None) if reader.flag("use_sliding_window", False) else None
    types = _per_layer(config, "layer_types", [_type(window is not None and not turns) for turns in turned])
    return replace(
        base,
        layers=tuple(
            LayerConfig(window if kind == "sliding_attention" else None, layer.rope if turns else None)
            for layer, turns, kind in zip(base.layers, turned, _checked(types), strict=True)
        ),
    )


def _phi3(config: Json) -> DecoderConfig:
    names = LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    return _windowed(replace(_base(config), names=names), _window(config, None))


def _gemma(config: Json, theta: float = 10_000.0) -> DecoderConfig:
    """What Gemma 2 and 3 have in common."""
    reader = ConfigReader(config)
    if reader.flag("use_bidirectional_attention", False):
        raise ConfigurationError("config.json: use_bidirectional_attention is not supported: a server generates text")
    activation = reader.get("hidden_activation", "gelu_pytorch_tanh")  # hidden_act, if there, is not looked at
    base = _base({**config, "hidden_act": activation}, tied=True, theta=theta)
    bias = reader.flag("attention_bias", False)
    return replace(
        base,
        names=SANDWICH,
        qkv_bias=bias,
        out_bias=bias,
        attention_scale=reader.number("query_pre_attn_scalar", 256.0) ** -0.5,
        norm_offset=1.0,
        embedding_scale=base.hidden_size**0.5,
    )


def _gemma2(config: Json) -> DecoderConfig:
    base = replace(
        _gemma(config),
        attention_soft_cap=_soft_cap(config, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_soft_cap(config, "final_logit_softcapping", 30.0),
    )
    window = _window(config, 4096)
    types = _per_layer(config, "layer_types", [_type(index % 2 == 0) for index in range(len(base.layers))])
    return replace(
        base,
        layers=tuple(
            LayerConfig(window if kind == "sliding_attention" else None, layer.rope)
            for layer, kind in zip(base.layers, _checked(types), strict=True)
        ),
    )


def _gemma3(config: Json) -> DecoderConfig:
    base = replace(
        _gemma(config, theta=1_000_000.0),
        names=_with_head_norms(SANDWICH),
        # A cap of the scores, which its configuration can name, is not applied by transformers either.
        logit_soft_cap=_soft_cap(config, "final_logit_softcapping", None),
    )
    pattern = ConfigReader(config).integer("sliding_window_pattern", 6)
    count = len(base.layers)
    types = _per_layer(config, "layer_types", [_type((index + 1) % pattern != 0) for index in range(count)])
    window = _window(config, 4096)
    # Scaling, where there is any, is that of the layers without a window.
    near = {
        "max_position_embeddings": config["max_position_embeddings"],
        "rope_theta": config.get("rope_local_base_freq") or 10_000.0,
    }
    nested = config.get("rope_parameters")
    if isinstance(nested, Mapping) and isinstance(nested.get("sliding_attention"), Mapping):
        near["rope_parameters"] = nested["sliding_attention"]
    kinds: dict[str, LayerConfig] = {
        "full_attention": base.layers[0],
        "sliding_attention": LayerConfig(window, read_rope(near, base.head_dim)),
    }
    return replace(base, layers=tuple(kinds[kind] for kind in _checked(types)))


ARCHITECTURES: dict[str, Callable[[Json], DecoderConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "SmolLM3ForCausalLM": _smollm3,
    "Phi3ForCausalLM": _phi3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
}
"""By the name in config.json. Each raises ConfigurationError where it asks for what the decoder does not do."""


def _with_head_norms(names: LayerNames) -> LayerNames:
    return replace(names, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")


def _windowed(base: DecoderConfig, window: int | None) -> DecoderConfig:
    return replace(base, layers=tuple(replace(layer, window=window) for layer in base.layers))


def _some_windowed(base: DecoderConfig, config: Json) -> DecoderConfig:
    """Qwen's rule: no windows unless asked for; then from a layer on, or as ``layer_types`` says."""
    reader = ConfigReader(config)
    if not reader.flag("use_sliding_window", False):
        return base
    window, first = _window(config, 4096), config.get("max_window_layers", 28)
    types = _per_layer(
        config, "layer_types", [_type(window is not None and index >= first) for index in range(len(base.layers))]
    )
    return replace(
        base,
        layers=tuple(
            replace(layer, window=window if kind == "sliding_attention" else None)
            for layer, kind in zip(base.layers, _checked(types), strict=True)
        ),
    )


def _window(config: Json, default: int | None) -> int | None:
    window = config.get("sliding_window", default)
    if window is not None and (type(window) is not int or window < 1):
        raise ConfigurationError(f"config.json: sliding_window is {window!r}, not a positive integer")
    return window


def _soft_cap(config: Json, name: str, default: float | None) -> float | None:
    cap = config.get(name, default)
    if cap is None:
        return None
    if isinstance(cap, bool) or not isinstance(cap, int | float) or cap <= 0:
        raise ConfigurationError(f"config.json: {name} is {cap!r}, not a positive number")
    return float(cap)


def _per_layer(config: Json, name: str, default: list[Any]) -> list[Any]:
    values = config.get(name)
    if values is None:
        return default
    if not isinstance(values, list) or len(values) < len(default):
        raise ConfigurationError(f"config.json: {name} is not a list of one entry for each of {len(default)} layers")
    return values[: len(default)]


def _type(is_windowed: bool) -> str:
    return "sliding_attention" if is_windowed else "full_attention"


def _checked(types: list[Any]) -> list[str]:
    known = ("full_attention", "sliding_attention")
    other = next((kind for kind in types if kind not in known), None)
    if other is not None:
        raise ConfigurationError(
            f"config.json: layer type {other!r} is not supported; supported are {' and '.join(known)}"
        )
    return types
