"""Decoders of the Llama kind over one flattened token dimension: no batch, no padding, no attention mask.

All sequences of an iteration, prefill chunks and decode rows alike, stand behind each other; only the attention kernel
knows where one ends. `description` says what a decoder is, `architectures` has those that there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pagemill_kernels.interface import AttentionSpec, Kernels, Linear
from pagemill_kernels.linear import LinearFactory
from pagemill_kernels.reference import TorchKernels
from pagemill_worker.models.config import CacheDescription
from pagemill_worker.models.description import DecoderConfig
from pagemill_worker.models.rotary import RopeConfig, rotary_tables
from pagemill_worker.models.weights import Weights

HARMLESS = ("rotary_emb.inv_freq",)
"""Endings of tensors that old checkpoints carry and nobody reads."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer; queries, keys and values come from one product, gate and up from another.

    Attributes:
        head_norms: [num_heads + num_kv_heads, head_dim], of the queries' heads and of the keys', or None.
    """

    attention: AttentionSpec
    rope: RopeConfig | None
    attention_norm: Tensor
    qkv: Linear
    head_norms: Tensor | None
    out: Linear
    attention_out_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    mlp_out_norm: Tensor | None


class DecoderModel:
    """A decoder as `DecoderConfig` describes it.

    Attributes:
        cache: what one token's keys and values take.
        vocab_size: columns of the logits.
        linear_name: what computes the matrix products.

    Args:
        kernels: what norms the last hidden states; plain torch by default.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        make: LinearFactory | None = None,
        kernels: Kernels[Any] | None = None,
    ) -> None:
        c = config
        self._kernels = kernels or TorchKernels()
        self.config = config
        self.vocab_size = c.vocab_size
        self.cache = CacheDescription(len(c.layers), c.num_kv_heads, c.head_dim)
        make = make or LinearFactory(dtype, device)
        load = _Loader(config, weights, make, max_model_len)
        embedding_shape = (c.vocab_size, c.hidden_size)
        self._embedding = weights.take("model.embed_tokens.weight", embedding_shape)
        self._embedding_scale = float(torch.tensor(c.embedding_scale, dtype=dtype))  # as transformers rounds it
        self._layers = [load.layer(index) for index in range(len(c.layers))]
        self._norm = load.norm("model.norm")
        # A checkpoint that says its head is tied may still carry a copy of it, which transformers ignores, too.
        head = "model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"
        blocks = weights.blocks([head], [embedding_shape]) if make.uses_blocks else None
        if blocks is not None and make.takes_blocks:
            self._head = make(blocks)
        else:
            weight = self._embedding if c.tie_word_embeddings else weights.take(head, embedding_shape)
            self._head = make(weight, stored=blocks)
        self.linear_name = make.name
        weights.refuse_unread([*HARMLESS, *(["lm_head.weight"] if c.tie_word_embeddings else [])])
        self._rotary = {
            rope: rotary_tables(rope, max_model_len, dtype, device)
            for rope in dict.fromkeys(layer.rope for layer in c.layers)
            if rope is not None
        }

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
        eps, heads = c.rms_norm_eps, c.num_heads + 2 * c.num_kv_heads
        activate = {"silu": kernels.silu_mul, "gelu": kernels.gelu_mul, "gelu_tanh": kernels.gelu_tanh_mul}[
            c.activation
        ]
        rotary: dict[RopeConfig | None, tuple[Tensor, Tensor] | None] = {
            rope: (cosines[positions], sines[positions]) for rope, (cosines, sines) in self._rotary.items()
        }
        rotary[None] = None
        hidden = functional.embedding(token_ids, self._embedding)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(kernels.rms_norm(hidden, layer.attention_norm, eps)).view(-1, heads, c.head_dim)
            if layer.head_norms is not None:
                kernels.norm_heads(qkv, layer.head_norms, eps)
            kernels.rotate_and_write(qkv, rotary[layer.rope], cache, step, index)
            attended = kernels.attention(qkv[:, : c.num_heads], cache, step, index, layer.attention)
            if layer.attention_out_norm is None:
                hidden = layer.out(attended, hidden)
            else:
                hidden = hidden + kernels.rms_norm(layer.out(attended), layer.attention_out_norm, eps)
            gated = activate(layer.gate_up(kernels.rms_norm(hidden, layer.mlp_norm, eps)))
            if layer.mlp_out_norm is None:
                hidden = layer.down(gated, hidden)
            else:
                hidden = hidden + kernels.rms_norm(layer.down(gated), layer.mlp_out_norm, eps)
        return hidden

    def final(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] after the final norm, of rows that ``forward`` returned: transformers' last hidden state."""
        return self._kernels.rms_norm(hidden, self._norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, vocab_size] float32 logits of [R, hidden_size] rows that ``forward`` returned."""
        logits = self._head(self.final(hidden)).float()
        cap = self.config.logit_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class _Loader:
    """Takes a decoder's layers out of a checkpoint."""

    def __init__(self, config: DecoderConfig, weights: Weights, make: LinearFactory, max_model_len: int) -> None:
        self._config, self._weights, self._make = config, weights, make
        self._max_model_len = max_model_len

    def layer(self, index: int) -> DecoderLayer:
        c, names, prefix = self._config, self._config.names, f"model.layers.{index}"
        window, rope = c.layers[index].window, c.layers[index].rope
        if window is not None and window >= self._max_model_len:
            window = None  # it never hides anything
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

        def norm(name: str | None) -> Tensor | None:
            return None if name is None else self.norm(f"{prefix}.{name}")

        return DecoderLayer(
            attention=AttentionSpec(c.attention_scale, window, c.attention_soft_cap),
            rope=rope,
            attention_norm=self.norm(f"{prefix}.{names.attention_norm}"),
            qkv=self._linear(prefix, names.qkv, (queries, keys, keys), c.hidden_size, c.qkv_bias),
            head_norms=self._head_norms(prefix),
            out=self._linear(prefix, (names.out,), (c.hidden_size,), queries, c.out_bias),
            attention_out_norm=norm(names.attention_out_norm),
            mlp_norm=self.norm(f"{prefix}.{names.mlp_norm}"),
            gate_up=self._linear(prefix, names.gate_up, (c.intermediate_size,) * 2, c.hidden_size, c.mlp_bias),
            down=self._linear(prefix, (names.down,), (c.hidden_size,), c.intermediate_size, c.mlp_bias),
            mlp_out_norm=norm(names.mlp_out_norm),
        )

    def norm(self, name: str) -> Tensor:
        """[hidden_size] of the module ``name``."""
        return self._with_offset(self._weights.take(f"{name}.weight", (self._config.hidden_size,)))

    def _head_norms(self, prefix: str) -> Tensor | None:
        c = self._config
        if c.names.query_norm is None or c.names.key_norm is None:
            return None
        query, key = (
            self._weights.take(f"{prefix}.{name}.weight", (c.head_dim,))
            for name in (c.names.query_norm, c.names.key_norm)
        )
        return self._with_offset(torch.cat((query.expand(c.num_heads, -1), key.expand(c.num_kv_heads, -1))))

    def _with_offset(self, weight: Tensor) -> Tensor:
        """In float32 where something is added: 1 + w in bfloat16 would lose most of w."""
        return weight.float() + self._config.norm_offset if self._config.norm_offset else weight

    def _linear(self, prefix: str, names: Sequence[str], outs: Sequence[int], inputs: int, has_bias: bool) -> Linear:
        if len(names) == 1:
            outs = [sum(outs)]
        modules = [f"{prefix}.{name}" for name in names]
        matrix = [f"{module}.weight" for module in modules], [(out, inputs) for out in outs]
        bias = (
            self._weights.fuse([f"{module}.bias" for module in modules], [(out,) for out in outs]) if has_bias else None
        )
        blocks = self._weights.blocks(*matrix) if self._make.uses_blocks else None
        if blocks is not None and self._make.takes_blocks:
            return self._make(blocks, bias)
        return self._make(self._weights.fuse(*matrix), bias, blocks)
