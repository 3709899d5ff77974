"""A simple scheduler for one runner: gives blocks, shares them between forks, swaps and recomputes when told to.

It is obvious rather than fast, never runs out of blocks silently, and reuses a freed block at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pagemill_shared.messages import IterationPlan, IterationResult, SequenceJoin, WorkerWelcome
from pagemill_shared.sampling import SamplingParams
from pagemill_worker.runner import Runner

GREEDY = SamplingParams(temperature=0.0)


@dataclass(eq=False)
class DrivenSequence:
    """``table`` holds device blocks, ``host`` the host blocks while swapped out; ``computed`` tokens have keys."""

    prompt: list[int]
    sampling: SamplingParams
    index: int
    wanted: int
    forks: list[DrivenSequence] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    slot: int | None = None
    table: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    computed: int = 0
    failed: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs

    @property
    def done(self) -> bool:
        return self.failed or len(self.outputs) >= self.wanted


class PlanDriver:
    """Drives ``runner`` with plans of its own making.

    Args:
        chunk: most tokens of a prompt in one iteration.
    """

    def __init__(self, runner: Runner, max_num_seqs: int = 8, chunk: int = 1000) -> None:
        self.runner, self.chunk = runner, chunk
        self.block_size = runner.cache.block_size
        self.free_blocks = list(range(runner.cache.num_blocks, 0, -1))
        self.references: dict[int, int] = {}
        self.free_host = list(range(runner.cache.num_swap_blocks))
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.sequences: list[DrivenSequence] = []
        self.results: list[IterationResult] = []
        self.plans: list[IterationPlan] = []
        self._released: list[int] = []
        self._swap_out: list[tuple[int, int]] = []
        runner.begin(WorkerWelcome(7, max_num_seqs, 4096))

    # ------------------------------------------------------------ what tests call

    def add(
        self, prompt: list[int], wanted: int, sampling: SamplingParams = GREEDY, n: int = 1
    ) -> list[DrivenSequence]:
        """A request of ``n`` sequences, which joins with the next step."""
        group = [DrivenSequence(list(prompt), sampling, index, wanted) for index in range(n)]
        group[0].forks = group[1:]
        self.sequences.append(group[0])
        return group

    def run(self) -> None:
        while any(not sequence.done for sequence in self.sequences):
            self.step()

    def recompute(self, sequence: DrivenSequence) -> None:
        """Preempts: drops the blocks; the sequence joins again with the next step."""
        self._leave(sequence)
        sequence.computed = 0

    def swap_out(self, sequence: DrivenSequence) -> None:
        """Preempts to the host pool; the sequence comes back with `swap_in`."""
        for block in sequence.table:
            sequence.host.append(self.free_host.pop())
            self._swap_out.append((block, sequence.host[-1]))
        self._leave(sequence)

    def swap_in(self, sequence: DrivenSequence) -> list[tuple[int, int]]:
        """Gives it device blocks again; returns the pairs for the next step."""
        pairs = []
        for host in sequence.host:
            block = self._take()
            pairs.append((host, block))
            sequence.table.append(block)
        self.free_host.extend(sequence.host)  # reusable from the next plan on: nothing else swaps out in this one
        sequence.host = []
        return pairs

    def step(self, swap_in: list[tuple[int, int]] | None = None) -> IterationResult:
        """One iteration for all sequences that are not done and not swapped out."""
        joined, forks, new_blocks, copies = [], [], [], []
        decodes: list[DrivenSequence] = []
        chunks: list[tuple[DrivenSequence, int, int, int]] = []
        # A block freed by a plan is taken by the same plan: rows leave before others join.
        for sequence in list(self.sequences):
            if sequence.done or sequence.host:
                continue
            if sequence.slot is None:
                joined.append(self._join(sequence))
            known = len(sequence.tokens)
            count = min(self.chunk, known - sequence.computed)
            first_time = len(sequence.outputs) == 0
            last = sequence.computed + count == known
            for position in range(sequence.computed, sequence.computed + count):
                self._own(sequence, position // self.block_size, new_blocks, copies)
            if count == 1 and not first_time:
                decodes.append(sequence)
            else:
                samples = 1 + len(sequence.forks) if last else 0
                chunks.append((sequence, sequence.computed, count, samples))
        for sequence, _, _, samples in chunks:
            if samples > 1:
                own = [(position, block) for slot, position, block in new_blocks if slot == sequence.slot]
                for child in sequence.forks:
                    forks.append(self._fork(sequence, child))
                    # Forks come before new blocks, so what the parent gets in this plan its children must get, too.
                    new_blocks += [(forks[-1][1], *pair) for pair in own]
        plan = IterationPlan(
            epoch=7,
            iteration=len(self.plans) + 1,
            released=np.array(self._released, np.int32),
            joined=tuple(joined),
            forks=np.array(forks, np.int32).reshape(-1, 3),
            new_blocks=np.array(new_blocks, np.int32).reshape(-1, 3),
            swap_out=np.array(self._swap_out, np.int32).reshape(-1, 2),
            swap_in=np.array(swap_in or [], np.int32).reshape(-1, 2),
            block_copies=np.array(copies, np.int32).reshape(-1, 2),
            decode_rows=np.array([sequence.slot for sequence in decodes], np.int32),
            prefill_chunks=np.array([(s.slot, *rest) for s, *rest in chunks], np.int32).reshape(-1, 4),
            reporting=np.array(
                [s.slot for s, start, *_ in chunks if s.sampling.reports_prompt and start < len(s.prompt)], np.int32
            ),
        )
        self._released, self._swap_out = [], []
        result = self.runner.execute(plan)
        self.plans.append(plan)
        self.results.append(result)
        tokens = iter(result.token_ids.tolist())
        for sequence in decodes:
            sequence.computed += 1
            self._append(sequence, next(tokens))
        for sequence, _, count, samples in chunks:
            sequence.computed += count
            owners = [sequence, *sequence.forks][:samples]
            if samples:
                for child in sequence.forks:
                    child.computed = sequence.computed
                sequence.forks = []
            for owner in owners:
                self._append(owner, next(tokens))
        assert next(tokens, None) is None
        for sequence in self.sequences:
            if sequence.done and sequence.slot is not None:
                self._leave(sequence)
        return result

    # ------------------------------------------------------------ memory

    def _append(self, sequence: DrivenSequence, token: int) -> None:
        sequence.failed = token < 0
        if token >= 0:
            sequence.outputs.append(token)

    def _join(self, sequence: DrivenSequence) -> SequenceJoin:
        sequence.slot = self.free_slots.pop()
        return SequenceJoin(
            slot=sequence.slot,
            sequence=sequence.index,
            prompt_length=len(sequence.prompt),
            computed=sequence.computed,
            token_ids=np.array(sequence.tokens, np.int32),
            block_table=np.array(sequence.table, np.int32),
            sampling=sequence.sampling,
        )

    def _fork(self, parent: DrivenSequence, child: DrivenSequence) -> tuple[int, int, int]:
        child.slot = self.free_slots.pop()
        child.table = list(parent.table)
        for block in child.table:
            self.references[block] += 1
        self.sequences.append(child)
        assert parent.slot is not None
        return parent.slot, child.slot, child.index

    def _own(
        self,
        sequence: DrivenSequence,
        position: int,
        new_blocks: list[tuple[int, int, int]],
        copies: list[tuple[int, int]],
    ) -> None:
        """Before a token is written: a block of its own at ``position`` of the table, copied if it was shared."""
        assert sequence.slot is not None
        if position == len(sequence.table):
            sequence.table.append(self._take())
        elif self.references[sequence.table[position]] > 1:
            shared = sequence.table[position]
            self.references[shared] -= 1
            sequence.table[position] = self._take()
            copies.append((shared, sequence.table[position]))
        else:
            return
        new_blocks.append((sequence.slot, position, sequence.table[position]))

    def _take(self) -> int:
        block = self.free_blocks.pop()
        self.references[block] = 1
        return block

    def _leave(self, sequence: DrivenSequence) -> None:
        assert sequence.slot is not None
        self._released.append(sequence.slot)
        self.free_slots.append(sequence.slot)
        sequence.slot = None
        self._drop(sequence)

    def _drop(self, sequence: DrivenSequence) -> None:
        """Gives up its references to blocks."""
        for block in sequence.table:
            self.references[block] -= 1
            if not self.references[block]:
                self.free_blocks.append(block)
        sequence.table = []
