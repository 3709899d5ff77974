"""Who runs and who waits: inputs that starved requests in systems like this one, and the bounds that hold here."""

from __future__ import annotations

import pytest
from pagemill_testing.single import Single, beams, greedy, ids, samples, single

from pagemill_shared.sampling import SamplingParams


def first_token_after(core: Single, handle: int, limit: int) -> int:
    for rounds in range(1, limit + 1):
        core.step()
        if core.count(handle):
            return rounds
    raise AssertionError(f"no token within {limit} rounds")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_stalls_nobody_and_is_hardly_delayed(depth: int) -> None:
    def rounds_for_the_prompt(others: bool) -> int:
        core = single(num_blocks=400, max_num_batched_tokens=64, pipeline_depth=depth)
        if others:
            running = core.submit(ids(5), greedy(200))
            core.step(4)
        long = core.submit(ids(2000, 2), greedy(3))
        core.step(2)
        rounds = 2
        if others:
            short = core.submit(ids(5, 3), greedy(3))
            assert first_token_after(core, short, 3 + depth - 1) <= 3 + depth - 1
            rounds += 3
        while not core.count(long):
            before = core.count(running) if others else 0
            core.step()
            rounds += 1
            if others:
                assert core.count(running) == before + 1
        return rounds

    assert rounds_for_the_prompt(others=True) <= 1.1 * rounds_for_the_prompt(others=False) + 1


@pytest.mark.parametrize(
    ("rate", "seconds", "budget"),
    [(500.0, 0.5, 250), (1.0, 0.5, 64), (1e9, 0.5, 1000), (float("inf"), 0.5, 1000), (500.0, 0.0, 1000)],
)
def test_a_slow_worker_computes_few_prompt_tokens_at_a_time(rate: float, seconds: float, budget: int) -> None:
    core = single(
        num_blocks=400,
        max_num_batched_tokens=1000,
        max_prefill_seconds=seconds,
        prefill_tokens_per_s=rate,
        max_num_seqs=30,
    )
    running = [core.submit(ids(5, first), greedy(200)) for first in range(20)]
    core.step(12)
    del core.plans[:]
    long, before = core.submit(ids(3000, 99), greedy(3)), [core.count(handle) for handle in running]
    while not core.count(long):
        core.step()
    gained = [core.count(handle) - count for handle, count in zip(running, before, strict=True)]
    chunks = [plan.prefill_chunks[:, 2].sum() for plan in core.plans]
    assert max(chunks) == min(budget, 1000 - len(running))  # decode rows are not part of it
    assert min(gained) >= len(core.plans) - 2
    core.step(4)
    core.check(long)
    [worker] = core.simulation.snapshot()["workers"]  # type: ignore[misc]
    assert worker["prefill_budget"] == budget


def test_short_prompts_pass_a_long_one_on_a_slow_worker() -> None:
    core = single(num_blocks=400, max_num_batched_tokens=2048, max_prefill_seconds=0.5, prefill_tokens_per_s=500.0)
    long = core.submit(ids(4000), greedy(3))
    core.step(2)
    assert first_token_after(core, core.submit(ids(120, 2), greedy(1)), 4) <= 4
    assert not core.count(long)
    core.run()
    core.check(long)


def test_an_urgent_request_gets_a_seat_within_two_plans() -> None:
    core = single(num_blocks=100, max_num_seqs=2)
    low = [core.submit(ids(5, first), greedy(200), priority=10) for first in (1, 2)]
    core.step(5)
    urgent = core.submit(ids(5, 3), greedy(5), priority=0)
    core.step(2)
    assert core.info(urgent)["status"] == "running"
    assert (core.preemptions(low[0]), core.preemptions(low[1])) == (0, 1)
    core.run()
    core.check(urgent, *low)


def test_an_urgent_request_takes_blocks_from_as_few_as_it_needs() -> None:
    core = single(num_blocks=20, max_num_seqs=8)
    low = [core.submit(ids(60, first), greedy(10), priority=10) for first in range(4)]
    core.step(2)
    urgent = core.submit(ids(100, 9), greedy(5), priority=0)
    core.step(2)
    assert core.info(urgent)["status"] == "running"
    assert [core.preemptions(handle) for handle in low] == [0, 0, 0, 1]
    core.run()
    core.check(urgent, *low)


