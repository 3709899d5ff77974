"""The Llama architecture over one flattened token dimension: no batch, no padding, no attention mask.

All sequences of an iteration, prefill chunks and decode rows alike, stand behind each other; only the attention kernel
knows where one ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pagemill_kernels.interface import AttentionSpec, Kernels, Linear
from pagemill_kernels.linear import LinearFactory
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
    """Weights of one layer; queries, keys and values come from one product, gate and up from another."""

    input_norm: Tensor
    qkv: Linear
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """Llama and its like.

    Attributes:
        cache: what one token's keys and values take.
        vocab_size: columns of the logits.
        linear_name: what computes the matrix products.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        make: LinearFactory | None = None,
    ) -> None:
        c = config
        self.config = config
        self.vocab_size = c.vocab_size
        self.cache = CacheDescription(c.num_layers, c.num_kv_heads, c.head_dim)
        self._spec = AttentionSpec(scale=c.head_dim**-0.5)
        make = make or LinearFactory(dtype, device)
        self.linear_name = make.name
        embedding_shape = (c.vocab_size, c.hidden_size)
        self._embedding = weights.take("model.embed_tokens.weight", embedding_shape)
        self._layers = [_load_layer(config, weights, make, f"model.layers.{index}") for index in range(c.num_layers)]
        self._norm = weights.take("model.norm.weight", (c.hidden_size,))
        # A checkpoint that says its head is tied may still carry a copy of it, which transformers ignores, too.
        self._head = make(self._embedding if c.tie_word_embeddings else weights.take("lm_head.weight", embedding_shape))
        weights.refuse_unread(["rotary_emb.inv_freq", *(["lm_head.weight"] if c.tie_word_embeddings else [])])
        self._cosines, self._sines = rotary_tables(c.rope, max_model_len, dtype, device)

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
        rotary = (self._cosines[positions], self._sines[positions])
        hidden = functional.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = kernels.rms_norm(hidden, layer.input_norm, c.rms_norm_eps)
            qkv = layer.qkv(normed).view(-1, heads, c.head_dim)
            kernels.rotate_and_write(qkv, rotary, cache, step, index)
            attended = kernels.attention(qkv[:, : c.num_heads], cache, step, index, self._spec)
            hidden = layer.out(attended, hidden)
            normed = kernels.rms_norm(hidden, layer.post_norm, c.rms_norm_eps)
            hidden = layer.down(kernels.silu_mul(layer.gate_up(normed)), hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, vocab_size] float32 logits of [R, hidden_size] rows that ``forward`` returned."""
        normed = functional.rms_norm(hidden, (self.config.hidden_size,), self._norm, self.config.rms_norm_eps)
        return self._head(normed).float()


def _load_layer(config: LlamaConfig, weights: Weights, make: LinearFactory, prefix: str) -> LlamaLayer:
    c = config
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def linear(names: Sequence[str], outs: Sequence[int], inputs: int, has_bias: bool) -> Linear:
        modules = [f"{prefix}.{name}_proj" for name in names]
        weight = weights.fuse([f"{module}.weight" for module in modules], [(out, inputs) for out in outs])
        bias = weights.fuse([f"{module}.bias" for module in modules], [(out,) for out in outs]) if has_bias else None
        return make(weight, bias)

    attention = ("self_attn.q", "self_attn.k", "self_attn.v")
    return LlamaLayer(
        input_norm=weights.take(f"{prefix}.input_layernorm.weight", (c.hidden_size,)),
        qkv=linear(attention, (queries, keys, keys), c.hidden_size, c.attention_bias),
        out=linear(["self_attn.o"], [c.hidden_size], queries, c.attention_bias),
        post_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", (c.hidden_size,)),
        gate_up=linear(("mlp.gate", "mlp.up"), [c.intermediate_size] * 2, c.hidden_size, c.mlp_bias),
        down=linear(["mlp.down"], [c.hidden_size], c.intermediate_size, c.mlp_bias),
    )
