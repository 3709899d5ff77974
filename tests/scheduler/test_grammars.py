"""A sequence with a grammar samples nothing before its worker has compiled it; everybody else goes on."""

from __future__ import annotations

import numpy as np
import pytest
from pagemill_testing.single import Single, greedy, ids, samples, single

from pagemill_scheduler import planner
from pagemill_shared.messages import GrammarCompiled
from pagemill_shared.sampling import SamplingParams


def slow(**fields: object) -> Single:
    """Its worker does not get to compiling until the test says so."""
    core = single(**fields)
    core.worker.worker.slow_grammars.add("g")
    return core


def compile_now(core: Single) -> None:
    core.worker.worker.slow_grammars.clear()
    core.step()


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("sampling", [greedy(6, grammar="g"), samples(3, 6, grammar="g")], ids=["one", "three"])
def test_the_tokens_are_those_of_a_request_without(length: int, sampling: SamplingParams) -> None:
    core = single(num_blocks=64)
    handle = core.submit(ids(length), sampling)
    core.run()
    core.check(handle)
    core.simulation.assert_free()


def test_the_row_waits_with_its_last_token_while_others_run() -> None:
    core = slow()
    waiting, plain = core.submit(ids(40), greedy(4, grammar="g")), core.submit(ids(30, 2), greedy(20))
    core.step(12)
    assert core.count(waiting) == 0
    assert core.count(plain) > 8
    [row] = [r for r in core.worker.worker.rows.values() if r.sampling.grammar]
    assert row.computed == 39
    assert core.info(waiting)["waits_for"] == "its grammar, which worker w compiles"
    compile_now(core)
    core.run()
    core.check(waiting, plain)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("n", [1, 3])
def test_preempted_while_it_waits(mode: str, n: int) -> None:
    core = slow(preemption_mode=mode, num_swap_blocks=20, block_size=4)
    waiting = core.submit(ids(12), samples(n, 6, grammar="g"))
    core.step(3)
    request = next(iter(core.simulation.state.requests()))
    planner.preempt_for(core.simulation.state, core.simulation.state.workers["w"], request, "a test asked for it")
    core.step(3)
    assert core.count(waiting) == 0
    compile_now(core)
    core.run()
    core.check(waiting)
    core.simulation.assert_free()


@pytest.mark.parametrize("n", [1, 3])
def test_a_sequence_that_comes_back_waits_again(n: int) -> None:
    core = single(block_size=4, num_blocks=40, preemption_mode="recompute")
    handle = core.submit(ids(9), samples(n, 12, grammar="g"))
    core.step(5)
    assert core.count(handle) > 2
    before = core.count(handle)
    core.worker.worker.slow_grammars.add("g")
    request = next(iter(core.simulation.state.requests()))
    planner.preempt_for(core.simulation.state, core.simulation.state.workers["w"], request, "a test asked for it")
    core.step(6)
    assert core.count(handle) <= before + 2  # what was on its way
    compile_now(core)
    core.run()
    core.check(handle)


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone() -> None:
    core = single()
    core.worker.worker.broken_grammars.add("bad")
    bad, good, plain = (core.submit(ids(20, i), greedy(5, grammar=g)) for i, g in enumerate(("bad", "g", ""), 1))
    core.run()
    failure = core.answer(bad).failure
    assert failure is not None
    assert (failure.code, failure.message, failure.param) == ("grammar_failed", "it is broken", "grammar")
    core.check(good, plain)
    core.simulation.assert_free()


def test_without_an_answer_the_row_is_planned_after_a_while() -> None:
    core = slow(grammar_timeout=5.0)
    late, plain = core.submit(ids(20), greedy(5, grammar="g")), core.submit(ids(20, 2), greedy(40))
    core.step(3)
    assert core.answer(late).failure is None
    core.simulation.beat(5.1)
    core.run()
    failure = core.answer(late).failure
    assert failure is not None
    assert (failure.code, failure.param) == ("grammar_timeout", "grammar"), "the worker says that it is not ready"
    core.check(plain)
    core.simulation.assert_free()


def test_a_lost_message_costs_time_alone() -> None:
    core = slow(grammar_timeout=5.0)
    handle = core.submit(ids(20), greedy(5, grammar="g"))
    core.step(3)
    core.worker.worker.slow_grammars.clear()
    core.worker.worker.compiled()  # it is ready, but nobody hears of it
    core.simulation.beat(5.1)
    core.run()
    core.check(handle)


def test_news_of_another_sequence_or_epoch_change_nothing() -> None:
    core = slow()
    handle = core.submit(ids(20), greedy(5, grammar="g"))
    core.step(2)
    worker = core.worker.worker
    [(iteration, slot, _)] = worker.compiling
    for epoch, number, place in (
        (worker.epoch + 1, iteration, slot),
        (worker.epoch, iteration + 1, slot),
        (worker.epoch, 0, slot + 1),
        (worker.epoch, iteration, 9999),
    ):
        core.simulation.receive(core.worker.peer, GrammarCompiled(epoch, number, place, "it is broken"))
    core.step(2)
    assert core.count(handle) == 0
    assert core.answer(handle).failure is None
    compile_now(core)
    core.run()
    core.check(handle)


def test_it_moves_with_its_request_when_the_worker_dies() -> None:
    core = slow()
    handle = core.submit(ids(20), greedy(5, grammar="g"))
    core.step(2)
    core.simulation.kill(core.worker)
    core.simulation.beat(10.0)
    core.worker = core.simulation.add_worker("v", block_size=16)
    core.run()
    core.check(handle)
    core.simulation.assert_free()


def test_prompts_that_begin_alike_share_blocks() -> None:
    core = single(block_size=4)
    first = core.submit(ids(20), greedy(3, grammar="g"))
    core.run()
    second = core.submit(ids(20), greedy(3, grammar="g"))
    core.run()
    core.check(first, second)
    assert core.answer(second).cached_tokens == 16
    joins = [join for plan in core.plans for join in plan.joined]
    assert [join.computed for join in joins] == [0, 16]
    assert np.array_equal(joins[0].token_ids, joins[1].token_ids)
