"""From a compiled library to kernels that have been tried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pagemill_kernels.cpu.build import BuildError
from pagemill_kernels.cpu.cached import find_library
from pagemill_kernels.cpu.kernels import CpuKernels
from pagemill_kernels.cpu.library import load_library
from pagemill_kernels.interface import AttentionBatch, AttentionSpec, Kernels
from pagemill_kernels.reference import TorchKernels


def load_cpu_kernels(prebuilt: Path | None, cache_dir: Path | None, report: Callable[[str], None]) -> CpuKernels:
    """The compiled kernels for this machine; the arguments are those of `find_library`.

    Raises:
        BuildError: there are none, or they do not load, or they compute something else than plain torch does.
    """
    path, isa = find_library(prebuilt, cache_dir, report)
    try:
        kernels = CpuKernels(load_library(path), isa.name)
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from None
    if not _agree(kernels):
        raise BuildError(f"{path} computes wrong results on this machine")
    return kernels


def _agree(kernels: CpuKernels) -> bool:
    """Whether the compiled kernels compute what plain torch does on a small case."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(4, 2, 2, 16, 2, 64, generator=generator)
    qkv = torch.randn(6, 8, 64, generator=generator)
    rotary = torch.rand(6, 1, 64, generator=generator), torch.rand(6, 1, 64, generator=generator)
    batch = AttentionBatch(
        query_starts=torch.tensor([0, 1, 6]),
        context_lens=torch.tensor([21, 9]),
        block_tables=torch.tensor([[3, 1], [2, 0]]),
        slot_mapping=torch.tensor([20, 36, 37, 38, 39, 40]),
        num_decodes=1,
    )
    results = []
    sets: tuple[Kernels[Any], ...] = (TorchKernels(), kernels)
    for candidate in sets:
        pool, rows = cache.clone(), qkv.clone()
        step = candidate.prepare(batch, pool)
        candidate.rotate_and_write(rows, rotary, pool, step, 1)
        attended = candidate.attention(rows[:, :4], pool, step, 1, AttentionSpec(0.125))
        candidate.copy_blocks(pool, pool, torch.tensor([[1, 0]]))
        results.append((attended, pool))
    kernels.calls.clear()
    return all(torch.allclose(plain, fast, atol=1e-4) for plain, fast in zip(*results, strict=True))
