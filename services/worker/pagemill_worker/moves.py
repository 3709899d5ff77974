"""Block operations of plans, in their order: swap-out, swap-in, copies, then the forward pass.

Swaps run beside the main work. Nothing may touch a block before its swap is over: what a swap-out reads must not be
written, what a swap-in writes neither read nor written. So the main work waits for the swaps before the first plan that
assigns such a block to anybody; a plan that does not runs beside them. Among themselves swaps keep their order, which
serves host blocks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch

from pagemill_kernels.interface import Kernels
from pagemill_shared.messages import IterationPlan
from pagemill_worker.cache import KVCache


class Lanes(Protocol):
    """Two queues of device work: the main one, and one at its side."""

    def side(self) -> AbstractContextManager[Any]:
        """What is asked for within goes to the side."""

    def side_waits(self) -> None:
        """What goes to the side from here on waits for all that the main lane has been given."""

    def main_waits(self) -> None:
        """What goes to the main lane from here on waits for all that the side has been given."""


class OneLane:
    """For a device that does one thing after another anyway."""

    def side(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def side_waits(self) -> None:
        pass

    def main_waits(self) -> None:
        pass


class CudaLanes:
    """The current stream, and another; one waits for the other's events, and the host for neither."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def side(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._side)

    def side_waits(self) -> None:
        self._side.wait_event(torch.cuda.current_stream(self._device).record_event())

    def main_waits(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._side.record_event())


class BlockMoves:
    """Carries out the block operations of plans.

    Args:
        lanes: where they run.
    """

    def __init__(self, cache: KVCache, kernels: Kernels[Any], lanes: Lanes) -> None:
        self._cache, self._kernels, self._lanes = cache, kernels, lanes
        self._swapping = np.zeros(cache.num_blocks + 1, np.bool_)  # device blocks that the main lane must not touch
        self._is_swapping = False

    def begin(self) -> None:
        """A new epoch: whatever still runs at the side is waited for."""
        self._wait()

    def carry_out(self, plan: IterationPlan) -> None:
        """All of the plan's operations, before its forward pass."""
        if plan.swap_out.size or plan.swap_in.size:
            self._lanes.side_waits()
            with self._lanes.side():
                if plan.swap_out.size:
                    self._cache.swap_out(self._kernels, plan.swap_out)
                if plan.swap_in.size:
                    self._cache.swap_in(self._kernels, plan.swap_in)
            self._swapping[plan.swap_out[:, 0]] = True
            self._swapping[plan.swap_in[:, 1]] = True
            self._is_swapping = True
        if self._is_swapping and self._touches(plan):
            self._wait()
        if plan.block_copies.size:
            self._cache.copy(self._kernels, plan.block_copies)

    def _touches(self, plan: IterationPlan) -> bool:
        """Whether the main lane may touch a block that is being swapped: only what this plan assigns can be one, since
        nobody owns a block that is swapped out, and nobody did before it was swapped in."""
        assigned = (plan.new_blocks[:, 2], plan.block_copies.ravel(), *(join.block_table for join in plan.joined))
        return any(bool(self._swapping[blocks].any()) for blocks in assigned)

    def _wait(self) -> None:
        if self._is_swapping:
            self._lanes.main_waits()
            self._swapping[:] = False
            self._is_swapping = False
