"""The pools of KV blocks of one worker: free blocks, reference counts, names of the prefix cache (paper §4.2–4.5)."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from pagemill_shared.schema import Int32Array

Node = int | str
"""What stands for all tokens up to a block's end; a string is the salt at the root."""
Name = tuple[Node, bytes]


class BlockPool:
    """Blocks 1..num_blocks; physical block 0 is the worker's padding and never handed out.

    A block is free when nobody refers to it. It may be handed out again at once, because a worker carries out
    plans in order: whoever used it before has finished with it by then.

    A full block can have a name: (node of the block before it, its tokens). The node is a number that no other name
    ever gets, or for a sequence's first block the request's ``cache_salt``. So a name stands for all tokens up to the
    block's end, is compared and not only hashed, and cannot be hit by mistake or across salts.
    A free block that has a name is *evictable*: it keeps its contents until it is needed, least recently used first,
    and can be shared again until then.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = np.zeros(num_blocks + 1, np.int32)
        self.named = np.zeros(num_blocks + 1, np.bool_)
        # A stack, lowest block on top: blocks in use stay close together.
        self._stack = np.arange(num_blocks, 0, -1, dtype=np.int32)
        self._unused = num_blocks
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._names: dict[Name, tuple[int, int]] = {}  # -> block, node
        self._name_of: dict[int, Name] = {}
        self._nodes = 0

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
        if self._unused < count:
            self._evict(count - self._unused)
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

    def name(self, parent: Node, tokens: bytes, block: int) -> Node:
        """Name a full block in use, and give its node. The first block of a name keeps it."""
        name = (parent, tokens)
        known = self._names.get(name)
        if known is not None:
            return known[1]
        self._nodes += 1
        self._names[name] = (block, self._nodes)
        self._name_of[block] = name
        self.named[block] = True
        return self._nodes

    def find(self, root: Node, tokens: bytes, block_bytes: int) -> tuple[list[int], list[Node]]:
        """The leading blocks of ``tokens`` that are here, used or evictable, and their nodes."""
        blocks: list[int] = []
        nodes: list[Node] = []
        parent = root
        names = self._names
        for start in range(0, len(tokens), block_bytes):
            known = names.get((parent, tokens[start : start + block_bytes]))
            if known is None:
                break
            blocks.append(known[0])
            parent = known[1]
            nodes.append(parent)
        return blocks, nodes

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

    def _evict(self, count: int) -> None:
        blocks = [self._evictable.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            del self._names[self._name_of.pop(block)]
        evicted = np.array(blocks, np.int32)
        self.named[evicted] = False
        self._push(evicted)

    def _forget_name(self, block: int) -> None:
        del self._names[self._name_of.pop(block)]
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
