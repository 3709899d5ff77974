"""Swapping, and the order of memory operations: each hazard is built, and the fake worker reads every key."""

from __future__ import annotations

import numpy as np
import pytest
from pagemill_testing.single import Single, beams, greedy, ids, samples, single

from pagemill_scheduler import planner
from pagemill_shared.messages import IterationPlan
from pagemill_shared.sampling import SamplingParams


def swapping(**fields: object) -> Single:
    return single(**({"preemption_mode": "swap", "num_swap_blocks": 40, "prefix_caching": False} | fields))


def preempt_last(core: Single, why: str = "a test asked for it") -> None:
    """Preempt the request that comes last in order."""
    worker = core.simulation.state.workers["w"]
    slots = worker.table.ordered(worker.table.slots())
    planner.preempt_for(core.simulation.state, worker, worker.table.sequence(int(slots[-1])).request, why)


def preempt_when_full(core: Single, young: int) -> IterationPlan:
    """Go on until ``young`` is preempted; the plan that says so."""
    while not core.preemptions(young):
        core.step()
    core.step(2)
    [plan] = [plan for plan in core.plans if len(plan.swap_out)]
    return plan


def test_a_block_is_swapped_out_and_becomes_the_target_of_a_copy_in_one_plan() -> None:
    # 3 + 6 blocks of 4 are all that there is: when the older group needs copies, the younger one must go.
    core = swapping(block_size=4, num_blocks=9, pipeline_depth=1)
    old = core.submit(ids(10), samples(3, 5))
    young = core.submit(ids(20, 2), greedy(3))
    core.step(1)
    plan = preempt_when_full(core, young)
    swapped, targets = set(plan.swap_out[:, 0].tolist()), set(plan.block_copies[:, 1].tolist())
    assert swapped & targets, "this plan builds the hazard"
    core.run()
    core.check(old, young)
    core.simulation.assert_free()


def test_an_urgent_request_takes_the_blocks_of_one_that_is_swapped_out() -> None:
    core = swapping(block_size=4, num_blocks=10, max_num_seqs=2, pipeline_depth=1)
    low = core.submit(ids(20), greedy(12), priority=1)
    core.step(2)
    preempt_last(core)  # low is in host memory; now something urgent keeps it there
    urgent = core.submit(ids(30, 2), greedy(8), priority=0)
    core.step(2)
    assert core.info(low)["swapped_out"]
    core.run()
    core.check(low, urgent)
    core.simulation.assert_free()


def test_a_host_block_freed_by_a_swap_in_is_written_by_the_next_plan_only() -> None:
    core = swapping(num_blocks=16, num_swap_blocks=3, max_num_seqs=2, pipeline_depth=1)
    first = core.submit(ids(40), greedy(30))
    core.step(2)
    preempt_last(core)
    core.step(1)  # swapped out and in again within this plan: the host blocks are read at its end
    [plan] = [plan for plan in core.plans if len(plan.swap_in)]
    assert sorted(plan.swap_in[:, 0].tolist()) == [0, 1, 2]
    second = core.submit(ids(40, 2), greedy(30))
    core.step(1)
    preempt_last(core)
    core.step(1)
    later = [p for p in core.plans if len(p.swap_out) and p.iteration > plan.iteration]
    assert sorted(later[0].swap_out[:, 1].tolist()) == [0, 1, 2], "the same host blocks, in a later plan"
    core.run()
    core.check(first, second)
    core.simulation.assert_free()


def test_host_blocks_still_read_by_the_plan_being_made_are_not_written_by_it() -> None:
    core = swapping(num_blocks=16, num_swap_blocks=3, max_num_seqs=2, pipeline_depth=1)
    first = core.submit(ids(40), greedy(30))
    core.step(2)
    preempt_last(core)
    core.simulation.tick()
    host = core.simulation.state.workers["w"].host
    assert (host.num_available, host.num_free) == (3, 3), "free again once the plan is made"
    core.run()
    core.check(first)


