"""The worker's mirror of the sequences that the scheduler has placed here, one per slot, changed by deltas alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagemill_shared.errors import ProtocolError
from pagemill_shared.messages import IterationPlan, SequenceJoin
from pagemill_shared.schema import Int32Array
from pagemill_worker.grammar_rows import GrammarRows
from pagemill_worker.sampling_rows import SamplingRows

FIRST_COLUMNS = 256


class Rows:
    """Arrays over slots 0..max_num_seqs-1.

    Attributes:
        tokens: [S, C] int32, prompt then outputs; columns are added as sequences grow.
        lengths: [S] known tokens; 0 marks a free slot.
        prompt_lengths: [S].
        sequences: [S] index of the sequence in its request.
        tables: [S, W] int64 block tables; 0 where no block is known.
        table_lengths: [S] blocks.
        faulty: [S] rows that have failed; what they compute from then on is not used.
        sampling: parameters, penalty counts and grammars.
    """

    def __init__(
        self, max_num_seqs: int, num_blocks: int, vocab_size: int, device: torch.device, grammars: GrammarRows
    ) -> None:
        self.num_blocks, self.vocab_size = num_blocks, vocab_size
        n = max_num_seqs
        self.tokens = np.zeros((n, FIRST_COLUMNS), np.int32)
        self.lengths = np.zeros(n, np.int64)
        self.prompt_lengths = np.zeros(n, np.int64)
        self.sequences = np.zeros(n, np.int64)
        self.tables = np.zeros((n, FIRST_COLUMNS // 16), np.int64)
        self.table_lengths = np.zeros(n, np.int64)
        self.faulty = np.zeros(n, np.bool_)
        self.sampling = SamplingRows(n, vocab_size, device, grammars)

    def apply(self, plan: IterationPlan) -> None:
        """Carries out the plan's releases, joins, forks, new blocks and chosen tokens, in this order.

        Raises:
            ProtocolError: the plan contradicts what is known here. Rows may be half changed: the epoch is broken.
        """
        self._check_slots(plan.released, "released")
        for slot in plan.released.tolist():
            self._release(slot)
        for join in plan.joined:
            self._join(join)
            if join.sampling.grammar:
                outputs = join.token_ids[join.prompt_length :]
                self.sampling.grammars.join(join.slot, join.sampling.grammar, outputs, plan.epoch, plan.iteration)
        if plan.forks.size:
            self._check_slots(plan.forks[:, 0], "forked from")
            self._check_slots(plan.forks[:, 1], "forked to")
            for parent, child, sequence in plan.forks.tolist():
                self._fork(parent, child, sequence)
        if plan.new_blocks.size:
            self._append_blocks(plan.new_blocks)
        if plan.chosen.size:
            self._append_chosen(plan.chosen)

    def record(self, slots: npt.NDArray[np.int64], tokens: Int32Array) -> None:
        """Takes in one result for each of ``slots``; -1 marks the row as faulty.

        A sampled token is appended, a stand-in where it is -1. A beam waits for the token that the scheduler chooses.
        """
        failed = tokens < 0
        self.faulty[slots[failed]] = True
        sampled = self.sampling.candidates[slots] == 0
        self._append(slots[sampled], np.where(failed, 0, tokens)[sampled])
        good = sampled & ~failed
        self.sampling.counts.count(slots[good], tokens[good])
        self.sampling.grammars.advance(slots[good], tokens[good])

    def output_of(self, slot: int) -> Int32Array:
        """The tokens that the slot's sequence has generated, as a view."""
        output: Int32Array = self.tokens[slot, self.prompt_lengths[slot] : self.lengths[slot]]
        return output

    def _append(self, slots: npt.NDArray[np.int64], tokens: Int32Array) -> None:
        columns = self.lengths[slots]
        if columns.size and columns.max() >= self.tokens.shape[1]:
            self.tokens = _widened(self.tokens, int(columns.max()) + 1)
        self.tokens[slots, columns] = tokens
        self.lengths[slots] += 1

    def _append_chosen(self, chosen: Int32Array) -> None:
        slots, tokens = chosen[:, 0].astype(np.int64), chosen[:, 1]
        self._check_slots(slots, "given a token")
        for wrong, what in (
            (self.lengths[slots] == 0, "is free"),
            (self.sampling.candidates[slots] == 0, "is no beam"),
            (np.bincount(slots)[slots] > 1, "is given two"),
            (tokens >= self.vocab_size, f"knows a vocabulary of {self.vocab_size}"),
        ):
            if wrong.any():
                row = int(np.flatnonzero(wrong)[0])
                raise ProtocolError(f"token {tokens[row]} was chosen for slot {slots[row]}, which {what}")
        self._append(slots, tokens)
        self.sampling.counts.count(slots, tokens)

    def _release(self, slot: int) -> None:
        self.lengths[slot] = self.table_lengths[slot] = 0
        self.tables[slot] = 0
        self.faulty[slot] = False
        self.sampling.release(slot)

    def _join(self, join: SequenceJoin) -> None:
        slot, tokens, table = join.slot, join.token_ids, join.block_table
        self._check_slots(np.array([slot]), "joined")
        if self.lengths[slot]:
            raise ProtocolError(f"a sequence joins slot {slot}, which is taken")
        if not 1 <= join.prompt_length <= tokens.size or join.computed > tokens.size:
            raise ProtocolError(
                f"slot {slot} joins with {tokens.size} tokens, {join.prompt_length} of prompt, {join.computed} computed"
            )
        if tokens.max() >= self.vocab_size:
            raise ProtocolError(f"slot {slot} joins with token {tokens.max()} of a vocabulary of {self.vocab_size}")
        self._check_blocks(table)
        if tokens.size >= self.tokens.shape[1]:
            self.tokens = _widened(self.tokens, tokens.size + 1)
        if table.size > self.tables.shape[1]:
            self.tables = _widened(self.tables, table.size)
        self.tokens[slot, : tokens.size] = tokens
        self.lengths[slot] = tokens.size
        self.prompt_lengths[slot] = join.prompt_length
        self.sequences[slot] = join.sequence
        self.tables[slot] = 0
        self.tables[slot, : table.size] = table
        self.table_lengths[slot] = table.size
        self.faulty[slot] = False
        self.sampling.join(slot, join.sampling, tokens[: join.prompt_length], tokens[join.prompt_length :])

    def _fork(self, parent: int, child: int, sequence: int) -> None:
        if not self.lengths[parent]:
            raise ProtocolError(f"slot {child} forks from slot {parent}, which is free")
        if self.lengths[child]:
            raise ProtocolError(f"a sequence forks into slot {child}, which is taken")
        for array in (self.tokens, self.lengths, self.prompt_lengths, self.tables, self.table_lengths, self.faulty):
            array[child] = array[parent]
        self.sequences[child] = sequence
        self.sampling.fork(parent, child)

    def _append_blocks(self, new_blocks: Int32Array) -> None:
        slots, positions, blocks = new_blocks.T
        self._check_slots(slots, "given a block")
        self._check_blocks(blocks)
        most = int(positions.max())
        if most >= self.tables.shape[1]:
            if most > 2 * self.num_blocks + self.tables.shape[1]:
                raise ProtocolError(f"a block at position {most} of a block table, out of {self.num_blocks} blocks")
            self.tables = _widened(self.tables, most + 1)
        self.tables[slots, positions] = blocks
        np.maximum.at(self.table_lengths, slots, positions + 1)

    def _check_slots(self, slots: npt.NDArray[Any], what: str) -> None:
        if slots.size and slots.max() >= self.lengths.size:
            raise ProtocolError(f"slot {slots.max()} is {what}, but there are {self.lengths.size} slots")

    def _check_blocks(self, blocks: Int32Array) -> None:
        if blocks.size and not (blocks.min() >= 1 and blocks.max() <= self.num_blocks):
            raise ProtocolError(f"blocks {blocks.min()}..{blocks.max()} are not within 1..{self.num_blocks}")


def _widened(array: npt.NDArray[Any], columns: int) -> npt.NDArray[Any]:
    """The array with at least ``columns`` columns, doubled so that growth costs little in the long run."""
    wide = np.zeros((array.shape[0], max(columns, 2 * array.shape[1])), array.dtype)
    wide[:, : array.shape[1]] = array
    return wide
