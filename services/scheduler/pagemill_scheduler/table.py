"""The running sequences of one worker, as arrays: row = slot. One vectorised pass over them makes a plan."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pagemill_scheduler.pool import Node
from pagemill_scheduler.request import Sequence
from pagemill_shared.schema import Int32Array

STOP_IDS_WIDTH = 8
"""Stop and end tokens checked in the vectorised pass; rows with more are checked one by one."""

_NONE = -1


class SlotTable:
    """Arrays of ``capacity`` rows.

    Attributes:
        tokens: [capacity, max_length] prompt and output of each row.
        length: [capacity] known tokens.
        pending: [capacity] tokens that plans in flight will sample.
        computed: [capacity] leading tokens whose keys and values are computed once the plans in flight are done.
        limit: [capacity] most tokens, prompt included.
        prompt_length, min_length: [capacity]; end tokens count only from min_length on.
        blocks: [capacity, max_blocks] block tables; num_blocks: [capacity] entries used.
        stop_ids: [capacity, STOP_IDS_WIDTH] padded with -1; many_stops: [capacity] bool, more than fit there.
        logprobs: [capacity] bool, wants log-probabilities.
        handle, sequence_index, gateway: [capacity] where its tokens are delivered to.
        cached: [capacity] prompt tokens that the prefix cache spared.
        named: [capacity] leading full blocks that have been offered to the prefix cache; nodes: the last one's node.
        beam: [capacity] bool, a beam: the scheduler chooses its tokens, and it runs only when none is pending.
        gate, gate_at: [capacity] while ``gate`` is not -1 the row must not run before that slot has computed
            ``gate_at`` tokens: it shares blocks with it that are being recomputed.
        key, arrival: [capacity] int64, the request's rank; priority: [capacity].
    """

    def __init__(self, capacity: int, max_length: int, block_size: int) -> None:
        self.capacity, self.max_length, self.block_size = capacity, max_length, block_size
        max_blocks = -(-max_length // block_size)
        # np.empty: the system backs these lazily, row by row, as far as sequences really grow.
        self.tokens = np.empty((capacity, max_length), np.int32)
        self.blocks = np.empty((capacity, max_blocks), np.int32)
        self.length = np.zeros(capacity, np.int32)
        self.pending = np.zeros(capacity, np.int32)
        self.computed = np.zeros(capacity, np.int32)
        self.limit = np.zeros(capacity, np.int32)
        self.prompt_length = np.zeros(capacity, np.int32)
        self.min_length = np.zeros(capacity, np.int32)
        self.num_blocks = np.zeros(capacity, np.int32)
        self.stop_ids = np.full((capacity, STOP_IDS_WIDTH), _NONE, np.int32)
        self.many_stops = np.zeros(capacity, np.bool_)
        self.logprobs = np.zeros(capacity, np.bool_)
        self.handle = np.zeros(capacity, np.int32)
        self.sequence_index = np.zeros(capacity, np.int32)
        self.gateway = np.zeros(capacity, np.int32)
        self.cached = np.zeros(capacity, np.int32)
        self.named = np.zeros(capacity, np.int32)
        self.beam = np.zeros(capacity, np.bool_)
        self.gate = np.full(capacity, _NONE, np.int32)
        self.gate_at = np.zeros(capacity, np.int32)
        self.key = np.zeros(capacity, np.int64)
        self.arrival = np.zeros(capacity, np.int64)
        self.priority = np.zeros(capacity, np.int32)
        self.nodes: list[Node] = [""] * capacity
        self.num_beams = 0
        self.num_gates = 0
        self._sequences: list[Sequence | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._used = np.zeros(capacity, np.bool_)
        self._slots: Int32Array | None = None

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

    def slots(self) -> Int32Array:
        """Slots in use, in no particular order. Do not write to it."""
        if self._slots is None:
            self._slots = np.flatnonzero(self._used).astype(np.int32)
        return self._slots

    def ordered(self, slots: Int32Array) -> Int32Array:
        """``slots``, first to be served first."""
        if len(slots) < 2:
            return slots
        return slots[np.lexsort((self.sequence_index[slots], self.arrival[slots], self.key[slots]))]

    def blocks_of(self, slot: int) -> Int32Array:
        """The slot's block table, as a view."""
        return self.blocks[slot, : self.num_blocks[slot]]

    def tokens_of(self, slot: int) -> Int32Array:
        """The slot's tokens, as a view."""
        return self.tokens[slot, : self.length[slot]]

    def join(self, sequence: Sequence, blocks: list[int], computed: int) -> int:
        """Give ``sequence`` a slot, with ``blocks`` as its block table, of which ``computed`` tokens are filled."""
        slot = self._seat(sequence)
        length = len(sequence.tokens)
        self.tokens[slot, :length] = sequence.tokens
        self.length[slot] = length
        self.computed[slot] = computed
        self.blocks[slot, : len(blocks)] = blocks
        self.num_blocks[slot] = len(blocks)
        return slot

    def reserve(self, sequence: Sequence) -> int:
        """Give ``sequence`` a slot that stays idle, without tokens and blocks, until ``fork`` fills it."""
        slot = self._seat(sequence)
        self.length[slot] = self.computed[slot] = self.num_blocks[slot] = 0
        return slot

    def _seat(self, sequence: Sequence) -> int:
        slot = self._free.pop()
        request, sampling = sequence.request, sequence.request.sampling
        self.pending[slot] = 0
        self.prompt_length[slot] = len(request.prompt)
        self.limit[slot] = min(request.limit, self.max_length)
        self.min_length[slot] = min(len(request.prompt) + sampling.min_tokens, 2**31 - 1)
        stops = request.end_ids
        self.many_stops[slot] = len(stops) > STOP_IDS_WIDTH
        self.stop_ids[slot] = _NONE
        self.stop_ids[slot, : min(len(stops), STOP_IDS_WIDTH)] = stops[:STOP_IDS_WIDTH]
        self.logprobs[slot] = sampling.logprobs is not None
        self.handle[slot] = request.handle
        self.sequence_index[slot] = sequence.index
        self.gateway[slot] = request.gateway.index
        self.cached[slot] = request.cached_tokens
        self.named[slot] = 0
        self.nodes[slot] = request.cache_salt
        self.beam[slot] = request.beams is not None
        self.num_beams += request.beams is not None
        self.key[slot] = request.key
        self.arrival[slot] = request.arrival
        self.priority[slot] = request.priority
        self._sequences[slot] = sequence
        self._used[slot] = True
        self._slots = None
        sequence.slot = slot
        return slot

    def fork(self, parent: int, child: int) -> None:
        """Make ``child``, which is idle, the twin of ``parent``: same tokens, same block table."""
        length, blocks = self.length[parent], self.num_blocks[parent]
        self.tokens[child, :length] = self.tokens[parent, :length]
        self.blocks[child, :blocks] = self.blocks[parent, :blocks]
        self.length[child], self.num_blocks[child] = length, blocks
        self.computed[child] = self.computed[parent]
        self.named[child], self.nodes[child] = self.named[parent], self.nodes[parent]

    def is_idle(self, slot: int) -> bool:
        return not self.length[slot]

    def leave(self, slot: int) -> Sequence:
        """Take the sequence out of its slot, its tokens with it."""
        sequence = self.sequence(slot)
        if not self.is_idle(slot):
            sequence.tokens = self.tokens_of(slot).copy()
        self.num_beams -= bool(self.beam[slot])
        self.beam[slot] = False
        self._open_gate(slot)
        sequence.slot = -1
        self._sequences[slot] = None
        self._free.append(slot)
        self._used[slot] = False
        self._slots = None
        return sequence

    def close_gate(self, slot: int, other: int, at: int) -> None:
        """``slot`` must not run before ``other`` has computed ``at`` tokens."""
        self.gate[slot], self.gate_at[slot] = other, at
        self.num_gates += 1

    def gated(self, slot: int) -> bool:
        """Whether the row still waits at its gate; opens the gate once it need not."""
        gate = self.gate[slot]
        if gate != _NONE and self.computed[gate] >= self.gate_at[slot]:
            self._open_gate(slot)
            return False
        return bool(gate != _NONE)

    def _open_gate(self, slot: int) -> None:
        if self.gate[slot] != _NONE:
            self.gate[slot] = _NONE
            self.num_gates -= 1

    def append(self, slots: Int32Array, tokens: Int32Array) -> None:
        """Record one sampled token for each of ``slots``, which are distinct."""
        self.tokens[slots, self.length[slots]] = tokens
        self.length[slots] += 1
        self.pending[slots] -= 1

    def stopped(self, slots: Int32Array, tokens: Int32Array) -> npt.NDArray[np.bool_]:
        """[K] whether the token just appended to each slot is one of its end or stop tokens."""
        hit: npt.NDArray[np.bool_] = (self.stop_ids[slots] == tokens[:, None]).any(axis=1)
        many = self.many_stops[slots]
        if many.any():
            for i in np.flatnonzero(many):
                sampling = self.sequence(int(slots[i])).request.sampling
                token = int(tokens[i])
                hit[i] = token in sampling.stop_token_ids or (
                    not sampling.ignore_eos and token in sampling.eos_token_ids
                )
        return hit & (self.length[slots] >= self.min_length[slots])
