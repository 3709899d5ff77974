"""Blocks in the order in which they came, for eviction of the least recently used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagemill_shared.schema import Int32Array

_NOWHERE = -1


class LruQueue:
    """Distinct blocks in the order in which they came. One that is taken out leaves a stale entry behind, which is
    skipped later: so all that is done is done to many blocks at once."""

    def __init__(self, num_blocks: int) -> None:
        self._queue = np.zeros(2 * num_blocks + 1, np.int32)
        self._place = np.full(num_blocks + 1, _NOWHERE, np.int32)  # of each block in the queue
        self._head = self._tail = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def blocks(self) -> Int32Array:
        """All, oldest first."""
        return self._fresh(self._head, self._tail)

    def add(self, blocks: Int32Array | npt.NDArray[np.intp]) -> None:
        count = len(blocks)
        if self._tail + count > len(self._queue):
            left = self.blocks()
            self._head, self._tail = 0, len(left)
            self._queue[: self._tail] = left
            self._place[left] = np.arange(self._tail)
        end = self._tail + count
        self._queue[self._tail : end] = blocks
        self._place[blocks] = np.arange(self._tail, end)
        self._tail = end
        self._count += count

    def remove(self, blocks: Int32Array) -> None:
        self._place[blocks] = _NOWHERE
        self._count -= len(blocks)

    def take(self, count: int) -> Int32Array:
        """Take out the ``count`` oldest, of at least so many."""
        taken: list[Int32Array] = []
        missing = count
        while missing:
            end = min(self._head + max(missing, 64), self._tail)
            fresh = self._fresh(self._head, end)[:missing]
            # Behind the last one taken if that was enough, else behind all that was looked at.
            self._head = int(self._place[fresh[-1]]) + 1 if len(fresh) == missing else end
            missing -= len(fresh)
            taken.append(fresh)
        blocks = np.concatenate(taken)
        self.remove(blocks)
        return blocks

    def _fresh(self, start: int, end: int) -> Int32Array:
        blocks = self._queue[start:end]
        fresh: Int32Array = blocks[self._place[blocks] == np.arange(start, end)]
        return fresh
