"""Deliveries: put together from arrays and sequences, told again after a loss, kept until they are acknowledged."""

from __future__ import annotations

import numpy as np
from pagemill_testing.single import greedy, ids, samples, single

from pagemill_scheduler.deliveries import DeliveryBuilder, finish_codes
from pagemill_scheduler.request import LogprobEntry
from pagemill_shared.codec import decode, encode
from pagemill_shared.messages import Delivery, FinishReason, PromptReport, RequestFailure
from pagemill_shared.sampling import Pooling
from pagemill_shared.schema import MAX_MESSAGE_BYTES, Message


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
    [page] = builder.take()
    delivery = page.build(7, 3)
    assert (delivery.epoch, delivery.number, delivery.token_ids.tolist()) == (7, 3, [1])
    assert not builder
    [page] = builder.take()
    assert len(page.build(7, 4).handles) == 0


def size_of(message: Message) -> int:
    """Bytes on the wire; they must be read again as they were written."""
    data = encode(message)
    assert isinstance(decode(data), Delivery)
    return len(data)


def test_reports_that_are_too_large_for_one_delivery_follow_in_others_in_order() -> None:
    builder = DeliveryBuilder()
    state = np.zeros(1_000_000, np.float32)
    builder.add_failure(RequestFailure(7, "x", "y" * 2048, ""))
    builder.add_reports([PromptReport(1, i, i + 1, pooled=state) for i in range(20)])  # 80 MB
    one = np.ones(1, np.int32)
    builder.add_rows(one, one, one, one, one, one)
    deliveries = [page.build(1, number) for number, page in enumerate(builder.take(), 1)]
    assert [report.start for delivery in deliveries for report in delivery.reports] == list(range(20))
    assert len(deliveries[-1].token_ids) == 1
    assert sum(len(delivery.failures) for delivery in deliveries) == 1
    assert max(map(size_of, deliveries)) < MAX_MESSAGE_BYTES / 2
    assert not builder


def test_a_report_that_is_larger_than_a_page_stands_alone() -> None:
    builder = DeliveryBuilder()
    small, large = np.zeros(1, np.float32), np.zeros(5_000_000, np.float32)
    builder.add_reports([PromptReport(1, i, i + 1, pooled=large if i == 1 else small) for i in range(3)])
    assert [len(page.reports) for page in builder.take()] == [1, 1, 1]


def test_a_long_output_with_log_probabilities_is_cut_into_pieces() -> None:
    length, alternatives = 100_000, 21
    core = single(num_blocks=20)
    handle = core.submit(ids(5), greedy(4, logprobs=20))
    [gateway] = core.simulation.state.gateways.values()
    [sequence] = gateway.requests[handle].sequences
    entry = LogprobEntry(1, np.zeros(alternatives, np.int32), np.zeros(alternatives, np.float32))
    sequence.logprobs = [entry] * length
    sequence.finish, sequence.score = FinishReason.LENGTH, -1.5
    builder = DeliveryBuilder()
    builder.add_sequence(sequence, 0, np.arange(length, dtype=np.int32))
    deliveries = [page.build(1, number) for number, page in enumerate(builder.take(), 1)]
    assert max(map(size_of, deliveries)) < MAX_MESSAGE_BYTES / 2
    columns = [np.concatenate([getattr(d, name) for d in deliveries]) for name in ("offsets", "counts", "finishes")]
    offsets, counts, finishes = (column.tolist() for column in columns)
    assert offsets == [sum(counts[:i]) for i in range(len(counts))]
    assert sum(counts) == length
    assert finishes == [0] * (len(counts) - 1) + [FinishReason.LENGTH]
    assert np.concatenate([d.scores for d in deliveries]).tolist() == [0.0] * (len(counts) - 1) + [-1.5]
    assert np.concatenate([d.token_ids for d in deliveries]).tolist() == list(range(length))
    for delivery in deliveries:
        assert delivery.logprobs.rows.tolist() == list(range(len(delivery.token_ids)))


def test_a_gateway_that_reconnects_gets_all_reports_whatever_their_size() -> None:
    core = single(num_blocks=40, max_num_batched_tokens=16)
    handle = core.submit(ids(200), greedy(1, pooling=Pooling.MEAN))
    core.step(10)
    [gateway] = core.simulation.state.gateways.values()
    reports = gateway.requests[handle].reports
    assert len(reports) >= 8
    state = np.zeros(1_000_000, np.float32)
    reports[:] = [PromptReport(handle, report.start, report.end, pooled=state) for report in reports]
    sizes: list[int] = []
    take = core.gateway.take

    def record(message: Message) -> None:
        if isinstance(message, Delivery):
            sizes.append(size_of(message))
        take(message)

    core.gateway.take = record  # type: ignore[method-assign]
    core.gateway.hello()
    core.run()
    core.simulation.beat()
    core.check(handle)
    assert sum(sizes) > 8 * state.nbytes
    assert max(sizes) < MAX_MESSAGE_BYTES / 2
    assert [report.end for report in core.answer(handle).reports][-1] == 200
    assert not gateway.knows(handle)


def test_an_end_token_beats_the_length_limit() -> None:
    hits = [(0, int(FinishReason.EOS)), (1, int(FinishReason.STOP_TOKEN))]
    codes = finish_codes(hits, np.array([True, False, True, False]))
    assert codes.tolist() == [
        FinishReason.EOS,
        FinishReason.STOP_TOKEN,
        FinishReason.LENGTH,
        FinishReason.NOT_FINISHED,
    ]


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