@pytest.mark.parametrize("sampling", [samples(3, 6), beams(3, 6)], ids=["samples", "beams"])
def test_a_shared_tail_is_swapped_in_once_and_then_copied(sampling: SamplingParams) -> None:
    core = swapping(block_size=4, num_blocks=20, pipeline_depth=1)
    group = core.submit(ids(10), sampling)
    core.step(1)
    preempt_last(core)  # the prompt is computed, its last block is half full and shared by all
    core.run()
    swapped_in = core.rows("swap_in")
    assert len(swapped_in) == 3, "three blocks, each moved once"
    tail = swapped_in[-1, 1]
    copies = core.rows("block_copies")
    assert copies[:, 0].tolist()[:2] == [tail, tail], "all but the last owner copy it"
    core.check(group)
    core.simulation.assert_free()


@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize("sampling", [samples(4, 9), beams(3, 9)], ids=["samples", "beams"])
def test_a_group_is_swapped_as_a_whole_with_each_block_moved_once(sampling: SamplingParams, steps: int) -> None:
    core = swapping(block_size=4, num_blocks=60, pipeline_depth=1)
    group = core.submit(ids(11), sampling)
    core.step(steps)
    pool = core.simulation.state.workers["w"].pool
    used = pool.num_used
    preempt_last(core)
    assert pool.num_used == 0, "no device reference is kept"
    assert core.metric("num_requests_swapped") == 1
    assert core.simulation.state.workers["w"].host.num_free == 40 - used
    core.run()
    assert len(core.rows("swap_out")) == len(core.rows("swap_in")) == used
    assert core.metric("recomputed_tokens_total") == 0
    core.check(group)
    core.simulation.assert_free()
    assert core.ended(group)["swapped_bytes"] == 2 * used * 1024


@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize("sampling", [samples(4, 9), beams(3, 9)], ids=["samples", "beams"])
def test_a_recomputed_group_computes_each_shared_full_block_once(sampling: SamplingParams, steps: int) -> None:
    core = swapping(block_size=4, num_blocks=60, pipeline_depth=1, preemption_mode="recompute")
    group = core.submit(ids(11), sampling)
    core.step(steps)
    table = core.simulation.state.workers["w"].table
    prefixes, tails = set(), 0
    for slot in table.slots().tolist():
        tokens = table.tokens_of(slot).tolist()
        full = (len(tokens) - 1) // 4
        prefixes |= {tuple(tokens[: (i + 1) * 4]) for i in range(full)}
        tails += len(tokens) - full * 4
    preempt_last(core)
    plans = len(core.plans)
    core.run()
    recomputed = sum(int(plan.prefill_chunks[:, 2].sum()) for plan in core.plans[plans:])
    assert 4 * len(prefixes) <= recomputed <= 4 * len(prefixes) + tails
    core.check(group)
    core.simulation.assert_free()


def test_the_preempted_group_needs_no_more_than_its_admission_counted() -> None:
    """Recomputation that is interrupted, in a pool of exactly the group's size."""
    # 8 full blocks of the prompt and 4 x 2 more.
    core = single(
        block_size=4, num_blocks=16, max_num_batched_tokens=10, prefix_caching=False, preemption_mode="recompute"
    )
    group = core.submit(ids(32), samples(4, 8))
    while core.count(group) < 3:
        core.step()
    for _ in range(3):
        preempt_last(core)
        core.step(3)  # a few chunks of the first sequence are recomputed, the others wait at their gates
        assert core.simulation.state.workers["w"].table.num_gates
    core.run()
    core.check(group)
    core.simulation.assert_free()


def test_first_tokens_that_were_lost_are_sampled_from_one_row_again() -> None:
    """Or each sequence would need its own copy of the prompt's last block, for which there is no room."""
    core = single(block_size=4, num_blocks=11, prefix_caching=False)
    group = core.submit(ids(12), samples(4, 8))
    core.simulation.tick()
    core.worker.hello()  # it has forgotten all, with the first tokens on their way
    core.run()
    core.check(group)
    core.simulation.assert_free()


