"""Blocks in the order in which they came, for eviction of the least recently used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_NOWHERE = np.array(-1)  # numpy takes a number apart more slowly

Blocks = npt.NDArray[np.intp]


class LruQueue:
    """Distinct blocks in the order in which they came. One that is taken out leaves a stale entry behind, which is
    skipped later: so all that is done is done to many blocks at once."""

    def __init__(self, num_blocks: int) -> None:
        self._queue = np.zeros(2 * num_blocks + 1, np.intp)
        self._place = np.full(num_blocks + 1, -1, np.intp)  # of each block in the queue
        self._places = np.arange(2 * num_blocks + 1)
        self._head = self._tail = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def blocks(self) -> Blocks:
        """All, oldest first."""
        return self._fresh(self._head, self._tail)

    def add(self, blocks: Blocks) -> None:
        count = len(blocks)
        if self._tail + count > len(self._queue):
            left = self.blocks()
            self._head, self._tail = 0, len(left)
            self._queue[: self._tail] = left
            self._place[left] = self._places[: self._tail]
        end = self._tail + count
        self._queue[self._tail : end] = blocks
        self._place[blocks] = self._places[self._tail : end]
        self._tail = end
        self._count += count

    def remove(self, blocks: Blocks) -> None:
        self._place[blocks] = _NOWHERE
        self._count -= len(blocks)

    def take(self, count: int) -> Blocks:
        """Take out the ``count`` oldest, of at least so many."""
        taken: list[Blocks] = []
        missing = count
        while missing:
            end = min(self._head + max(missing, 64), self._tail)
            fresh = self._fresh(self._head, end)[:missing]
            # Behind the last one taken if that was enough, else behind all that was looked at.
            self._head = int(self._place[fresh[-1]]) + 1 if len(fresh) == missing else end
            missing -= len(fresh)
            taken.append(fresh)
        blocks = taken[0] if len(taken) == 1 else np.concatenate(taken)
        self.remove(blocks)
        return blocks

    def _fresh(self, start: int, end: int) -> Blocks:
        blocks = self._queue[start:end]
        fresh: Blocks = blocks[self._place[blocks] == self._places[start:end]]
        return fresh
