"""What tiles are timed with: attention of decode rows, or of a chunk, over blocks of a pool that is there already."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pagemill_kernels.gpu.tuning import TileKey
from pagemill_kernels.interface import AttentionBatch

ROWS, CONTEXT = 32, 2048
"""Decode rows, and tokens in the cache for each; a chunk has as many new ones."""
WARM_UP, RUNS = 2, 5

Timer = Callable[[Callable[[], object]], float]
"""Seconds that the device needs for what it is given."""


def batch_for(key: TileKey, cache: Tensor) -> AttentionBatch:
    """Rows of a full size, or of what the pool holds. Blocks are spread over the pool, and shared where it is small.
    Nothing is written: slots are those of the padding block."""
    blocks, block_size = cache.shape[0] - 1, cache.shape[3]
    width = max(1, min(CONTEXT // block_size, blocks))
    rows, new = (ROWS, 1) if key.use == "decode" else (1, width * block_size)
    tables = np.random.default_rng(0).integers(1, blocks + 1, (rows, width))
    return AttentionBatch(
        query_starts=torch.arange(rows + 1) * new,
        context_lens=torch.full((rows,), width * block_size),
        block_tables=torch.from_numpy(tables),
        slot_mapping=torch.zeros(rows * new, dtype=torch.int64),
        num_decodes=rows if key.use == "decode" else 0,
    )


def device_timer(device: torch.device) -> Timer:
    """Times by the device's own clock: the fastest of a few runs."""

    def seconds(run: Callable[[], object]) -> float:
        for _ in range(WARM_UP):
            run()
        taken: list[float] = []
        for _ in range(RUNS):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begun.record(torch.cuda.current_stream(device))
            run()
            ended.record(torch.cuda.current_stream(device))
            ended.synchronize()
            taken.append(begun.elapsed_time(ended) / 1000)
        return min(taken)

    return seconds