def test_auto_takes_what_costs_less() -> None:
    def mode(prefill_tokens_per_s: float) -> object:
        core = swapping(preemption_mode="auto", num_blocks=20, prefill_tokens_per_s=prefill_tokens_per_s)
        handle = core.submit(ids(64), greedy(10))
        core.step(2)
        preempt_last(core)
        core.run()
        core.check(handle)
        [log] = [log for log in core.simulation.logs if log.event == "preempted"]
        return log.fields["mode"]

    # A block is 16 tokens and 1024 bytes; moved there and back at 1 MB/s it takes 2 ms.
    assert mode(prefill_tokens_per_s=16 / 0.0015) == "recompute"
    assert mode(prefill_tokens_per_s=16 / 0.0025) == "swap"


def test_two_swapped_groups_come_back_in_order_before_anyone_new() -> None:
    core = swapping(block_size=4, num_blocks=30, max_num_seqs=4)
    groups = [core.submit(ids(10, first), samples(2, 20)) for first in (1, 2)]
    core.step(3)
    for _ in groups:
        preempt_last(core)
    new = core.submit(ids(10, 3), greedy(5))
    core.run()
    core.check(*groups, new)
    joined = [(join.token_ids[0], join.sequence) for plan in core.plans for join in plan.joined][2:]
    assert [token for token, _ in joined] == [ids(1, first)[0] for first in (1, 1, 2, 2, 3)]


def test_nobody_goes_to_a_worker_that_a_swapped_request_waits_for() -> None:
    core = swapping(block_size=4, num_blocks=12, max_num_seqs=2)
    held = core.submit(ids(30), greedy(10))
    core.step(2)
    preempt_last(core)
    blocker = core.submit(ids(40, 2), greedy(8), priority=-1)  # leaves no room for it on the worker that holds it
    core.step(1)
    other = core.simulation.add_worker("v", block_size=4, num_blocks=12)
    new = core.submit(ids(6, 3), greedy(3))
    while not core.answer(new).done:
        core.simulation.tick()
        other.step()
    assert core.info(held)["status"] == "waiting"
    core.run()
    core.check(held, blocker, new)


def test_a_worker_that_is_lost_takes_what_was_swapped_to_it() -> None:
    core = swapping(num_blocks=16, max_num_seqs=4)
    group = core.submit(ids(40), samples(2, 10))
    core.step(3)
    preempt_last(core)
    assert core.info(group)["swapped_out"]
    core.simulation.kill(core.worker)
    other = core.simulation.add_worker("v", block_size=4, num_blocks=60)
    core.simulation.beat()
    core.run()
    core.check(group)
    assert other.worker.computed_tokens > 0


def test_no_list_of_a_plan_has_a_block_twice() -> None:
    core = swapping(block_size=4, num_blocks=14, num_swap_blocks=10)
    handles = [core.submit(ids(9, first), samples(3, 8) if first % 2 else beams(2, 8)) for first in range(6)]
    core.run()
    core.check(*handles)
    assert core.metric("swapped_out_blocks_total") > 0
    for plan in core.plans:
        for pairs in (plan.swap_out, plan.swap_in, plan.block_copies):
            assert len(np.unique(pairs[:, 1])) == len(pairs)
        assert not set(plan.block_copies[:, 0].tolist()) & set(plan.block_copies[:, 1].tolist())


def test_what_others_computed_meanwhile_is_not_computed_again() -> None:
    core = swapping(block_size=4, num_blocks=30, max_num_batched_tokens=8, max_num_seqs=1, prefix_caching=True)
    slow = core.submit(ids(40), greedy(5), priority=1)
    core.step(2)
    urgent = core.submit(ids(40), greedy(5), priority=0)
    core.run()
    core.check(slow, urgent)
    assert core.preemptions(slow) == 1
    join = [join for plan in core.plans for join in plan.joined][-1]
    assert join.computed == 36
