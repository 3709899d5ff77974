"""Deliveries: put together from arrays and sequences, told again after a loss, kept until they are acknowledged."""

from __future__ import annotations

import numpy as np
from pagemill_testing.single import greedy, ids, samples, single

from pagemill_scheduler.deliveries import DeliveryBuilder, finish_codes
from pagemill_shared.messages import FinishReason


def test_rows_and_sequences_stand_in_one_delivery() -> None:
    core = single(num_blocks=20)
    plain, logprobs = core.submit(ids(5), greedy(3)), core.submit(ids(5, 2), greedy(3, logprobs=0))
    core.run()
    core.check(plain, logprobs)
    assert core.answer(plain).logprobs[0] == []
    assert len(core.answer(logprobs).logprobs[0]) == 3


def test_a_built_delivery_leaves_the_builder_empty() -> None:
    builder = DeliveryBuilder()
    one = np.ones(1, np.int32)
    assert not builder
    builder.add_rows(one, one, one, one, one, one)
    assert builder
    delivery = builder.build(7, 3)
    assert (delivery.epoch, delivery.number, delivery.token_ids.tolist()) == (7, 3, [1])
    assert not builder
    assert len(builder.build(7, 4).handles) == 0


def test_an_end_token_beats_the_length_limit() -> None:
    codes = finish_codes([0, 1], np.array([True, False, True, False]))
    assert codes.tolist() == [FinishReason.EOS, FinishReason.EOS, FinishReason.LENGTH, FinishReason.NOT_FINISHED]


def test_a_gateway_that_missed_the_end_hears_it_again() -> None:
    core = single(num_blocks=20)
    handle = core.submit(ids(5), samples(2, 4, logprobs=0))
    core.step(3)
    core.gateway.lose_next_delivery = True
    core.run()
    assert not core.answer(handle).done
    core.simulation.beat()
    core.simulation.beat()
    core.check(handle)
    assert [len(core.answer(handle).logprobs[index]) for index in (0, 1)] == [4, 4]


def test_an_acknowledged_request_is_forgotten() -> None:
    core = single(num_blocks=20)
    handle = core.submit(ids(5), greedy(2))
    core.run()
    [gateway] = core.simulation.state.gateways.values()
    assert gateway.knows(handle)
    core.simulation.beat()
    assert not gateway.knows(handle)


def test_a_request_that_is_submitted_again_after_a_resync_runs_once() -> None:
    core = single(num_blocks=20)
    handle = core.submit(ids(5), greedy(20))
    core.step(3)
    computed = core.worker.worker.computed_tokens
    core.gateway.hello()
    core.run()
    core.check(handle)
    assert core.worker.worker.computed_tokens == 5 + 19 >= computed