def test_nobody_is_preempted_for_an_urgent_request_that_would_not_fit_even_then() -> None:
    core = single(num_blocks=20, max_num_seqs=8)
    old = core.submit(ids(150, 1), greedy(50), priority=0)
    low = core.submit(ids(60, 2), greedy(10), priority=10)
    core.step(2)
    urgent = core.submit(ids(300, 3), greedy(5), priority=1)
    core.step(6)
    assert core.info(urgent)["status"] == "waiting"
    assert core.preemptions(low) == 0
    core.run()
    core.check(old, low, urgent)


def test_equal_priority_never_preempts_for_a_seat() -> None:
    core = single(num_blocks=100, max_num_seqs=2)
    handles = [core.submit(ids(5, first), greedy(30)) for first in range(3)]
    core.run()
    core.check(*handles)
    assert core.metric("num_preemptions_total") == 0


def test_a_preempted_request_goes_before_those_that_came_later() -> None:
    core = single(num_blocks=12, max_num_seqs=3)
    oldest = core.submit(ids(90, 1), greedy(60))
    preempted = core.submit(ids(60, 2), greedy(40))
    while not core.info(preempted)["preemptions"]:
        core.step()
    later = core.submit(ids(5, 3), greedy(5))
    while not core.answer(preempted).done:
        core.step()
        if not core.answer(preempted).done and core.info(preempted)["status"] == "waiting":
            assert core.info(later)["status"] == "waiting", "started before a preempted one of equal priority"
    core.run()
    core.check(oldest, preempted, later)


def test_one_that_came_earlier_but_never_started_goes_before_a_preempted_one() -> None:
    """Order is by priority and arrival alone, whatever has happened since."""
    core = single(num_blocks=12, max_num_seqs=2)
    oldest = core.submit(ids(90, 1), greedy(60))
    core.submit(ids(60, 2), greedy(1))
    core.step(1)
    never_started = core.submit(ids(120, 3), greedy(5))
    waiting = [r.handle for r in core.simulation.state.queue]
    assert waiting == [never_started]
    later = core.submit(ids(5, 4), greedy(5))
    core.run()
    started = [join.token_ids.tolist() for plan in core.plans for join in plan.joined]
    assert started.index(ids(120, 3)) < started.index(ids(5, 4))
    core.check(oldest, never_started, later)


def test_requests_with_equal_time_stamps_keep_their_order() -> None:
    orders = set()
    for _ in range(20):
        core = single(num_blocks=20, max_num_seqs=1)
        for first in range(3):
            core.submit(ids(5, first), greedy(3))
        core.run()
        orders.add(tuple(join.token_ids[0] for plan in core.plans for join in plan.joined))
    assert len(orders) == 1


@pytest.mark.parametrize("sampling", [samples(4, 5), beams(4, 5)], ids=["n", "beam_width"])
def test_more_sequences_than_seats_are_refused_with_the_numbers(sampling: SamplingParams) -> None:
    core = single(num_blocks=100, max_num_seqs=2)
    failure = core.answer(core.submit(ids(5), sampling)).failure
    assert failure is not None
    assert failure.code == "too_many_sequences"
    assert failure.message == "4 sequences at once were asked for, but a worker runs at most 2"
    single_rows = [core.submit(ids(5, first), greedy(5)) for first in range(4)]
    core.run()
    core.check(*single_rows)


def test_more_sequences_than_the_pool_holds_are_refused_with_the_numbers() -> None:
    core = single(num_blocks=12)
    failure = core.answer(core.submit(ids(40), samples(4, 50))).failure
    assert failure is not None
    assert (failure.code, failure.param) == ("too_many_sequences", "n")
    # 2 full blocks of the prompt are shared; each sequence has 4 of its own.
    assert "need 18 blocks of 16 tokens, but the largest pool has 12" in failure.message
    fits = core.submit(ids(40), samples(2, 50))
    core.run()
    core.check(fits)


