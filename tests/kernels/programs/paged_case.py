"""Cases for the Triton kernels and the device that they run on: a GPU, or the CPU under Triton's interpreter.

The programs beside this file are test files that `test_triton.py` runs under the interpreter, in a process of their
own, and that `scripts/gpu_check.sh` runs on a GPU.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagemill_kernels.gpu.kernels import TritonKernels, TritonStep
from pagemill_kernels.interface import LARGEST_NUMBER, SCALE_BYTES, AttentionBatch, AttentionSpec
from pagemill_kernels.reference import TorchKernels, quantised_entries

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
WORST = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest ||out - expected|| / ||expected|| of one token and head that rounding explains."""
PROCESSORS, CAPABILITY = 132, 90


def mend_interpreter() -> None:
    """Triton's interpreter multiplies the bit patterns of bfloat16 matrices; this widens them first. What overflows to
    infinity in exp2 is meant to."""
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    np.seterr(over="ignore")
    multiply = InterpreterBuilder.create_dot

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar.name != "bf16":
            return handle
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return TensorHandle(wide, interpreter.tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widen(a), widen(b), *rest)

    InterpreterBuilder.create_dot = create_dot


if IS_INTERPRETED:
    torch.set_num_threads(1)
    mend_interpreter()


def exactly(tensor: Tensor) -> Tensor:
    """The same numbers in float32 on the CPU, in memory of their own."""
    return tensor.to("cpu", torch.float32, copy=True)


def by_page(entries: Tensor) -> Tensor:
    """Entries in 8 bits as `pagemill_kernels.gpu.eight_bits` lays them out: a page's scales behind all its numbers."""
    numbers, scales = entries.view(torch.int8).split((entries.shape[5] - SCALE_BYTES, SCALE_BYTES), -1)
    pages = torch.cat((numbers.flatten(3), scales.transpose(3, 4).flatten(3)), -1)
    return pages.view(entries.shape).view(entries.dtype)


def by_entry(cache: Tensor) -> Tensor:
    """What `by_page` was made of, on the CPU, as plain torch has it; a cache of floats as it is."""
    cache = cache.cpu()
    if cache.dtype not in LARGEST_NUMBER:
        return cache
    blocks, layers, kinds, block_size, kv_heads, entry = cache.shape
    shape = (blocks, layers, kinds, block_size, kv_heads, entry - SCALE_BYTES)
    size = math.prod(shape[3:])
    pages = cache.view(torch.int8).flatten(3)
    scales = pages[..., size:].view(blocks, layers, kinds, kv_heads, block_size, SCALE_BYTES).transpose(3, 4)
    return torch.cat((pages[..., :size].reshape(shape), scales), -1).view(cache.dtype)


@dataclass
class Case:
    """Rows as (context length, query length), decode rows first, over a pool that is larger than they need.

    Every slot that no row owns holds NaN (in 8 bits a scale that is NaN), and the entries of a block table beyond its
    row's blocks name no block.
    """

    rows: list[tuple[int, int]]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    block_size: int = 16
    layers: int = 2
    dtype: torch.dtype = torch.float16
    seed: int = 0
    cache_dtype: torch.dtype | None = None
    cache: Tensor = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        counts = [-(-context // self.block_size) for context, _ in self.rows]
        free = (torch.randperm(sum(counts) + 5, generator=g) + 1).tolist()
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        shape = (sum(counts) + 6, self.layers, 2, self.block_size, self.kv_heads, self.head_dim)
        cache = torch.randn(shape, generator=g)
        owned = torch.zeros(shape[0], self.block_size, dtype=torch.bool)
        for (context, _), table in zip(self.rows, self.tables, strict=True):
            for position in range(context):
                owned[table[position // self.block_size], position % self.block_size] = True
        cache.permute(0, 3, 1, 2, 4, 5)[~owned] = torch.nan
        if self.cache_dtype in LARGEST_NUMBER:
            self.cache = by_page(quantised_entries(cache, self.cache_dtype)).to(DEVICE)
        else:
            self.cache = cache.to(DEVICE, self.cache_dtype or self.dtype)
        total = sum(query for _, query in self.rows)
        heads = self.kv_heads * (self.group + 2)
        self.qkv = torch.randn(total, heads, self.head_dim, generator=g).to(DEVICE, self.dtype)

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.group

    def batch(self) -> AttentionBatch:
        width = max(len(table) for table in self.tables)
        slots = [
            table[position // self.block_size] * self.block_size + position % self.block_size
            for (context, query), table in zip(self.rows, self.tables, strict=True)
            for position in range(context - query, context)
        ]
        decodes = next((i for i, (_, query) in enumerate(self.rows) if query > 1), len(self.rows))
        return AttentionBatch(
            query_starts=torch.tensor(np.cumsum([0, *(query for _, query in self.rows)])),
            context_lens=torch.tensor([context for context, _ in self.rows]),
            block_tables=torch.tensor([table + [2**30] * (width - len(table)) for table in self.tables]),
            slot_mapping=torch.tensor(slots),
            num_decodes=decodes,
        )

    def run(self, spec: AttentionSpec, processors: int = PROCESSORS, layer: int = 1) -> tuple[Tensor, TritonStep]:
        kernels = TritonKernels(processors, CAPABILITY)
        step = kernels.prepare(self.batch(), self.cache)
        kernels.rotate_and_write(self.qkv, None, self.cache, step, layer)
        result = kernels.attention(self.qkv[:, : self.num_heads], self.cache, step, layer, spec)
        assert kernels.calls == {"rotate_and_write": 1, "attention": 1}
        return result, step

    def expected(self, spec: AttentionSpec, layer: int = 1) -> Tensor:
        """From plain torch in float32 over the same numbers."""
        is_8_bit = self.cache.dtype in LARGEST_NUMBER
        cache, qkv = by_entry(self.cache) if is_8_bit else exactly(self.cache), exactly(self.qkv)
        reference = TorchKernels()
        step = reference.prepare(self.batch(), cache)
        reference.rotate_and_write(qkv, None, cache, step, layer)
        return reference.attention(qkv[:, : self.num_heads], cache, step, layer, spec)

    def check(self, spec: AttentionSpec | None = None, processors: int = PROCESSORS) -> TritonStep:
        spec = spec or AttentionSpec(self.head_dim**-0.5)
        result, step = self.run(spec, processors)
        assert result.dtype == self.dtype
        heads = result.float().cpu().view(-1, self.num_heads, self.head_dim)
        expected = self.expected(spec).view_as(heads)
        worst = ((heads - expected).norm(dim=-1) / expected.norm(dim=-1)).max()
        assert worst < WORST[self.dtype]  # NaN is not less than anything
        return step
