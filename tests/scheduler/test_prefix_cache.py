"""The prefix cache across requests: what is computed once stays computed once."""

from __future__ import annotations

import numpy as np
import pytest
from pagemill_testing.single import Single, beams, greedy, ids, samples, single

SYSTEM = ids(1000, first=99)
BLOCKS = 1000 // 16
REST = 1000 - BLOCKS * 16 + 8
"""Tokens of each prompt that no full block of the system prompt holds."""


def many(core: Single, count: int) -> list[int]:
    return [core.submit(SYSTEM + ids(8, first), greedy(4)) for first in range(count)]


def computed(core: Single) -> int:
    return core.worker.worker.computed_tokens


@pytest.mark.parametrize("budget", [2048, 64, 4096])
def test_a_system_prompt_shared_by_32_requests_in_one_batch_is_computed_once(budget: int) -> None:
    core = single(num_blocks=256, max_num_seqs=64, max_num_batched_tokens=budget)
    handles = many(core, 32)
    core.run()
    core.check(*handles)
    # Each computes what is its own, and feeds three of its four tokens back.
    least = BLOCKS * 16 + 32 * (REST + 3)
    # While the first is computed in chunks, none of the others is short enough to start before it is nearly done.
    assert least <= computed(core) <= least + budget // 10
    assert [core.answer(handle).cached_tokens for handle in handles[1:]].count(BLOCKS * 16) >= 30
    core.simulation.assert_free()


def test_a_system_prompt_is_found_by_those_who_come_later() -> None:
    core = single(num_blocks=256)
    for number in range(4):
        before = computed(core)
        handle = core.submit(SYSTEM + ids(8, number), greedy(4))
        core.run()
        assert computed(core) - before == (BLOCKS * 16 if number == 0 else 0) + REST + 3
        core.check(handle)


@pytest.mark.parametrize("when", range(6))
def test_the_first_of_them_is_aborted(when: int) -> None:
    """At any stage: before any plan, with a plan on its way, and after. A chunk whose plan was made is not lost."""
    core = single(num_blocks=256, max_num_seqs=64, max_num_batched_tokens=512, pipeline_depth=2)
    first, *others = many(core, 32)
    for step in range(when):
        core.simulation.tick()
        if step % 2:
            core.worker.step()
    core.gateway.abort(first)
    core.run()
    core.check(*others)
    assert computed(core) <= BLOCKS * 16 + 32 * (REST + 3) + 512 // 10
    core.simulation.assert_free()


def test_groups_share_a_system_prompt_with_each_other() -> None:
    core = single(num_blocks=256)
    handles = [core.submit(SYSTEM + ids(8, 1), samples(4, 3)), core.submit(SYSTEM + ids(8, 2), beams(3, 3))]
    core.run()
    core.check(*handles)
    assert sum(int(plan.prefill_chunks[:, 2].sum()) for plan in core.plans) == BLOCKS * 16 + 2 * REST


def test_the_next_turn_of_a_chat_finds_prompt_and_answer() -> None:
    core = single(num_blocks=64)
    first = core.submit(ids(40), greedy(30))
    core.run()
    turn = ids(40) + core.answer(first).tokens[0] + ids(20, 2)
    second = core.submit(turn, greedy(5))
    core.run()
    core.check(second)
    assert core.answer(second).cached_tokens == (40 + 30 - 1) // 16 * 16


def test_the_least_recently_used_prompt_is_forgotten_first() -> None:
    core = single(num_blocks=16)
    for first in (1, 2, 3, 1, 4):  # each leaves four blocks behind
        core.submit(ids(65, first), greedy(1))
        core.run()
    cached = {}
    for first in (1, 3, 2):
        handle = core.submit(ids(65, first), greedy(1))
        core.run()
        cached[first] = core.answer(handle).cached_tokens
    assert cached == {1: 64, 3: 64, 2: 48}, "the end of the one that was used least recently"


def test_without_the_cache_everything_is_computed() -> None:
    core = single(num_blocks=64, prefix_caching=False)
    handles = [core.submit(ids(64), greedy(1)) for _ in range(3)]
    core.run()
    assert computed(core) == 3 * 64
    assert {core.answer(handle).cached_tokens for handle in handles} == {0}


def test_nobody_finds_what_a_faulty_row_wrote() -> None:
    core = single(num_blocks=64, pipeline_depth=1)
    core.worker.worker.sound_samples = 0
    faulty = core.submit(ids(48), greedy(5))
    core.run()
    failure = core.answer(faulty).failure
    assert failure is not None
    assert failure.code == "nan"
    again = core.submit(ids(48), greedy(5))
    core.run()
    core.check(again)
    assert core.answer(again).cached_tokens == 0


def test_nobody_finds_what_a_faulty_row_wrote_that_was_preempted_meanwhile() -> None:
    core = single(num_blocks=64, pipeline_depth=1, preemption_mode="recompute")
    core.worker.worker.sound_samples = 0
    faulty = core.submit(ids(48), greedy(5), priority=5)
    core.simulation.tick()
    urgent = [core.submit(ids(200, first), greedy(5)) for first in range(2, 7)]
    core.simulation.tick()
    core.run()
    failure = core.answer(faulty).failure
    assert failure is not None
    assert failure.code == "nan"
    again = core.submit(ids(48), greedy(5))
    core.run()
    core.check(again, *urgent)
    assert core.answer(again).cached_tokens == 0


def test_a_resynchronised_worker_is_not_thought_to_hold_what_it_forgot() -> None:
    core = single(num_blocks=64)
    core.submit(ids(48), greedy(2))
    core.run()
    core.worker.hello()
    handle = core.submit(ids(48), greedy(2))
    core.run()
    core.check(handle)
    assert core.answer(handle).cached_tokens == 0


def test_hits_are_counted() -> None:
    core = single(num_blocks=64)
    for _ in range(2):
        core.submit(ids(40), greedy(2))
        core.run()
    assert (core.metric("prefix_queries_total"), core.metric("prefix_hits_total")) == (80, 32)
    assert np.array(core.ended(2)["cached_tokens"]) == 32
