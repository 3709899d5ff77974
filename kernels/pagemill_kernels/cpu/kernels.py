"""The compiled kernels behind the interface; plain torch serves the shapes that they do not."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pagemill_kernels.blocks import BlockMatrix
from pagemill_kernels.cpu.library import CACHE_DTYPES, DTYPES, Batch
from pagemill_kernels.cpu.linear import BlockLinear, Int8Linear, PackedLinear
from pagemill_kernels.cpu.narrow import narrow_linear
from pagemill_kernels.cpu.pages import LargePages
from pagemill_kernels.interface import (
    AttentionBatch,
    AttentionSpec,
    Kernels,
    Linear,
    Quantization,
    entry_elements,
)
from pagemill_kernels.reference import TorchKernels, TorchStep

MOST_HEAD_DIM = 512


@dataclass(slots=True)
class CpuStep:
    """What CpuKernels prepares for an iteration.

    Attributes:
        batch: keeps alive what ``native`` points to.
        native: None where the compiled kernels do not serve this cache.
        plain: what plain torch needs, made when it is first needed.
        rotary, rotary_pointers: the tables that were checked last; all layers bring the same.
    """

    batch: AttentionBatch
    native: Batch | None
    plain: TorchStep | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    rotary_pointers: tuple[int, int, int] = (0, 0, 0)


class CpuKernels(Kernels[CpuStep]):
    """Compiled kernels for contiguous tensors of float32, float16 and bfloat16 whose heads fill whole vectors.

    ``calls`` counts under ``<method>:torch`` what plain torch did in their place.
    """

    def __init__(self, library: ctypes.CDLL, isa: str) -> None:
        super().__init__()
        self.name = f"cpu-{isa}"
        self._torch = TorchKernels()
        self._lanes: int = library.pm_lanes()
        self._library, self._pages = library, LargePages()
        self._rotate, self._attend, self._copy = (
            library.pm_rotate_and_write,
            library.pm_attention,
            library.pm_copy_blocks,
        )
        self._norm, self._head_norm = library.pm_rms_norm, library.pm_norm_heads
        self._silu, self._gelu_tanh = library.pm_silu_mul, library.pm_gelu_tanh_mul
        self._workspace: int = library.pm_workspace_new()
        weakref.finalize(self, library.pm_workspace_free, self._workspace)

    def serves_cache(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
        return cache_dtype in CACHE_DTYPES

    def prepare(self, batch: AttentionBatch, cache: Tensor) -> CpuStep:
        _, layers, _, block_size, kv_heads, entry = cache.shape
        head_dim = entry - entry_elements(0, cache.dtype)
        served = cache.dtype in CACHE_DTYPES and head_dim % self._lanes == 0 and head_dim <= MOST_HEAD_DIM
        if not served or not cache.is_contiguous():
            return CpuStep(batch, None)
        arrays = [batch.query_starts, batch.context_lens, batch.block_tables, batch.slot_mapping]
        if batch.generated_from is not None:
            arrays.append(batch.generated_from)
        if not all(array.dtype == torch.int64 and array.is_contiguous() for array in arrays):
            arrays = [array.to(torch.int64).contiguous() for array in arrays]
            query_starts, context_lens, tables, slots, *generated = arrays
            batch = AttentionBatch(query_starts, context_lens, tables, slots, batch.num_decodes, None, *generated)
        native = Batch(
            *(array.data_ptr() for array in arrays[:4]),
            None if batch.generated_from is None else batch.generated_from.data_ptr(),
            cache.data_ptr(),
            batch.context_lens.numel(),
            batch.block_tables.shape[1],
            layers,
            block_size,
            kv_heads,
            head_dim,
            CACHE_DTYPES[cache.dtype],
            torch.get_num_threads(),
        )
        return CpuStep(batch, native)

    def rotate_and_write(
        self, qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, cache: Tensor, step: CpuStep, layer: int
    ) -> None:
        dtype = DTYPES.get(qkv.dtype)
        if rotary is not step.rotary:
            step.rotary, step.rotary_pointers = rotary, _rotary_pointers(rotary, qkv.dtype)
        cosines, sines, width = step.rotary_pointers
        if step.native is None or dtype is None or not qkv.is_contiguous() or width < 0:
            self.calls["rotate_and_write:torch"] += 1
            return self._torch.rotate_and_write(qkv, rotary, cache, self._plain(step, cache), layer)
        self.calls["rotate_and_write"] += 1
        self._rotate(step.native, qkv.data_ptr(), dtype, qkv.shape[1], cosines, sines, width, layer)
        return None

    def attention(self, query: Tensor, cache: Tensor, step: CpuStep, layer: int, spec: AttentionSpec) -> Tensor:
        tokens, heads, head_dim = query.shape
        dtype = DTYPES.get(query.dtype)
        if step.native is None or dtype is None or query.stride()[1:] != (head_dim, 1):
            self.calls["attention:torch"] += 1
            return self._torch.attention(query, cache, self._plain(step, cache), layer, spec)
        self.calls["attention"] += 1
        out = query.new_empty(tokens, heads * head_dim)
        self._attend(
            self._workspace,
            step.native,
            query.data_ptr(),
            query.stride(0),
            dtype,
            heads,
            layer,
            spec.scale,
            spec.window or 0,
            spec.soft_cap or 0.0,
            out.data_ptr(),
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype = DTYPES.get(x.dtype)
        if dtype is None or weight.dtype != x.dtype or not (x.is_contiguous() and weight.is_contiguous()):
            self.calls["rms_norm:torch"] += 1
            return super().rms_norm(x, weight, eps)
        self.calls["rms_norm"] += 1
        out = torch.empty_like(x)
        rows, size = x.shape
        threads = torch.get_num_threads()
        self._norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), dtype, rows, size, eps, threads)
        return out

    def norm_heads(self, qkv: Tensor, weights: Tensor, eps: float) -> None:
        dtype = DTYPES.get(qkv.dtype)
        if dtype is None or weights.dtype != qkv.dtype or not (qkv.is_contiguous() and weights.is_contiguous()):
            self.calls["norm_heads:torch"] += 1
            return super().norm_heads(qkv, weights, eps)
        self.calls["norm_heads"] += 1
        heads, size = weights.shape
        threads = torch.get_num_threads()
        self._head_norm(qkv.data_ptr(), weights.data_ptr(), dtype, *qkv.shape[:2], heads, size, eps, threads)
        return None

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gated = self._gated(self._silu, gate_up)
        self.calls["silu_mul:torch" if gated is None else "silu_mul"] += 1
        return super().silu_mul(gate_up) if gated is None else gated

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        gated = self._gated(self._gelu_tanh, gate_up)
        self.calls["gelu_tanh_mul:torch" if gated is None else "gelu_tanh_mul"] += 1
        return super().gelu_tanh_mul(gate_up) if gated is None else gated

    def _gated(self, run: Callable[..., None], gate_up: Tensor) -> Tensor | None:
        """None where the compiled kernel does not serve ``gate_up``."""
        dtype = DTYPES.get(gate_up.dtype)
        if dtype is None or not gate_up.is_contiguous():
            return None
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        run(gate_up.data_ptr(), out.data_ptr(), dtype, rows, size, torch.get_num_threads())
        return out

    def own_linear(
        self, dtype: torch.dtype, quantization: Quantization = "none"
    ) -> Callable[[Tensor, Tensor | None], Linear] | None:
        if dtype != torch.float32:
            return None
        return partial(Int8Linear if quantization == "int8" else PackedLinear, self._library)

    def block_linear(self, dtype: torch.dtype) -> Callable[[BlockMatrix, Tensor | None], Linear] | None:
        return partial(BlockLinear, self._library) if dtype == torch.float32 else None

    def narrow_linear(
        self, dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor | None, BlockMatrix | None], Linear | None] | None:
        return partial(narrow_linear, self._library, self._pages) if dtype == torch.float32 else None

    def copy_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> int:
        on_cpu = source.device.type == destination.device.type == pairs.device.type == "cpu"
        if not (
            on_cpu and source.is_contiguous() and destination.is_contiguous() and source.dtype == destination.dtype
        ):
            self.calls["copy_blocks:torch"] += 1
            return self._torch.copy_blocks(source, destination, pairs)
        self.calls["copy_blocks"] += 1
        pairs = pairs.to(torch.int64).contiguous()
        block_bytes = source[0].numel() * source.element_size() if source.shape[0] else 0
        self._copy(
            source.data_ptr(),
            destination.data_ptr(),
            pairs.data_ptr(),
            pairs.shape[0],
            block_bytes,
            torch.get_num_threads(),
        )
        return pairs.shape[0] * block_bytes

    def _plain(self, step: CpuStep, cache: Tensor) -> TorchStep:
        if step.plain is None:
            step.plain = self._torch.prepare(step.batch, cache)
        return step.plain


def _rotary_pointers(rotary: tuple[Tensor, Tensor] | None, dtype: torch.dtype) -> tuple[int, int, int]:
    """Addresses of both tables and the rotary dimension: 0 for none, -1 for tables that the kernels cannot read."""
    if rotary is None:
        return 0, 0, 0
    cosines, sines = rotary
    readable = all(table.dtype == dtype and table.is_contiguous() for table in rotary)
    width = cosines.shape[-1] if readable and cosines.shape[-1] % 2 == 0 else -1
    return cosines.data_ptr(), sines.data_ptr(), width
