"""The core and a slow, obvious one get the same events: their plans must say the same."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from pagemill_testing.reference_core import ReferenceCore
from pagemill_testing.reference_rows import Block, Group, Plan, Row
from pagemill_testing.single import Single, single

from pagemill_shared.messages import IterationPlan
from pagemill_shared.sampling import SamplingParams

SIZE = 4
BLOCKS = 14

prompts = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=14),
    st.builds(lambda length, end: [7] * length + end, st.integers(1, 14), st.lists(st.integers(0, 3), max_size=4)),
)


class Lockstep(RuleBasedStateMachine):
    """Slots and block numbers of the core are translated by what the plans say; tables are compared up to renaming."""

    seen: Counter[str]

    @initialize(
        seats=st.integers(1, 6),
        budget=st.integers(6, 30),
        host=st.sampled_from([0, 4, 30]),
        mode=st.sampled_from(["swap", "recompute"]),
        caching=st.booleans(),
        depth=st.integers(1, 2),
    )
    def begin(self, seats: int, budget: int, host: int, mode: str, caching: bool, depth: int) -> None:
        seats = min(seats, budget)
        self.core: Single = single(
            block_size=SIZE,
            num_blocks=BLOCKS,
            num_swap_blocks=host,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            preemption_mode=mode,
            prefix_caching=caching,
            pipeline_depth=depth,
            watermark=0.0,
        )
        self.reference = ReferenceCore(SIZE, BLOCKS, host, seats, budget, mode, caching)
        self.depth = depth
        self.slots: dict[int, Row] = {}
        self.flights: list[list[Row]] = []
        self.groups: dict[int, Group] = {}

    @rule(
        prompt=prompts,
        n=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.integers(1, 16),
        ends=st.sets(st.integers(0, 999), max_size=60),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "", "pepper"]),
    )
    def submit(self, prompt: list[int], n: int, max_tokens: int, ends: set[int], priority: int, salt: str) -> None:
        sampling = SamplingParams(
            temperature=1.0,
            seed=len(self.core.gateway.answers),  # no two requests sample the same
            n=n,
            max_tokens=max_tokens,
            stop_token_ids=np.array(sorted(ends), np.int32),
        )
        handle = self.core.submit(prompt, sampling, priority, salt)
        if self.core.answer(handle).failure is None:
            group = Group(handle, prompt, n, max_tokens, ends, priority, salt)
            self.groups[handle] = group
            self.reference.submit(group)

    @rule(pick=st.integers(0, 100))
    def abort(self, pick: int) -> None:
        if self.reference.groups:
            group = self.reference.groups[pick % len(self.reference.groups)]
            self.core.gateway.abort(group.handle)
            self.reference.abort(group)
        self.compare()

    @rule()
    def tick(self) -> None:
        before = len(self.core.worker.plans)
        self.core.simulation.tick()
        real = list(self.core.worker.plans)[before:]
        while len(self.flights) < self.depth:
            wanted = self.reference.plan()
            if wanted is None:
                break
            assert real, f"the core makes no plan, the reference {wanted}"
            self.same(real.pop(0), wanted)
        assert not real, f"only the core makes a plan: {real[0]}"
        self.compare()

    @rule()
    def result(self) -> None:
        if not self.flights:
            return
        result = self.core.worker.result()
        assert result is not None
        self.core.worker.sent = result.iteration
        self.core.simulation.receive(self.core.worker.peer, result)
        self.reference.result(self.flights.pop(0), result.token_ids.tolist())
        self.compare()

    @rule(rounds=st.integers(1, 5))
    def go_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.tick()
            self.result()

    def same(self, real: IterationPlan, wanted: Plan) -> None:
        for slot in real.released.tolist():
            del self.slots[slot]
        joins = [(join.sequence, join.computed, len(join.block_table)) for join in real.joined]
        assert joins == [join[1:] for join in wanted.joins]
        for join, (handle, sequence, _, _) in zip(real.joined, wanted.joins, strict=True):
            row = self.groups[handle].rows[sequence]
            assert join.token_ids.tolist() == row.tokens
            self.slots[join.slot] = row
        for parent, child, sequence in real.forks.tolist():
            self.slots[child] = self.slots[parent].request.rows[sequence]
        who = {slot: (row.request.handle, row.index) for slot, row in self.slots.items()}
        assert {who[slot] for slot in real.decode_rows.tolist()} == wanted.rows
        assert [(*who[slot], *rest) for slot, *rest in real.prefill_chunks.tolist()] == wanted.chunks
        copied = set(real.block_copies[:, 1].tolist())
        grown = {(*who[slot], position) for slot, position, block in real.new_blocks.tolist() if block not in copied}
        assert grown == wanted.grown
        moved = len(real.block_copies), len(real.swap_out), len(real.swap_in)
        assert moved == (wanted.copies, wanted.swapped_out, wanted.swapped_in)
        self.seen.update(plans=1, copies=wanted.copies, swapped_in=wanted.swapped_in, joins=len(wanted.joins))
        self.seen.update(resumed=sum(len(join.token_ids) > join.prompt_length for join in real.joined))
        self.flights.append([self.slots[slot] for slot in real.decode_rows.tolist()] + wanted.sampled)

    def compare(self) -> None:
        """The block tables are the same but for the numbers of the blocks, and so are the pools."""
        worker = self.core.simulation.state.workers["w"]
        table, pool = worker.table, worker.pool
        renamed: dict[int, Block] = {}
        for slot in table.slots().tolist():
            sequence = table.sequence(slot)
            row = self.groups[sequence.request.handle].rows[sequence.index]
            assert row.table is not None
            real = table.blocks_of(slot).tolist()
            assert len(real) == len(row.table)
            for block, known in zip(real, row.table, strict=True):
                assert renamed.setdefault(block, known) is known
        assert len(set(renamed.values())) == len(renamed)
        assert pool.num_used == self.reference.used()
        assert pool.num_evictable == len(self.reference.evictable)
        assert worker.host.num_available == self.reference.host_free
        assert len(self.core.simulation.state.queue) == len(self.reference.waiting())

    def teardown(self) -> None:
        if hasattr(self, "core"):
            for _ in range(400):
                if not self.reference.groups:
                    break
                self.go_on(1)
            assert not self.reference.groups
            while self.flights:
                self.result()
            self.core.simulation.assert_free()


def run_lockstep(examples: int, least: dict[str, int]) -> Counter[str]:
    """What all examples together have seen; a few times as many are taken where that is less than ``least``."""
    seen: Counter[str] = Counter()
    for _ in range(5):
        run_once(examples, seen)
        if all(seen[name] >= count for name, count in least.items()):
            break
    return seen


def run_once(examples: int, seen: Counter[str]) -> None:
    run_state_machine_as_test(
        type("Lockstep", (Lockstep,), {"seen": seen}),
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


@pytest.mark.timeout(600)
def test_the_core_plans_as_the_reference_does() -> None:
    least = {"plans": 500, "resumed": 1}
    seen = run_lockstep(150, least)
    assert all(seen[name] >= count for name, count in least.items()), seen


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_the_core_plans_as_the_reference_does_in_a_long_run() -> None:
    least = dict.fromkeys(("copies", "swapped_in", "resumed"), 101)
    seen = run_lockstep(2000, least)
    assert all(seen[name] >= count for name, count in least.items()), seen
