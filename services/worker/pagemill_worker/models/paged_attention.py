"""Paged attention for transformers' models: what their attention modules call in place of transformers' own.

transformers looks an attention function up by name and calls it with queries, keys and values that are ready, rotary
embedding included. Ours writes keys and values into the cache and attends over the cache. What it needs beyond its
arguments stands on the module that calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from pagemill_kernels.interface import AttentionSpec, Kernels
from pagemill_worker.models.config import CacheDescription

NAME = "pagemill"
"""By which transformers knows it."""


class UnsupportedError(Exception):
    """Why a model cannot be run; completes "it …"."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of a forward pass, the same in every pass.

    Attributes:
        key_heads, key_dim: of the keys. Queries have ``heads`` of that size.
        value_dim: of the values.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    spec: AttentionSpec


class PagedAttention:
    """The attention of one model; its calls, in the order in which they come, are the layers of the cache.

    Records the calls of a first forward pass, which computes nothing of use; serves every later one.
    """

    def __init__(self, model: nn.Module, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._calls: list[AttentionCall] = []
        self._next = 0
        self._run: tuple[Tensor, Kernels[Any], Any] | None = None
        for module in model.modules():
            module.pagemill_attention = self  # type: ignore[assignment]

    def description(self) -> CacheDescription:
        """What the recorded calls need of the cache.

        Raises:
            UnsupportedError: they do not agree on one layout.
        """
        if not self._calls:
            raise UnsupportedError("never calls transformers' attention interface")
        first = self._calls[0]
        for index, call in enumerate(self._calls):
            if call.value_dim != call.key_dim:
                raise UnsupportedError(
                    f"has keys of {call.key_dim} and values of {call.value_dim} elements (multi-head latent attention?)"
                )
            if (call.key_heads, call.key_dim) != (first.key_heads, first.key_dim):
                raise UnsupportedError(
                    f"has {first.key_heads} key heads of {first.key_dim} elements in its first layer, but "
                    f"{call.key_heads} of {call.key_dim} in layer {index}"
                )
        return CacheDescription(len(self._calls), first.key_heads, first.key_dim)

    def windows(self) -> list[int | None]:
        """Of each layer."""
        return [call.spec.window for call in self._calls]

    def begin(self, cache: Tensor, kernels: Kernels[Any], step: Any) -> None:
        """The next forward pass is that of ``step``."""
        self._run, self._next = (cache, kernels, step), 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """[1, T, heads, head_dim] of queries, keys and values, each [1, heads, T, head_dim]."""
        if self._run is None:
            self._calls.append(AttentionCall(query.shape[1], key.shape[1], key.shape[3], value.shape[3], spec))
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        cache, kernels, step = self._run
        layer, self._next = self._next, self._next + 1
        if spec.window is not None and spec.window >= self._max_model_len:
            spec = AttentionSpec(spec.scale, None, spec.soft_cap)  # it never hides anything
        qkv = torch.cat((query[0], key[0], value[0])).transpose(0, 1).contiguous()
        kernels.rotate_and_write(qkv, None, cache, step, layer)
        attended = kernels.attention(qkv[:, : query.shape[1]], cache, step, layer, spec)
        return attended.view(1, query.shape[2], query.shape[1], -1)


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it. No mask comes: it makes none for functions that it does not know."""
    attention: PagedAttention = module.pagemill_attention  # type: ignore[assignment]
    if s_aux is not None:
        raise UnsupportedError("has attention sinks")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise UnsupportedError("lets tokens attend to what follows them")
    if attention_mask is not None:
        raise UnsupportedError("has a mask of its own")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise UnsupportedError("attends to more than the sequence that it computes")
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    return attention.attend(query, key, value, AttentionSpec(scale, sliding_window, softcap)), None


AttentionInterface.register(NAME, _paged_attention)
