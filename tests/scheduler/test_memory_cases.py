"""Inputs that broke the memory managers of systems like this one."""

from __future__ import annotations

import numpy as np
import pytest
from pagemill_testing.hash_model import expected_output
from pagemill_testing.single import VOCAB, beams, greedy, ids, samples, single

from pagemill_shared.sampling import SamplingParams


def test_a_request_larger_than_the_pool_is_refused_at_once_and_holds_up_nobody() -> None:
    core = single(num_blocks=50, max_model_len=2048)
    large, small = core.submit(ids(1002), greedy(10)), core.submit(ids(10, 2), greedy(5))
    failure = core.answer(large).failure
    assert failure is not None
    assert (failure.code, failure.param) == ("context_length_exceeded", "prompt")
    assert "1012 tokens (prompt 1002 + max_tokens 10)" in failure.message
    assert "800" in failure.message
    core.run()
    core.check(small)
    core.simulation.assert_free()


@pytest.mark.parametrize("first", [0, 1])
def test_shared_blocks_are_copied_once_and_freed_once(first: int) -> None:
    core = single(block_size=4, num_blocks=16, prefix_caching=False, pipeline_depth=1)
    request = core.submit(ids(6), samples(2, max_tokens=20))
    core.step()
    refs = core.simulation.state.workers["w"].pool.refs
    assert refs[refs > 0].tolist() == [2, 2]
    core.step(3)
    # The half-full block was copied for one of them, the other kept the original; the full one stays shared.
    assert len(core.rows("block_copies")) == 1
    assert sorted(refs[refs > 0].tolist()) == [1, 1, 1, 1, 2]
    core.finish(request, first)
    assert refs[refs > 0].tolist() == [1, 1, 1]
    core.finish(request, 1 - first)
    assert not refs.any()
    core.run()
    assert len(core.rows("block_copies")) == 1
    core.simulation.assert_free()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 48])
def test_a_fully_cached_prompt_computes_its_last_token(length: int) -> None:
    core = single(num_blocks=32)
    first = core.submit(ids(length), greedy(4))
    core.run()
    second = core.submit(ids(length), greedy(4))
    core.run()
    core.check(first, second)
    assert core.answer(second).cached_tokens == (length - 1) // 16 * 16 < length
    core.simulation.assert_free()


def test_salts_keep_prefixes_apart() -> None:
    core = single(num_blocks=64)
    cached = []
    for salt in ("x", "", "y", "x"):
        handle = core.submit(ids(64), greedy(2), salt=salt)
        core.run()
        cached.append(core.answer(handle).cached_tokens)
    assert cached == [0, 0, 0, 48]


def test_an_abort_frees_every_block_of_a_swapped_group() -> None:
    core = single(num_blocks=12, num_swap_blocks=12, preemption_mode="swap", prefix_caching=False)
    for _ in range(50):
        old = core.submit(ids(60, 3), greedy(100))
        core.step(2)
        group = core.submit(ids(40), samples(2, max_tokens=60))
        while not core.info(group)["swapped_out"]:
            core.step()
        assert core.metric("num_requests_swapped") == 1
        core.gateway.abort(group)
        core.gateway.abort(old)
        core.run()
        core.simulation.assert_free()


@pytest.mark.parametrize("rounds", range(8))
@pytest.mark.parametrize("sampling", [greedy(30), samples(4, 30), beams(3, 30)], ids=["one", "samples", "beams"])
def test_an_abort_at_any_stage_frees_every_block(rounds: int, sampling: SamplingParams) -> None:
    """Waiting, in prefill, with plans in flight, decoding."""
    core = single(num_blocks=40, max_num_batched_tokens=20, num_swap_blocks=8)
    other = core.submit(ids(30, 2), greedy(20))
    handle = core.submit(ids(50), sampling)
    for _ in range(rounds):
        core.simulation.tick()
        if rounds % 2:
            core.worker.step()
    core.gateway.abort(handle)
    core.run()
    core.check(other)
    core.simulation.assert_free()


def test_every_length_of_prompt_and_output_frees_every_block() -> None:
    core = single(num_blocks=8, prefix_caching=False)
    for length in range(1, 41):
        for max_tokens in range(1, 21):
            handle = core.submit(ids(length), greedy(max_tokens))
            core.run()
            core.check(handle)
            core.simulation.assert_free()


@pytest.mark.parametrize("length", [14, 15, 16, 17, 31, 32])
def test_an_end_token_at_the_edge_of_a_block_frees_every_block(length: int) -> None:
    core = single(num_blocks=8)
    plain = expected_output(ids(length), greedy(5), VOCAB)
    for at in range(5):
        handle = core.submit(ids(length), greedy(20, eos_token_ids=np.array([plain[at]], np.int32)))
        core.run()
        assert core.answer(handle).tokens[0] == plain[: plain.index(plain[at]) + 1]
        core.simulation.assert_free()


@pytest.mark.parametrize("mode", ["swap", "auto", "recompute"])
@pytest.mark.parametrize("swap_blocks", [0, 2])
def test_without_swap_space_a_group_is_recomputed(swap_blocks: int, mode: str) -> None:
    core = single(num_blocks=16, num_swap_blocks=swap_blocks, preemption_mode=mode)
    handles = [core.submit(ids(30, first), samples(4, 30, ignore_eos=True)) for first in (1, 2)]
    core.run()
    core.check(*handles)
    assert core.metric("num_preemptions_total") >= 1
    assert core.metric("recomputed_tokens_total") > 0
    core.simulation.assert_free()


def test_text_after_recomputation_is_whole() -> None:
    core = single(num_blocks=10, preemption_mode="recompute")
    handles = [core.submit(ids(20, first), greedy(60)) for first in range(4)]
    core.run()
    core.check(*handles)
    assert core.metric("num_preemptions_total") >= 1
    # Outputs come back as outputs, so that penalties count them as such.
    rejoined = [j for plan in core.plans for j in plan.joined if len(j.token_ids) > j.prompt_length]
    assert rejoined
    assert all(join.prompt_length == 20 for join in rejoined)
    core.simulation.assert_free()


def test_a_long_prompt_that_was_preempted_is_not_resumed_chunk_by_chunk() -> None:
    core = single(num_blocks=20, max_num_batched_tokens=64)
    growing = core.submit(ids(100), greedy(100))
    core.step(3)
    long = core.submit(ids(200, 2), greedy(10))
    stalls, before = 0, core.count(growing)
    for _ in range(120):
        core.step()
        after = core.count(growing)
        stalls += after == before and not core.answer(growing).done
        before = after
    assert stalls == 0
    core.run()
    core.check(growing, long)
    assert core.preemptions(long) <= 2


def test_a_nearly_full_pool_never_stops() -> None:
    core = single(num_blocks=8)
    handles = [core.submit(ids(31, first), greedy(40)) for first in range(4)]
    core.simulation.tick()
    assert core.metric("num_requests_running") == 4
    progress = []
    while not all(core.answer(handle).done for handle in handles):
        before = core.count(handles[0])
        core.step()
        progress.append(core.answer(handles[0]).done or core.count(handles[0]) > before)
        assert len(progress) < 400
    assert all(progress[2:]), "the oldest goes on in every step"
    assert core.preemptions(handles[0]) == 0
    assert core.preemptions(handles[3]) > 0
    core.check(*handles)
    core.simulation.assert_free()
