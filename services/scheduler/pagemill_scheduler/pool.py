"""The pool of KV blocks of one worker: free blocks and reference counts (paper §4.2)."""

from __future__ import annotations

import numpy as np

from pagemill_shared.schema import Int32Array


class BlockPool:
    """Blocks 1..num_blocks; physical block 0 is the worker's padding and never handed out.

    A block is free exactly when nobody refers to it. It may be handed out again at once, because a worker carries out
    plans in order: whoever used it before has finished with it by then.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = np.zeros(num_blocks + 1, np.int32)
        # A stack, lowest block on top: blocks in use stay close together.
        self._stack = np.arange(num_blocks, 0, -1, dtype=np.int32)
        self.num_free = num_blocks

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> Int32Array:
        """``count`` blocks with one reference each.

        Raises:
            RuntimeError: fewer are free; the caller must have made room before.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free")
        self.num_free -= count
        blocks = self._stack[self.num_free : self.num_free + count][::-1].copy()
        self.refs[blocks] = 1
        return blocks

    def release(self, blocks: Int32Array) -> None:
        """Give back one reference to each of ``blocks``, which are distinct.

        Raises:
            RuntimeError: one of them is free already.
        """
        left = self.refs[blocks] - 1
        if left.size and left.min() < 0:
            raise RuntimeError(f"blocks {blocks[left < 0].tolist()} released, but nobody refers to them")
        self.refs[blocks] = left
        freed = blocks[left == 0]
        self._stack[self.num_free : self.num_free + freed.size] = freed[::-1]
        self.num_free += int(freed.size)

    def free_blocks(self) -> Int32Array:
        """The free blocks, in no particular order."""
        return self._stack[: self.num_free]
