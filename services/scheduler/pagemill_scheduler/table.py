"""The running sequences of one worker, as arrays: row = slot. One vectorised pass over them makes a plan."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pagemill_scheduler.prefix_names import Rows
from pagemill_scheduler.request import Request, Sequence
from pagemill_shared.schema import Int32Array

_NONE = -1
_ONE = np.ones((), np.int32)
_LOW_BITS = np.array(4095, np.int32)

Slots = npt.NDArray[np.intp]
"""[K] rows of the arrays. Indices of this type are the ones that numpy need not convert."""


class SlotTable:
    """Arrays of ``capacity`` rows.

    Attributes:
        tokens: [capacity, max_blocks * block_size] prompt and output of each row.
        length: [capacity] known tokens.
        planned: [capacity] known tokens once the plans in flight are done: what they sample counts. 0 in empty slots.
        computed: [capacity] leading tokens whose keys and values are computed once the plans in flight are done.
        limit: [capacity] most tokens, prompt included.
        first_output, min_length: [capacity] the prompt's length + 1; end tokens count only from min_length on.
        size: the block size as numpy takes it soonest.
        blocks: [capacity, max_blocks] block tables; num_blocks: [capacity] entries used; last_block: [capacity] the
            last of them, kept apart so that a pass over the rows need not visit every block table.
        logprobs: [capacity] bool, wants log-probabilities.
        top: all slots in use are below. A pass over the columns up to there costs less than picking out rows.
        num_beams, num_chunked, num_gates, num_awaiting, num_logprobs, num_siblings: rows with such a thing, to skip
            what concerns none; siblings are sequences of a request that has, or will have, several.
        handle, sequence_index, gateway: [capacity] where its tokens are delivered to.
        cached: [capacity] prompt tokens that the prefix cache spared.
        name_at: [capacity] tokens with which its next block is full and can be offered to the prefix cache.
        node: [capacity] int64, the node in the prefix cache that stands for the blocks before it, at first the root.
        beam: [capacity] bool, a beam: the scheduler chooses its tokens, and it runs only when none is pending.
        chunked: [capacity] bool, it goes on with a prefill chunk even if that is only one token: others fork from it
            when it samples, or its prompt reports.
        gate, gate_at: [capacity] while ``gate`` is not -1 the row must not run before that slot has computed
            ``gate_at`` tokens: it shares blocks with it that are being recomputed.
        awaits: [capacity] int64, 0, or the iteration in which a row joined whose grammar the worker still compiles: it
            computes all but its last token and samples nothing; awaits_until: [capacity] how long.
        key, arrival: [capacity] int64, the request's rank.
    """

    def __init__(self, capacity: int, max_length: int, block_size: int) -> None:
        self.capacity, self.max_length, self.block_size = capacity, max_length, block_size
        max_blocks = -(-max_length // block_size)
        # np.empty: the system backs these lazily, row by row, as far as sequences really grow.
        self.tokens = np.empty((capacity, max_blocks * block_size), np.int32)
        self.blocks = np.empty((capacity, max_blocks), np.int32)
        # The same memory: one index costs less than a pair.
        self._flat_tokens = self.tokens.reshape(-1)
        self._flat_blocks = self.blocks.reshape(-1)
        # An item for each block: rows are picked one number at a time.
        self._block_rows = self.tokens.view(np.dtype((np.void, 4 * block_size))).reshape(-1)
        self._first_token = np.arange(0, self.tokens.size, self.tokens.shape[1])
        self._first_block = np.arange(0, self.blocks.size, max_blocks)
        self.size = np.array(block_size, np.int32)  # numpy takes a number apart more slowly
        self.length = np.zeros(capacity, np.int32)
        self.planned = np.zeros(capacity, np.int32)
        self.computed = np.zeros(capacity, np.int32)
        self.limit = np.zeros(capacity, np.int32)
        self.first_output = np.zeros(capacity, np.int32)
        self.min_length = np.zeros(capacity, np.int32)
        self.num_blocks = np.zeros(capacity, np.int32)
        self.last_block = np.zeros(capacity, np.intp)
        self.logprobs = np.zeros(capacity, np.bool_)
        self.handle = np.zeros(capacity, np.int32)
        self.sequence_index = np.zeros(capacity, np.int32)
        self.gateway = np.zeros(capacity, np.int32)
        self.cached = np.zeros(capacity, np.int32)
        self.name_at = np.zeros(capacity, np.int32)
        self.beam = np.zeros(capacity, np.bool_)
        self.chunked = np.zeros(capacity, np.bool_)
        self.gate = np.full(capacity, _NONE, np.int32)
        self.gate_at = np.zeros(capacity, np.int32)
        self.awaits = np.zeros(capacity, np.int64)
        self.awaits_until = np.zeros(capacity, np.float64)
        self.key = np.zeros(capacity, np.int64)
        self.arrival = np.zeros(capacity, np.int64)
        self.node = np.zeros(capacity, np.int64)
        self.num_beams = self.num_chunked = self.num_gates = self.num_logprobs = 0
        self.num_awaiting = self.num_siblings = 0
        self._sequences: list[Sequence | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._used = np.zeros(capacity, np.bool_)
        self._slots: Slots | None = None
        # By the low bits of a token: whether there may be a row that it ends. Mostly there is none, so one look-up in
        # a table that stays in the cache tells the few that must be looked at.
        self._ends_some = np.zeros(int(_LOW_BITS) + 1, np.bool_)
        self._ends: dict[int, int] = {}  # by those bits, how many rows
        self._priorities: dict[int, int] = {}  # how many rows have it
        self.top = 0

    def __len__(self) -> int:
        return self.capacity - len(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def sequence(self, slot: int) -> Sequence:
        """
        Raises:
            RuntimeError: the slot is empty.
        """
        sequence = self._sequences[slot]
        if sequence is None:
            raise RuntimeError(f"slot {slot} is empty")
        return sequence

    def sequences(self) -> Iterator[Sequence]:
        return (sequence for sequence in self._sequences if sequence is not None)

    def slots(self) -> Slots:
        """Slots in use, in no particular order. Do not write to it."""
        if self._slots is None:
            self._slots = self._used.nonzero()[0]
        return self._slots

    @property
    def lowest_priority(self) -> int:
        """The highest number among the priorities of its rows; lower than any without one."""
        return max(self._priorities) if self._priorities else -(2**31)

    def ordered(self, slots: Slots) -> Slots:
        """``slots``, first to be served first."""
        if len(slots) < 2:
            return slots
        return slots[np.lexsort((self.sequence_index[slots], self.arrival[slots], self.key[slots]))]

    def blocks_of(self, slot: int) -> Int32Array:
        """The slot's block table, as a view."""
        return self.blocks[slot, : self.num_blocks.item(slot)]

    def tokens_of(self, slot: int) -> Int32Array:
        """The slot's tokens, as a view."""
        return self.tokens[slot, : self.length.item(slot)]

    def join(self, sequence: Sequence, blocks: Int32Array, computed: int, named: int, node: int) -> int:
        """Give ``sequence`` a slot, with ``blocks`` as its block table, of which ``computed`` tokens are filled and
        ``named`` leading blocks have names, up to ``node``."""
        slot = self._seat(sequence)
        length = len(sequence.tokens)
        first = slot * self.tokens.shape[1]
        self._flat_tokens[first : first + length] = sequence.tokens
        self.length[slot] = self.planned[slot] = length
        self.computed[slot] = computed
        self.blocks[slot, : len(blocks)] = blocks
        self.num_blocks[slot] = len(blocks)
        self.last_block[slot] = blocks.item(-1)
        self.name_at[slot], self.node[slot] = (named + 1) * self.block_size, node
        return slot

    def reserve(self, sequence: Sequence) -> int:
        """Give ``sequence`` a slot that stays idle, without tokens and blocks, until ``fork`` fills it."""
        slot = self._seat(sequence)
        self.length[slot] = self.planned[slot] = self.computed[slot] = self.num_blocks[slot] = 0
        return slot

    def _seat(self, sequence: Sequence) -> int:
        slot = self._free.pop()
        request, sampling = sequence.request, sequence.request.sampling
        self.first_output[slot] = len(request.prompt) + 1
        self.limit[slot] = min(request.limit, self.max_length)
        self.min_length[slot] = min(len(request.prompt) + sampling.min_tokens, 2**31 - 1)
        self._count(request)
        self.top = max(self.top, slot + 1)
        if sampling.logprobs is not None:
            self.logprobs[slot] = True
            self.num_logprobs += 1
        self.handle[slot] = request.handle
        self.sequence_index[slot] = sequence.index
        self.gateway[slot] = request.gateway.index
        self.cached[slot] = request.cached_tokens
        if request.beams is not None:
            self.beam[slot] = True
            self.num_beams += 1
        self.key[slot] = request.key
        self.arrival[slot] = request.arrival
        self._sequences[slot] = sequence
        self._used[slot] = True
        self._slots = None
        sequence.slot = slot
        return slot

    def _count(self, request: Request) -> None:
        priorities, ends = self._priorities, self._ends
        priorities[request.priority] = priorities.get(request.priority, 0) + 1
        for token in request.ends:
            low = token & (len(self._ends_some) - 1)
            rows = ends.get(low, 0)
            ends[low] = rows + 1
            if not rows:
                self._ends_some[low] = True
        self.num_siblings += request.width > 1

    def _uncount(self, request: Request) -> None:
        priorities, ends = self._priorities, self._ends
        rows = priorities[request.priority] - 1
        if rows:
            priorities[request.priority] = rows
        else:
            del priorities[request.priority]
        for token in request.ends:
            low = token & (len(self._ends_some) - 1)
            rows = ends[low] - 1
            if rows:
                ends[low] = rows
            else:
                del ends[low]
                self._ends_some[low] = False
        self.num_siblings -= request.width > 1

    def fork(self, parent: int, child: int) -> None:
        """Make ``child``, which is idle, the twin of ``parent``: same tokens, same block table."""
        length, blocks = self.length.item(parent), self.num_blocks.item(parent)
        self.tokens[child, :length] = self.tokens[parent, :length]
        self.blocks[child, :blocks] = self.blocks[parent, :blocks]
        self.length[child] = self.planned[child] = length
        self.num_blocks[child] = blocks
        self.last_block[child] = self.last_block.item(parent)
        self.computed[child] = self.computed.item(parent)
        self.name_at[child], self.node[child] = self.name_at.item(parent), self.node.item(parent)

    def grow(self, slots: Slots, blocks: Int32Array) -> Int32Array:
        """Append one of ``blocks`` to the block table of each of ``slots``; [K, 3] (slot, position, block)."""
        count = self.num_blocks[slots]
        grown = np.empty((len(slots), 3), np.int32)
        grown[:, 0], grown[:, 1], grown[:, 2] = slots, count, blocks
        self._flat_blocks[self._first_block[slots] + count.astype(np.intp)] = blocks
        count += _ONE
        self.num_blocks[slots] = count
        self.last_block[slots] = blocks
        return grown

    def replace_last(self, slot: int, block: int) -> int:
        """Let ``block`` take the place of the last one of the slot's block table; its position."""
        position = self.num_blocks.item(slot) - 1
        self.blocks[slot, position] = self.last_block[slot] = block
        return position

    def is_idle(self, slot: int) -> bool:
        return not self.length.item(slot)

    def leave(self, slots: Slots) -> list[int]:
        """Take the sequences out of ``slots``, their tokens with them. Those of the slots that were not idle."""
        left: list[int] = []
        for slot, length in zip(slots.tolist(), self.length[slots].tolist(), strict=True):
            sequence = self.sequence(slot)
            if length:
                sequence.tokens = self.tokens[slot, :length].copy()
                left.append(slot)
            if self.num_beams and self.beam[slot]:
                self.beam[slot] = False
                self.num_beams -= 1
            if self.num_logprobs and self.logprobs[slot]:
                self.logprobs[slot] = False
                self.num_logprobs -= 1
            if self.num_chunked:
                self.expect_chunk(slot, False)
            if self.num_gates:
                self._open_gate(slot)
            if self.num_awaiting:
                self.go_on(slot)
            self._uncount(sequence.request)
            sequence.slot = -1
            self._sequences[slot] = None
            self._free.append(slot)
        self._used[slots] = False
        if len(self._free) == self.capacity:
            self.top = 0
        self.planned[slots] = 0  # so it is never ready, and has nothing left to compute
        self._slots = None
        return left

    def expect_chunk(self, slot: int, expected: bool) -> None:
        """Whether ``slot`` goes on with a chunk even if that is only one token."""
        self.num_chunked += expected - int(self.chunked[slot])
        self.chunked[slot] = expected

    def close_gate(self, slot: int, other: int, at: int) -> None:
        """``slot`` must not run before ``other`` has computed ``at`` tokens."""
        self.gate[slot], self.gate_at[slot] = other, at
        self.num_gates += 1

    def gated(self, slot: int) -> bool:
        """Whether the row still waits at its gate; opens the gate once it need not."""
        if not self.num_gates:
            return False
        gate = self.gate[slot]
        if gate != _NONE and self.computed[gate] >= self.gate_at[slot]:
            self._open_gate(slot)
            return False
        return bool(gate != _NONE)

    def _open_gate(self, slot: int) -> None:
        if self.gate[slot] != _NONE:
            self.gate[slot] = _NONE
            self.num_gates -= 1

    def await_grammar(self, slot: int, iteration: int, until: float) -> None:
        """The row, which joins in plan ``iteration``, must not sample before its grammar is compiled."""
        self.awaits[slot], self.awaits_until[slot] = iteration, until
        self.num_awaiting += 1

    def go_on(self, slot: int) -> None:
        """The row need not wait for its grammar any longer."""
        self.num_awaiting -= int(self.awaits[slot] > 0)
        self.awaits[slot] = 0

    def append(self, slots: Slots, tokens: Int32Array) -> Int32Array:
        """Record one sampled token for each of ``slots``, which are distinct; their new lengths."""
        length = self.length[slots]
        places = self._first_token[slots]
        places += length.astype(np.intp)
        self._flat_tokens[places] = tokens
        length += _ONE
        self.length[slots] = length
        return length

    def filled(self, slots: Slots, ends: Int32Array) -> tuple[Rows, Slots]:
        """[K] the tokens of the block of each of ``slots`` that ends before position ``ends``; [K] the blocks."""
        places = (ends // self.size - _ONE).astype(np.intp)
        places += self._first_block[slots]
        return self._block_rows[places], self._flat_blocks[places].astype(np.intp)

    def stopped(self, slots: Slots, tokens: Int32Array, length: Int32Array) -> list[tuple[int, int]]:
        """For which of ``slots``, by place, the token just appended, which made it ``length`` long, is an end or stop
        token, and the FinishReason of that."""
        hits: list[tuple[int, int]] = []
        for i in self._ends_some[(tokens & _LOW_BITS).astype(np.intp)].nonzero()[0].tolist():
            slot = slots.item(i)
            reason = self.sequence(slot).request.ends.get(tokens.item(i), 0)
            if reason and length.item(i) >= self.min_length.item(slot):
                hits.append((i, reason))
        return hits
