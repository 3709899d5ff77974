"""The pools of KV blocks of one worker: free blocks, reference counts, names of the prefix cache (paper §4.2–4.5)."""

from __future__ import annotations

import numpy as np

from pagemill_scheduler.arrays import joined
from pagemill_scheduler.lru_queue import Blocks, LruQueue
from pagemill_scheduler.prefix_names import PrefixNames
from pagemill_shared.schema import Int32Array

# numpy takes a number apart more slowly.
_ONE, _ZERO = np.ones((), np.int32), np.zeros((), np.int32)

_SPARE_SHARE = 32
"""An eviction may take up to one in so many blocks of the pool more than it must, because one by one they cost more."""


class BlockPool:
    """Blocks 1..num_blocks; physical block 0 is the worker's padding and never handed out.

    A block is free when nobody refers to it. It may be handed out again at once, because a worker carries out
    plans in order: whoever used it before has finished with it by then.

    A full block can have a name, by which later sequences with the same tokens find it. A free block that has one is
    *evictable*: it keeps its contents until it is needed, least recently used first, and can be shared again until
    then.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.refs = np.zeros(num_blocks + 1, np.int32)
        self.names = PrefixNames(num_blocks, block_size)
        # A stack, lowest block on top: blocks in use stay close together.
        self._stack = np.arange(num_blocks, 0, -1)
        self._unused = num_blocks
        self._evictable = LruQueue(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out: unused and evictable ones."""
        return self._unused + len(self._evictable)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> Int32Array:
        """``count`` blocks with one reference each, without names.

        Raises:
            RuntimeError: fewer are free; the caller must have made room before.
        """
        self.make_room(count)
        self._unused -= count
        blocks = self._stack[self._unused : self._unused + count][::-1]
        self.refs[blocks] = _ONE
        return blocks.astype(np.int32)

    def make_room(self, count: int) -> None:
        """Evict now what ``allocate`` of ``count`` blocks would evict.

        Raises:
            RuntimeError: as there.
        """
        if self._unused < count:
            self._evict(count - self._unused)

    def share(self, blocks: Int32Array, owners: int = 1) -> None:
        """Add a reference for each of ``owners`` to each of ``blocks``, which are distinct and used or evictable."""
        index = blocks.astype(np.intp)
        refs = self.refs[index]
        if np.count_nonzero(refs) < len(index):
            self._evictable.remove(index[refs == 0])
        self.refs[index] = refs + owners

    def leave_shared(self, block: int) -> bool:
        """Give back a reference to ``block``, if it has others; whether it had."""
        refs = self.refs.item(block)
        if refs == 1:
            return False
        self.refs[block] = refs - 1
        return True

    def release(self, tables: list[Int32Array]) -> None:
        """Give back one reference to each block of each of ``tables``: block tables, in order, distinct within one.

        Raises:
            RuntimeError: a block is free already.
        """
        # The end of a sequence is evicted before its beginning, which more requests may share.
        blocks = joined(tables[::-1])[::-1].astype(np.intp)
        refs = self.refs[blocks]
        if not len((refs != _ONE).nonzero()[0]):
            self.refs[blocks] = _ZERO
            freed = blocks
        else:
            freed = self._release_shared(blocks)
        keep = self.names.named[freed]
        self._evictable.add(freed[keep])
        self._push(freed[~keep])

    def _release_shared(self, blocks: Blocks) -> Blocks:
        """Those of ``blocks``, with repetitions, to which nobody refers after one reference less to each."""
        before = self.refs[blocks]
        np.subtract.at(self.refs, blocks, 1)
        left = self.refs[blocks]
        if left.size and left.min() < 0:
            raise RuntimeError(f"blocks {blocks[left < 0].tolist()} released, but nobody refers to them")
        free = left == 0
        freed: Blocks = blocks[free]
        if np.count_nonzero(before[free] == _ONE) == len(freed):
            return freed
        # What several of the tables share is given back by the last of them.
        last = len(freed) - 1 - np.unique(freed[::-1], return_index=True)[1]
        return freed[np.sort(last)]

    def withdraw(self, blocks: Int32Array) -> None:
        """Take their names away: what they hold is not what the names say."""
        index = blocks[self.names.named[blocks]].astype(np.intp)
        self.names.forget(index)
        free = index[self.refs[index] == 0]
        self._evictable.remove(free)
        self._push(free)

    def unused_blocks(self) -> Blocks:
        """The free blocks without a name, in no particular order."""
        return self._stack[: self._unused]

    def evictable_blocks(self) -> list[int]:
        """Least recently used first."""
        blocks: list[int] = self._evictable.blocks().tolist()
        return blocks

    def _push(self, blocks: Blocks) -> None:
        self._stack[self._unused : self._unused + len(blocks)] = blocks
        self._unused += len(blocks)

    def _evict(self, count: int) -> None:
        if count > len(self._evictable):
            raise RuntimeError(f"{count} more blocks asked for than are unused, {len(self._evictable)} can be evicted")
        blocks = self._evictable.take(min(max(count, self.num_blocks // _SPARE_SHARE), len(self._evictable)))
        self.names.forget(blocks)
        self._push(blocks[::-1])


class HostPool:
    """The blocks of a worker's host memory that sequences are swapped to, 0..num_blocks-1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._next_plan: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._next_plan)

    @property
    def num_available(self) -> int:
        """Blocks that the plan being made may write to."""
        return len(self._free)

    def allocate(self, count: int) -> Int32Array:
        """
        Raises:
            RuntimeError: fewer are available.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} host blocks asked for, {len(self._free)} available")
        return np.array([self._free.pop() for _ in range(count)], np.int32)

    def release(self, blocks: list[int], *, after_plan: bool) -> None:
        """``after_plan``: the plan being made still reads them, and within a plan swap-out comes before swap-in."""
        (self._next_plan if after_plan else self._free).extend(blocks)

    def plan_made(self) -> None:
        self._free.extend(self._next_plan)
        self._next_plan.clear()

    def free_blocks(self) -> list[int]:
        return self._free + self._next_plan
