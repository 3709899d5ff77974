"""The pools of KV blocks of one worker: free blocks, reference counts, names of the prefix cache (paper §4.2–4.5)."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from pagemill_shared.schema import Int32Array


class BlockPool:
    """Blocks 1..num_blocks; physical block 0 is the worker's padding and never handed out.

    A block is free when nobody refers to it. It may be handed out again at once, because a worker carries out
    plans in order: whoever used it before has finished with it by then.

    A full block can have a name, the digest of all tokens up to its end. A free block that has one is *evictable*: it
    keeps its contents until it is needed, least recently used first, and can be shared again until then.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = np.zeros(num_blocks + 1, np.int32)
        self.named = np.zeros(num_blocks + 1, np.bool_)
        # A stack, lowest block on top: blocks in use stay close together.
        self._stack = np.arange(num_blocks, 0, -1, dtype=np.int32)
        self._unused = num_blocks
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

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
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free")
        while self._unused < count:
            self._evict()
        self._unused -= count
        blocks = self._stack[self._unused : self._unused + count][::-1].copy()
        self.refs[blocks] = 1
        return blocks

    def share(self, blocks: Int32Array) -> None:
        """Add one reference to each of ``blocks``, which are distinct and used or evictable."""
        for block in blocks[self.refs[blocks] == 0].tolist():
            del self._evictable[block]
        self.refs[blocks] += 1

    def release(self, blocks: Int32Array) -> None:
        """Give back one reference to each of ``blocks``, which are distinct and in the order of a block table.

        Raises:
            RuntimeError: one of them is free already.
        """
        left = self.refs[blocks] - 1
        if left.size and left.min() < 0:
            raise RuntimeError(f"blocks {blocks[left < 0].tolist()} released, but nobody refers to them")
        self.refs[blocks] = left
        freed = blocks[left == 0][::-1]
        keep = self.named[freed]
        # The end of a sequence is evicted before its beginning, which more requests may share.
        for block in freed[keep].tolist():
            self._evictable[block] = None
        self._push(freed[~keep])

    def name(self, block: int, digest: bytes) -> None:
        """Name a full block in use. The first block of a name keeps it."""
        if digest in self._block_of or self.named[block]:
            return
        self._block_of[digest] = block
        self._name_of[block] = digest
        self.named[block] = True

    def lookup(self, digest: bytes) -> int | None:
        """The block of that name, used or evictable."""
        return self._block_of.get(digest)

    def withdraw(self, blocks: Int32Array) -> None:
        """Take their names away: what they hold is not what the names say."""
        for block in blocks[self.named[blocks]].tolist():
            self._forget_name(block)
            if self.refs[block] == 0:
                del self._evictable[block]
                self._push(np.array([block], np.int32))

    def unused_blocks(self) -> Int32Array:
        """The free blocks without a name, in no particular order."""
        return self._stack[: self._unused]

    def evictable_blocks(self) -> list[int]:
        """Least recently used first."""
        return list(self._evictable)

    def _push(self, blocks: Int32Array) -> None:
        self._stack[self._unused : self._unused + len(blocks)] = blocks
        self._unused += len(blocks)

    def _evict(self) -> None:
        block, _ = self._evictable.popitem(last=False)
        self._forget_name(block)
        self._push(np.array([block], np.int32))

    def _forget_name(self, block: int) -> None:
        del self._block_of[self._name_of.pop(block)]
        self.named[block] = False


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
