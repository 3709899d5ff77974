"""The pools of KV blocks of one worker: free blocks, reference counts, names of the prefix cache (paper §4.2–4.5)."""

from __future__ import annotations

import numpy as np

from pagemill_shared.schema import Int32Array

Node = int | str
"""What stands for all tokens up to a block's end; a string is the salt at the root."""
Name = tuple[Node, bytes]

_NOWHERE = -1
_SPARE_SHARE = 64
"""An eviction may take up to one in so many blocks of the pool more than it must, because one by one they cost more."""


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
        self._evictable = _LruQueue(num_blocks)
        self._names: dict[Name, int] = {}  # -> node; the block that has the name is node % _stride
        self._name_of: dict[int, Name] = {}
        self._stride = num_blocks + 1
        self._serial = 0

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
        if self._unused < count:
            self._evict(count - self._unused)
        self._unused -= count
        blocks = self._stack[self._unused : self._unused + count][::-1].copy()
        self.refs[blocks] = 1
        return blocks

    def share(self, blocks: Int32Array) -> None:
        """Add one reference to each of ``blocks``, which are distinct and used or evictable."""
        refs = self.refs[blocks]
        self._evictable.remove(blocks[refs == 0])
        self.refs[blocks] = refs + 1

    def release(self, tables: list[Int32Array]) -> None:
        """Give back one reference to each block of each of ``tables``: block tables, in order, distinct within one.

        Raises:
            RuntimeError: a block is free already.
        """
        # The end of a sequence is evicted before its beginning, which more requests may share.
        blocks = np.concatenate([table[::-1] for table in tables]) if len(tables) > 1 else tables[0][::-1]
        left = self.refs[blocks] - 1
        if len(tables) > 1 and left.any():
            # Some are shared, perhaps with one another: then each must see what the one before it left.
            for table in tables:
                self.release([table])
            return
        if left.size and left.min() < 0:
            raise RuntimeError(f"blocks {blocks[left < 0].tolist()} released, but nobody refers to them")
        self.refs[blocks] = left
        freed = blocks[left == 0]
        keep = self.named[freed]
        self._evictable.add(freed[keep])
        self._push(freed[~keep])

    def name_run(self, parent: Node, chunks: list[bytes], blocks: Int32Array) -> Node:
        """Name the full blocks of one sequence that follow each other, all in use; the node of the last one.

        Args:
            parent: the node of the block before the first of them.
            chunks: [K] the tokens of each.
            blocks: [K].
        """
        names = self._names
        known = 0
        for chunk in chunks:
            node = names.get((parent, chunk))
            if node is None:
                break
            parent = node
            known += 1
        else:
            return parent
        # Nothing has followed a new node yet, so all that come after it are new, too.
        fresh = blocks[known:]
        first, stride = self._serial + 1, self._stride
        self._serial += len(fresh)
        numbers = fresh.tolist()
        nodes: list[int] = [serial * stride + block for serial, block in enumerate(numbers, first)]
        keys = list(zip([parent, *nodes[:-1]], chunks[known:], strict=True))
        names.update(zip(keys, nodes, strict=True))
        self._name_of.update(zip(numbers, keys, strict=True))
        self.named[fresh] = True
        return nodes[-1]

    def name_each(self, parents: list[Node], chunks: list[bytes], blocks: Int32Array) -> list[Node]:
        """Name one full block in use of each of several sequences; their nodes. The first block of a name keeps it."""
        names, name_of, stride = self._names, self._name_of, self._stride
        nodes: list[Node] = []
        for name, block in zip(zip(parents, chunks, strict=True), blocks.tolist(), strict=True):
            node = names.get(name)
            if node is None:
                self._serial += 1
                node = self._serial * stride + block
                names[name] = node
                name_of[block] = name
                self.named[block] = True
            nodes.append(node)
        return nodes

    def find(self, root: Node, tokens: bytes, block_bytes: int) -> tuple[list[int], Node]:
        """The leading blocks of ``tokens`` that are here, used or evictable, and the last one's node."""
        names, stride = self._names, self._stride
        blocks: list[int] = []
        parent = root
        for start in range(0, len(tokens), block_bytes):
            node = names.get((parent, tokens[start : start + block_bytes]))
            if node is None:
                break
            blocks.append(node % stride)
            parent = node
        return blocks, parent

    def withdraw(self, blocks: Int32Array) -> None:
        """Take their names away: what they hold is not what the names say."""
        blocks = blocks[self.named[blocks]]
        self._forget_names(blocks)
        free = blocks[self.refs[blocks] == 0]
        self._evictable.remove(free)
        self._push(free)

    def unused_blocks(self) -> Int32Array:
        """The free blocks without a name, in no particular order."""
        return self._stack[: self._unused]

    def evictable_blocks(self) -> list[int]:
        """Least recently used first."""
        blocks: list[int] = self._evictable.blocks().tolist()
        return blocks

    def _push(self, blocks: Int32Array) -> None:
        self._stack[self._unused : self._unused + len(blocks)] = blocks
        self._unused += len(blocks)

    def _evict(self, count: int) -> None:
        if count > len(self._evictable):
            raise RuntimeError(f"{count} more blocks asked for than are unused, {len(self._evictable)} can be evicted")
        blocks = self._evictable.take(min(max(count, self.num_blocks // _SPARE_SHARE), len(self._evictable)))
        self._forget_names(blocks)
        self._push(blocks[::-1])

    def _forget_names(self, blocks: Int32Array) -> None:
        names = self._names
        for name in map(self._name_of.pop, blocks.tolist()):
            del names[name]
        self.named[blocks] = False


class _LruQueue:
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

    def add(self, blocks: Int32Array) -> None:
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
