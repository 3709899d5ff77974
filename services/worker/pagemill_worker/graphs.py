"""Decode steps that are recorded once, for padded numbers of rows, and repeated: CUDA graphs.

A step of some rows takes the smallest recording that holds them. The rows that are too many compute the token of the
padding line, which lies in the padding block. Everything that changes from step to step stands in memory that does not
move: the rows' lines, the device's rows, and what the kernels refill.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pagemill_kernels.interface import AttentionBatch, ResidentKernels
from pagemill_worker.cache import KVCache
from pagemill_worker.device_rows import DeviceRows
from pagemill_worker.models.registry import Model
from pagemill_worker.sampling_rows import Indices


class Record(Protocol):
    """Makes what repeats ``run`` over the same memory. The result is the same tensor each time, valid until the next
    repeat of this or another recording of the same maker."""

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]: ...


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory: no two of them run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):  # builds kernels and workspaces, which a recording cannot
            for _ in range(2):
                run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = run()

        def repeat() -> Tensor:
            graph.replay()
            return result

        return repeat


def run_again(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Records nothing and runs again, into the same tensor: for devices without graphs, and to look for faults."""
    result = run().clone()
    return lambda: result.copy_(run())


def graph_sizes(most: int) -> list[int]:
    """Numbers of rows to record for, ascending, up to ``most``: at most a third of the rows are padding, from 16 on."""
    sizes = {1, 2, 4, 8, most}
    size = 16
    while size < most:
        sizes |= {size, size * 3 // 2}
        size *= 2
    return sorted(size for size in sizes if size <= most)


class DecodeGraphs:
    """The forward pass of decode rows.

    Args:
        rows: where the tokens stand; the recordings hold on to its tensors.
        record: see `Record`.
    """

    def __init__(
        self, model: Model, cache: KVCache, kernels: ResidentKernels[Any], rows: DeviceRows, record: Record
    ) -> None:
        self._model, self._cache, self._kernels, self._rows = model, cache, kernels, rows
        self._sizes = np.array(graph_sizes(rows.padding))
        device = rows.lengths.device
        self._lines = torch.full((rows.padding,), rows.padding, dtype=torch.int64, device=device)
        self._slots = torch.zeros(rows.padding, dtype=torch.int32, device=device)
        self._no_chunks = torch.zeros(3, 0, dtype=torch.int64, device=device)
        self._recorded: dict[int, tuple[Any, Callable[[], Tensor]]] = {}
        for size in reversed(self._sizes.tolist()):  # the largest first, so that the others fit into its memory
            padding = np.full(size, rows.padding)
            step = kernels.prepare_fixed(self._batch(padding, np.ones_like(padding)), cache.pool)
            self._recorded[size] = step, record(partial(self._forward, size, step))

    def padded(self, lines: Indices) -> Indices:
        """[P] the lines of decode rows and as many padded ones as their recording takes."""
        size = int(self._sizes[np.searchsorted(self._sizes, lines.size)])
        return np.concatenate((lines, np.full(size - lines.size, self._rows.padding)))

    def recorded(self, rows: int) -> Callable[[], Tensor]:
        """Repeats the forward pass that ran last with as many rows, padded ones included."""
        return self._recorded[rows][1]

    def run(self, padded: Indices, contexts: Indices, lines: Tensor) -> Tensor:
        """[R, hidden_size] as the model's forward pass gives it.

        Args:
            padded: [P] of `padded`, and ``lines`` the same on the device.
            contexts: [R] tokens of the rows before those that are padded.
        """
        step, repeat = self._recorded[padded.size]
        lengths = np.ones_like(padded)
        lengths[: contexts.size] = contexts
        self._lines[: padded.size].copy_(lines)
        self._kernels.refill(step, self._batch(padded, lengths))
        return repeat()[: contexts.size]

    def _forward(self, size: int, step: Any) -> Tensor:
        inputs = self._rows.inputs(self._lines[:size], self._no_chunks, self._cache.block_size)
        self._slots[:size].copy_(inputs.slots)
        return self._model.forward(inputs.token_ids, inputs.positions, self._cache.pool, self._kernels, step)

    def _batch(self, lines: Indices, contexts: Indices) -> AttentionBatch:
        return AttentionBatch(
            query_starts=torch.arange(lines.size + 1),
            context_lens=torch.from_numpy(contexts),
            block_tables=self._rows.tables,
            slot_mapping=self._slots[: lines.size],
            num_decodes=lines.size,
            lines=torch.from_numpy(lines),
        )
