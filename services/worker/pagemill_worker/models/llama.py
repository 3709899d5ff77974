"""The Llama architecture over one flattened token dimension: no batch, no padding, no attention mask.

All sequences of an iteration, prefill chunks and decode rows alike, stand behind each other; only the attention kernel
knows where one ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pagemill_kernels.interface import AttentionSpec, Kernels
from pagemill_shared.errors import ConfigurationError
from pagemill_worker.models.config import CacheDescription, ConfigReader
from pagemill_worker.models.rotary import RopeConfig, read_rope, rotary_tables
from pagemill_worker.models.weights import Weights


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes and variants of a Llama-like model. Names are those of transformers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool


def read_llama_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Raises ConfigurationError where config.json asks for what this file does not do."""
    reader = ConfigReader(config)
    activation = reader.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigurationError(f"config.json: hidden_act {activation!r} is not supported; supported is silu")
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigurationError(
            f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly"
        )
    head_dim = reader.integer("head_dim", hidden_size // num_heads)
    reader.integer("max_position_embeddings")
    return LlamaConfig(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=reader.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope=read_rope(config, head_dim),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        attention_bias=reader.flag("attention_bias", False),
        mlp_bias=reader.flag("mlp_bias", False),
    )


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Weights of one layer, [out, in] each, biases [out] or None."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class LlamaModel:
    """Llama and its like.

    Attributes:
        cache: what one token's keys and values take.
        vocab_size: columns of the logits.
        weight_bytes: bytes of all weights.
    """

    def __init__(
        self, config: LlamaConfig, weights: Weights, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        c = config
        self.config = config
        self.vocab_size = c.vocab_size
        self.cache = CacheDescription(c.num_layers, c.num_kv_heads, c.head_dim)
        self._spec = AttentionSpec(scale=c.head_dim**-0.5)
        self._embedding = weights.take("model.embed_tokens.weight", (c.vocab_size, c.hidden_size))
        self._layers = [_load_layer(config, weights, f"model.layers.{index}") for index in range(c.num_layers)]
        self._norm = weights.take("model.norm.weight", (c.hidden_size,))
        # A checkpoint that says its head is tied may still carry a copy of it, which transformers ignores, too.
        self._head = (
            self._embedding if c.tie_word_embeddings else weights.take("lm_head.weight", (c.vocab_size, c.hidden_size))
        )
        self._cosines, self._sines = rotary_tables(c.rope, max_model_len, dtype, device)

    @property
    def weight_bytes(self) -> int:
        tensors = [self._embedding, self._norm, *([] if self._head is self._embedding else [self._head])]
        for layer in self._layers:
            tensors += [t for t in (getattr(layer, name) for name in LlamaLayer.__slots__) if t is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def forward(self, token_ids: Tensor, positions: Tensor, cache: Tensor, kernels: Kernels[Any], step: Any) -> Tensor:
        """Computes all tokens of an iteration and writes their keys and values into the cache.

        Args:
            token_ids, positions: [T] int64.
            cache: as in ``pagemill_kernels.interface``.
            step: what ``kernels.prepare`` made for this iteration.

        Returns:
            [T, hidden_size] before the final norm.
        """
        c = self.config
        heads = c.num_heads + 2 * c.num_kv_heads
        size = (c.hidden_size,)
        rotary = (self._cosines[positions], self._sines[positions])
        hidden = functional.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = functional.rms_norm(hidden, size, layer.input_norm, c.rms_norm_eps)
            qkv = functional.linear(normed, layer.qkv, layer.qkv_bias).view(-1, heads, c.head_dim)
            kernels.rotate_and_write(qkv, rotary, cache, step, index)
            attended = kernels.attention(qkv[:, : c.num_heads], cache, step, index, self._spec)
            hidden = _add_linear(hidden, attended, layer.out, layer.out_bias)
            normed = functional.rms_norm(hidden, size, layer.post_norm, c.rms_norm_eps)
            gate, up = functional.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            hidden = _add_linear(hidden, functional.silu(gate).mul_(up), layer.down, layer.down_bias)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, vocab_size] float32 logits of [R, hidden_size] rows that ``forward`` returned."""
        normed = functional.rms_norm(hidden, (self.config.hidden_size,), self._norm, self.config.rms_norm_eps)
        return functional.linear(normed, self._head).float()


def _add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """residual + x @ weight.T (+ bias), the sum taken within the matrix product."""
    result = torch.addmm(residual, x, weight.t())
    return result if bias is None else result.add_(bias)


def _load_layer(config: LlamaConfig, weights: Weights, prefix: str) -> LlamaLayer:
    c = config
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention = [f"{prefix}.self_attn.{name}_proj" for name in ("q", "k", "v")]
    mlp = [f"{prefix}.mlp.{name}_proj" for name in ("gate", "up")]
    outs = (queries, keys, keys)

    def bias(name: str, size: int, present: bool) -> Tensor | None:
        return weights.take(f"{prefix}.{name}.bias", (size,)) if present else None

    def biases(names: list[str], sizes: tuple[int, ...], present: bool) -> Tensor | None:
        return weights.fuse([f"{name}.bias" for name in names], [(size,) for size in sizes]) if present else None

    return LlamaLayer(
        input_norm=weights.take(f"{prefix}.input_layernorm.weight", (c.hidden_size,)),
        qkv=weights.fuse([f"{name}.weight" for name in attention], [(out, c.hidden_size) for out in outs]),
        qkv_bias=biases(attention, outs, c.attention_bias),
        out=weights.take(f"{prefix}.self_attn.o_proj.weight", (c.hidden_size, queries)),
        out_bias=bias("self_attn.o_proj", c.hidden_size, c.attention_bias),
        post_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", (c.hidden_size,)),
        gate_up=weights.fuse([f"{name}.weight" for name in mlp], [(c.intermediate_size, c.hidden_size)] * 2),
        gate_up_bias=biases(mlp, (c.intermediate_size,) * 2, c.mlp_bias),
        down=weights.take(f"{prefix}.mlp.down_proj.weight", (c.hidden_size, c.intermediate_size)),
        down_bias=bias("mlp.down_proj", c.hidden_size, c.mlp_bias),
    )