def test_a_starved_request_starts_within_the_tokens_of_those_before_it() -> None:
    """First come first served: whoever waits runs at the latest when all that came before have ended, and they need one
    step for each of their tokens and each of their chunks, however many come later."""
    core = single(num_blocks=24, max_num_seqs=4, max_num_batched_tokens=32)
    before = [core.submit(ids(40, first), greedy(40)) for first in range(6)]
    waiting = core.submit(ids(300, 50), greedy(2))  # it needs the pool almost for itself
    bound = 6 * (40 + 2 + 2) + 10 + 2
    after = []
    for rounds in range(bound):
        if core.count(waiting):
            break
        after.append(core.submit(ids(20, 100 + rounds), greedy(5)))
        core.step()
    assert core.count(waiting), f"no token within {bound} iterations"
    assert all(core.answer(handle).done for handle in before)
    core.run()
    core.check(waiting, *before, *after)


def test_without_ageing_lower_priority_waits_for_all_that_is_higher() -> None:
    core = single(num_blocks=100, max_num_seqs=1)
    low = core.submit(ids(5), greedy(3), priority=1)
    for first in range(30):
        core.submit(ids(5, first), greedy(2), priority=0)
        core.simulation.tick(seconds=1.0)
        core.worker.step()
        core.simulation.beat(0.0)
    assert not core.answer(low).done


def test_with_ageing_a_low_priority_request_overtakes_those_that_came_much_later() -> None:
    """5 seconds of waiting outweigh one step of priority: it goes before all that came 5 seconds after it."""
    core = single(num_blocks=100, max_num_seqs=1, priority_aging=5.0)
    first = core.submit(ids(5, 90), greedy(10), priority=0)
    low = core.submit(ids(5, 80), greedy(3), priority=1)
    others = []
    for number in range(20):
        others.append(core.submit(ids(5, number), greedy(2), priority=0))
        core.simulation.tick(seconds=1.0)
        core.worker.step()
        core.simulation.beat(0.0)
    core.run()
    started = [join.token_ids.tolist() for plan in core.plans for join in plan.joined]
    place = started.index(ids(5, 80))
    came_before = [number for number in range(20) if started.index(ids(5, number)) < place]
    assert came_before == [number for number in range(20) if number < 5]
    core.check(first, low, *others)


def test_extreme_priorities_with_ageing_are_ordered() -> None:
    core = single(num_blocks=100, max_num_seqs=1, priority_aging=1e9)
    late = core.submit(ids(5, 1), greedy(2), priority=2**31 - 1)
    soon = core.submit(ids(5, 2), greedy(2), priority=-(2**31))
    core.run()
    core.check(late, soon)
    started = [join.token_ids.tolist() for plan in core.plans for join in plan.joined]
    assert started == [ids(5, 2), ids(5, 1)]


def test_a_preempted_group_takes_only_the_seats_that_it_still_needs() -> None:
    core = single(num_blocks=30, max_num_seqs=4)
    group = core.submit(ids(20), samples(4, 40))
    core.step(4)
    for sequence in range(3):
        core.finish(group, sequence)
    others = [core.submit(ids(20, first), greedy(60), priority=-1) for first in (2, 3, 4)]
    urgent = core.submit(ids(20, 5), greedy(3), priority=-1)
    core.step(3)
    assert core.preemptions(group) == 1
    while not core.answer(urgent).done:
        core.step()
    core.step(3)
    assert core.info(group)["status"] == "running", "one seat is free, and it needs one"
    core.run()
    core.check(urgent, *others)
    assert len(core.answer(group).tokens[3]) == 40


@pytest.mark.parametrize("budget", range(4, 17))
def test_a_group_forks_wherever_the_last_chunk_of_its_prompt_begins(budget: int) -> None:
    core = single(num_blocks=30, max_num_seqs=4, max_num_batched_tokens=budget)
    group = core.submit(ids(16), samples(3, 5))
    core.run()
    core.check(group)
