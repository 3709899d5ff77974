"""Kernels that compute nothing, for steps over tensors of the meta device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pagemill_kernels.interface import AttentionBatch, ResidentKernels


class ShapesAlone(ResidentKernels[None]):
    """Kernels for tensors without numbers."""

    name = "none"

    def prepare(self, batch: AttentionBatch, cache: Tensor) -> None:
        assert batch.lines is not None
        assert {batch.block_tables.device.type, batch.slot_mapping.device.type} == {"meta"}

    def prepare_fixed(self, batch: AttentionBatch, cache: Tensor) -> None:
        self.prepare(batch, cache)

    def refill(self, step: None, batch: AttentionBatch) -> None:
        pass

    def rotate_and_write(self, *_: Any) -> None:
        pass

    def attention(self, query: Tensor, *_: Any) -> Tensor:
        return query.new_empty(query.shape[0], query.shape[1] * query.shape[2])

    def copy_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> int:
        raise NotImplementedError("no test moves blocks that have no numbers")
