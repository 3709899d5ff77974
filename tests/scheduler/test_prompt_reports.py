"""Requests that want to hear of their prompt: every position is computed and told once, whatever happens on the way."""

from __future__ import annotations

import numpy as np
import pytest
from pagemill_testing.hash_model import expected_pooled, expected_prompt_logprobs
from pagemill_testing.single import Single, greedy, ids, samples, single

from pagemill_shared.messages import FinishReason, IterationResult, PromptReport, RowFault
from pagemill_shared.sampling import Pooling


def check(core: Single, handle: int) -> None:
    answer = core.answer(handle)
    prompt, sampling = answer.submit.prompt_token_ids.tolist(), answer.submit.sampling
    core.check(handle)
    if sampling.prompt_logprobs is not None:
        assert answer.prompt_logprobs == expected_prompt_logprobs(prompt)
    if sampling.pooling:
        assert answer.pooled == expected_pooled(prompt, sampling.pooling)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 40, 65])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_every_prompt_token_is_told_once_across_chunks(length: int, max_tokens: int) -> None:
    core = single(num_blocks=20, max_num_batched_tokens=16)
    handle = core.submit(ids(length), greedy(max_tokens, prompt_logprobs=0, pooling=Pooling.MEAN))
    core.run()
    check(core, handle)
    assert core.answer(handle).finishes == {0: FinishReason.LENGTH}
    core.simulation.assert_free()


def test_what_wants_every_position_reads_nothing_from_the_prefix_cache() -> None:
    core = single(num_blocks=20)
    for fields in ({}, {"prompt_logprobs": 0}, {"pooling": Pooling.MEAN}):
        handle = core.submit(ids(50), greedy(1, **fields))
        core.run()
        check(core, handle)
        assert core.answer(handle).cached_tokens == 0
    for fields in ({}, {"pooling": Pooling.LAST}, {"max_tokens": 0}):
        handle = core.submit(ids(50), greedy(**({"max_tokens": 1} | fields)))
        core.run()
        check(core, handle)
        assert core.answer(handle).cached_tokens == 48


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_a_prompt_that_is_preempted_half_way_is_told_once(mode: str, rounds: int) -> None:
    core = single(num_blocks=6, num_swap_blocks=6, preemption_mode=mode, max_num_batched_tokens=20, pipeline_depth=2)
    handle = core.submit(ids(70), greedy(2, prompt_logprobs=0, pooling=Pooling.MEAN), priority=1)
    core.step(rounds)
    urgent = core.submit(ids(40, 2), greedy(20), priority=0)
    core.run()
    assert core.preemptions(handle)
    check(core, handle)
    check(core, urgent)
    core.simulation.assert_free()


def test_parallel_samples_hear_of_their_prompt_once() -> None:
    core = single(num_blocks=30, max_num_batched_tokens=16)
    handle = core.submit(ids(33), samples(3, 4, prompt_logprobs=0))
    core.run()
    check(core, handle)


def test_a_worker_that_dies_before_the_last_chunk_is_replaced_without_a_gap() -> None:
    core = single(num_blocks=20, max_num_batched_tokens=16)
    handle = core.submit(ids(60), greedy(0, pooling=Pooling.MEAN))
    core.step(2)
    core.simulation.tick()
    core.simulation.kill(core.worker)
    core.worker = core.simulation.add_worker("other", block_size=16, num_blocks=20, max_model_len=4096)
    core.simulation.beat()
    core.run()
    check(core, handle)


def test_reports_are_delivered_again_after_a_resync() -> None:
    core = single(num_blocks=20, max_num_batched_tokens=16)
    handle = core.submit(ids(40), greedy(5, prompt_logprobs=0))
    core.step(2)
    core.gateway.lose_next_delivery = True
    core.step()
    core.gateway.hello()
    core.run()
    core.simulation.beat()
    core.simulation.beat()
    check(core, handle)


def test_an_abort_while_reports_are_on_their_way_frees_everything() -> None:
    core = single(num_blocks=20, max_num_batched_tokens=16)
    handle = core.submit(ids(60), greedy(0, prompt_logprobs=0))
    core.step()
    core.simulation.tick()
    core.gateway.abort(handle)
    core.run()
    core.simulation.assert_free()


@pytest.mark.parametrize("wrong", ["missing", "another slot", "another range", "too few"])
def test_a_report_that_does_not_answer_its_plan_costs_the_worker_its_place(wrong: str) -> None:
    core = single(num_blocks=20)
    core.submit(ids(20), greedy(1, prompt_logprobs=0))
    core.simulation.tick()
    result = core.worker.result()
    assert result is not None
    [report] = result.reports
    reports = {
        "missing": (),
        "another slot": (PromptReport(5, report.start, report.end, report.logprobs),),
        "another range": (PromptReport(report.owner, 0, 19, report.logprobs),),
        "too few": (PromptReport(report.owner, report.start, report.end),),
    }[wrong]
    bad = IterationResult(result.epoch, result.iteration, result.token_ids, reports=reports)
    core.simulation.receive(core.worker.peer, bad)
    assert not core.simulation.state.workers
    assert any(log.event == "worker lost" for log in core.simulation.logs)


def test_a_row_that_fails_ends_its_request_alone() -> None:
    core = single(num_blocks=20)
    bad, good = core.submit(ids(20), greedy(0, prompt_logprobs=0)), core.submit(ids(20, 2), greedy(3))
    core.simulation.tick()
    result = core.worker.result()
    assert result is not None
    [report] = result.reports
    faulty = IterationResult(
        result.epoch,
        result.iteration,
        result.token_ids,
        faults=(RowFault(report.owner, "nan", "not finite"),),
        reports=(PromptReport(report.owner, report.start, report.end, pooled=np.zeros(0, np.float32)),),
    )
    core.simulation.receive(core.worker.peer, faulty)
    core.run()
    failure = core.answer(bad).failure
    assert failure is not None
    assert failure.code == "nan"
    core.check(good)
