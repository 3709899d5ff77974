"""The forward pass of one iteration: from a batch on the host to hidden states on the device.

`HostForward` builds every array on the host, which is what a CPU wants. `ResidentForward` keeps the rows on the device
and sends what changes, in one transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pagemill_kernels.interface import Kernels, ResidentKernels
from pagemill_shared.messages import IterationPlan
from pagemill_worker.batch import Batch
from pagemill_worker.cache import KVCache
from pagemill_worker.device_rows import DeviceRows
from pagemill_worker.graphs import DecodeGraphs, Record
from pagemill_worker.models.registry import Model
from pagemill_worker.rows import Rows
from pagemill_worker.transfer import upload

FIRST_LINES = 256
"""Sequences that there is room for before a scheduler says how many it will run: the default of --max-num-seqs."""


class Forward(Protocol):
    """How a runner computes."""

    def begin(self, max_num_seqs: int) -> None:
        """A new epoch, with as many slots."""

    def run(self, plan: IterationPlan, batch: Batch | None, rows: Rows) -> Tensor | None:
        """[T, hidden_size] what the model makes of the batch's tokens; None without a batch.

        Args:
            rows: to which the plan has been applied.
        """

    def append(self, tokens: Tensor) -> None:
        """Takes in the tokens that were sampled from the last run, one for each of its ``token_slots``; -1 where there
        is none."""


class HostForward:
    """Every array comes from the host."""

    def __init__(self, model: Model, cache: KVCache, kernels: Kernels[Any], device: torch.device) -> None:
        self._model, self._cache, self._kernels, self._device = model, cache, kernels, device

    def begin(self, max_num_seqs: int) -> None:
        pass

    def run(self, plan: IterationPlan, batch: Batch | None, rows: Rows) -> Tensor | None:
        if batch is None:
            return None
        step = self._kernels.prepare(batch.attention, self._cache.pool)
        token_ids, positions = upload([batch.token_ids, batch.positions], self._device)
        return self._model.forward(token_ids, positions, self._cache.pool, self._kernels, step)

    def append(self, tokens: Tensor) -> None:
        pass


class ResidentForward:
    """Rows stand on the device; iterations of decode rows alone are repeated recordings.

    Attributes:
        rows: what stands there.
        graphs: the recordings, if there are any.
        recorder: as in the arguments.

    Args:
        recorder: makes what makes the recordings of one set of rows, see `Record`; None to make none.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        kernels: ResidentKernels[Any],
        device: torch.device,
        max_model_len: int,
        recorder: Callable[[], Record] | None,
    ) -> None:
        self._model, self._cache, self._kernels, self._device = model, cache, kernels, device
        self._width = -(-max_model_len // cache.block_size) + 1
        self.recorder = recorder
        self.rows = DeviceRows(0, 1, torch.device("meta"))  # takes no memory before there is an epoch
        self.graphs: DecodeGraphs | None = None
        self._owners = self._kept = self.rows.lengths[:0]

    def begin(self, max_num_seqs: int) -> None:
        """Lines of an older epoch need no clearing: every sequence joins before it runs."""
        if max_num_seqs > self.rows.padding:
            self.graphs = None
            self.rows = DeviceRows(max(max_num_seqs, FIRST_LINES), self._width, self._device)
            if self.recorder is not None:
                record = self.recorder()
                self.graphs = DecodeGraphs(self._model, self._cache, self._kernels, self.rows, record)

    def run(self, plan: IterationPlan, batch: Batch | None, rows: Rows) -> Tensor | None:
        delta = self.rows.delta(plan)
        if batch is None:
            self.rows.apply(upload(delta.arrays, self._device))
            return None
        decodes, contexts = batch.attention.num_decodes, batch.attention.context_lens.numpy()
        lines = batch.row_slots[:decodes]
        chunks = np.stack((batch.slot_of, batch.positions, batch.token_ids))[:, decodes:]
        graphs = self.graphs if not chunks.size else None
        if graphs is not None:
            lines = graphs.padded(lines)
        # A beam's next token is chosen by the scheduler.
        kept = np.flatnonzero(rows.sampling.candidates[batch.token_slots] == 0)
        arrays = [*delta.arrays, lines, chunks, batch.token_slots[kept], kept]
        *changes, device_lines, device_chunks, self._owners, self._kept = upload(arrays, self._device)
        self.rows.apply(changes)
        if graphs is not None:
            return graphs.run(lines, contexts, device_lines)
        inputs = self.rows.inputs(device_lines, device_chunks, self._cache.block_size)
        attention = replace(
            batch.attention,
            block_tables=self.rows.tables,
            slot_mapping=inputs.slots,
            lines=torch.from_numpy(batch.row_slots),
        )
        step = self._kernels.prepare(attention, self._cache.pool)
        return self._model.forward(inputs.token_ids, inputs.positions, self._cache.pool, self._kernels, step)

    def append(self, tokens: Tensor) -> None:
        if self._kept.shape[0] < tokens.shape[0]:
            tokens = tokens[self._kept]
        self.rows.append(self._owners, tokens)
