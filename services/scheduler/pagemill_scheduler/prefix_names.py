"""The names of the prefix cache: which block holds the keys and values of which tokens, and of all before them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagemill_scheduler.arrays import joined
from pagemill_scheduler.lru_queue import Blocks
from pagemill_shared.schema import Int32Array

NO_SALT = 0
"""The root of sequences without a salt."""
MAX_SALTS = 65_536
NO_KEY = 0

# Arrays, because numpy takes a number apart more slowly.
_NOTHING = np.array(-1)
_ZERO = np.zeros((), np.int64)
_FALSE, _TRUE = np.array(False), np.array(True)

Nodes = npt.NDArray[np.int64]
Rows = npt.NDArray[np.void]
"""[K] the tokens of a block each, as one item."""


class Run:
    """Full blocks of one sequence that follow each other.

    Attributes:
        parent: the node before the first of them.
        key: of the first of them (``PrefixNames.key``).
        tokens: [K * block_size].
        blocks: [K], K >= 1.
    """

    def __init__(self, parent: int, key: int, tokens: Int32Array, blocks: Int32Array) -> None:
        self.parent, self.key, self.tokens, self.blocks = parent, key, tokens, blocks


class PrefixNames:
    """A full block's name is (node of the block before it, its tokens).

    A node is a number that no other name ever gets, and tells its block: ``node % (num_blocks + 1)``; above that stands
    the number of the call that gave the name. Before the first block of a sequence stands a *root*, one for each
    ``cache_salt``. So a name stands for all tokens up to the block's end. What is looked up is compared with parent and
    tokens: a wrong hit is impossible.

    Most blocks are followed by one other, so each points to its first child. Only the first block of a sequence, and
    what branches off later, are found through a hash of their name. So blocks are named, found and forgotten many at
    a time, and a sequence costs about one entry of a dict. A pointer may outlive its child, and of two names with the
    same hash the later one is found: who follows either checks that he has come to a child of the node he came from.

    Attributes:
        named: [num_blocks + 1] bool.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.named = np.zeros(num_blocks + 1, np.bool_)
        self._stride = num_blocks + 1
        self._stride_array = np.array(self._stride)  # numpy takes a number apart more slowly
        self._block_size = block_size
        # By block. np.empty: the system backs it as far as it is used.
        self._tokens = np.empty((num_blocks + 1, block_size), np.int32)
        self._row = np.dtype((np.void, 4 * block_size))
        self._rows: Rows = self._tokens.view(self._row).reshape(-1)  # the same memory: numpy copies long items sooner
        self._node = np.full(num_blocks + 1, -1, np.int64)
        self._parent = np.full(num_blocks + 1, -1, np.int64)
        self._child = np.zeros(num_blocks + 1, np.intp)
        self._key = np.zeros(num_blocks + 1, np.int64)  # of its name, NO_KEY if it is not found by that
        self._block_of: dict[int, int] = {}  # by key
        self._serial = 0
        self._roots: dict[str, int] = {}  # least recently used first

    def root(self, salt: str) -> int:
        """The root for ``salt``. With too many salts, one that was not used for long starts anew, without hits."""
        if not salt:
            return NO_SALT
        root = self._roots.pop(salt, None)
        if root is None:
            if len(self._roots) == MAX_SALTS:
                del self._roots[next(iter(self._roots))]
            self._serial += 1
            root = self._serial * self._stride  # as if of block 0, which never has a name
        self._roots[salt] = root
        return root

    def find(self, root: int, tokens: Int32Array) -> tuple[list[int], int, int]:
        """The named blocks with the leading whole blocks of ``tokens``, the node of the last one, and the key of the
        block that comes next, NO_KEY if all have names."""
        size = self._block_size
        blocks: list[int] = []
        if len(tokens) < size:
            return blocks, root, NO_KEY
        first, key = self._lookup(root, tokens[:size].tobytes())
        if not first:
            return blocks, root, key
        parent, wanted = root, tokens[: len(tokens) // size * size].reshape(-1, size)
        while first:
            ahead = wanted[len(blocks) :]
            chain = self._chain(first, len(ahead))
            known = self._tokens.take(chain, 0)
            count = len(chain)
            if known.tobytes() != ahead[:count].tobytes():
                count = int((known == ahead[:count]).all(axis=1).argmin())
            blocks += chain[:count]
            parent = self._node.item(blocks[-1])
            first, key = (
                self._lookup(parent, wanted[len(blocks)].tobytes()) if len(blocks) < len(wanted) else (0, NO_KEY)
            )
        return blocks, parent, key

    def key(self, parent: int, tokens: bytes) -> int:
        """The hash, never NO_KEY, of the name of a block with ``tokens`` after ``parent``."""
        return hash((parent, tokens)) or 1

    def name_runs(self, runs: list[Run]) -> list[int]:
        """Name blocks that are in use, without names; the node of the last one of each run.

        No other block has the name of the first block of a run, in this list either. So nothing follows it yet, and all
        that come after it are new, too.
        """
        index = joined([run.blocks for run in runs]).astype(np.intp)
        nodes = self._new_nodes(index)
        self._set(index, nodes, np.frombuffer(b"".join([run.tokens.tobytes() for run in runs]), self._row))
        # From the last block of a run to the first of the next, too, which _attach then puts right.
        self._parent[index[1:]] = nodes[:-1]
        self._child[index[:-1]] = index[1:]
        last: list[int] = []
        start = 0
        for run in runs:
            self._attach(run.parent, index.item(start), run.key)
            start += len(run.blocks)
            last.append(nodes.item(start - 1))
        return last

    def name_run(self, parent: int, tokens: Int32Array, blocks: Int32Array) -> int:
        """Name blocks of one sequence that follow each other, unless others have their names; the last one's node.

        Args:
            parent: the node before the first of them.
            tokens: [K * block_size].
            blocks: [K] in use and without names, K >= 1.
        """
        return self._name_rows(parent, tokens.view(self._row), blocks.astype(np.intp))

    def _name_rows(self, parent: int, rows: Rows, blocks: Blocks) -> int:
        known = 0
        block, key = self._lookup(parent, rows[known].tobytes())
        while block:
            parent = self._node.item(block)
            known += 1
            if known == len(rows):
                return parent
            block, key = self._lookup(parent, rows[known].tobytes())
        # Nothing has followed a new node yet, so all that come after it are new, too.
        index = blocks[known:]
        nodes = self._new_nodes(index)
        self._set(index, nodes, rows[known:])
        if len(index) > 1:
            self._parent[index[1:]] = nodes[:-1]
            self._child[index[:-1]] = index[1:]
        self._attach(parent, index.item(0), key)
        return nodes.item(-1)

    def name_each(self, parents: Nodes, rows: Rows, blocks: Blocks) -> Nodes:
        """Name one block of each of several sequences, unless others have its name; their nodes.

        Args:
            parents: [K] the nodes before them.
            rows: [K] their tokens.
            blocks: [K] in use and without names.
        """
        nodes = self._new_nodes(blocks)
        before = parents % self._stride_array
        # In the usual case the block before has a name and no child yet. Of siblings behind the same block one wins.
        can_be_child = (self._node[before] == parents) & (self._parent[self._child[before]] != parents)
        usual = can_be_child.nonzero()[0]
        if len(usual) == len(blocks):
            self._child[before] = blocks
            if not len((self._child[before] != blocks).nonzero()[0]):
                self._set(blocks, nodes, rows)
                self._parent[blocks] = parents
                return nodes
        self._child[before[usual]] = blocks[usual]
        usual = usual[self._child[before[usual]] == blocks[usual]]
        self._set(blocks[usual], nodes[usual], rows[usual])
        nodes[usual] = self._node[blocks[usual]]  # siblings may share the block: both go on from its one node
        self._parent[blocks[usual]] = parents[usual]
        if len(usual) < len(blocks):
            for i in np.setdiff1d(np.arange(len(blocks)), usual, assume_unique=True).tolist():
                nodes[i] = self._name_rows(parents.item(i), rows[i : i + 1], blocks[i : i + 1])
        return nodes

    def forget(self, blocks: Blocks) -> None:
        """Take their names away from ``blocks``, all of which have one."""
        keys = self._key[blocks]
        found = keys.nonzero()[0]
        for key in keys[found].tolist():
            self._block_of.pop(key, None)
        self._key[blocks[found]] = _ZERO
        self._node[blocks] = _NOTHING
        self._parent[blocks] = _NOTHING
        self.named[blocks] = _FALSE

    def _new_nodes(self, blocks: Blocks) -> Nodes:
        self._serial += 1
        nodes: Nodes = blocks + np.array(self._serial * self._stride)
        return nodes

    def _set(self, blocks: Blocks, nodes: Nodes, rows: Rows) -> None:
        self._node[blocks] = nodes
        self._rows[blocks] = rows
        self.named[blocks] = _TRUE

    def _lookup(self, parent: int, data: bytes) -> tuple[int, int]:
        """The block with the name (parent, tokens), of which ``data`` are the tokens, or 0 and the key of that name."""
        before = parent % self._stride
        if before and self._node.item(before) == parent:
            child = self._child.item(before)
            if self._parent.item(child) == parent and self._tokens[child].tobytes() == data:
                return child, NO_KEY
        key = self.key(parent, data)
        block = self._block_of.get(key, 0)
        if block and self._parent.item(block) == parent and self._tokens[block].tobytes() == data:
            return block, NO_KEY
        return 0, key

    def _chain(self, block: int, limit: int) -> list[int]:
        """At most ``limit`` blocks: ``block``, its child, and so on."""
        node_of, parent_of, child_of = self._node.item, self._parent.item, self._child.item
        chain = [block]
        while len(chain) < limit:
            child = child_of(block)
            if parent_of(child) != node_of(block):
                break
            chain.append(child)
            block = child
        return chain

    def _attach(self, parent: int, block: int, key: int) -> None:
        """Let ``block`` be found from ``parent``."""
        self._parent[block] = parent
        before = parent % self._stride
        if before and self._node.item(before) == parent and self._parent.item(self._child.item(before)) != parent:
            self._child[before] = block
            return
        self._key[block] = key
        self._block_of[key] = block
