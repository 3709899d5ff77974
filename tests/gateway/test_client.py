"""The pure scheduler client: epochs, resyncs, obstacles, odd deliveries."""

from __future__ import annotations

import pytest
from pagemill_testing.client_bench import FLEET, NO_FLEET, Bench, Record, kinds, request, text_of

from pagemill_gateway.errors import ApiError
from pagemill_gateway.output import MAX_UNREAD_TOKENS
from pagemill_shared.errors import ProtocolError
from pagemill_shared.messages import (
    AbortRequest,
    FinishReason,
    FleetStatus,
    GatewayHello,
    GatewaySync,
    Heartbeat,
    RequestFailure,
    Resync,
    SequenceFinished,
    StateReport,
    SubmitRequest,
    WorkerDismissed,
)


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    assert [type(m) for m in bench.client.tick(0.0)] == [GatewayHello]
    bench.welcome(1)
    return bench


def test_a_request_from_submit_to_finish(bench: Bench) -> None:
    timing = Record()
    one = request(timing=timing)
    (submit,) = bench.client.submit(one)
    assert isinstance(submit, SubmitRequest)
    assert (submit.epoch, submit.number, submit.handle) == (1, 2, 1)
    bench.now = 1.0
    bench.deliver(1, 0, [0])
    bench.now = 1.5
    bench.deliver(1, 1, [1], FinishReason.EOS)
    assert text_of(one) == "a"
    assert (one.choices[0].finish_reason, one.output.done, len(bench.client)) == ("stop", True, 0)
    assert timing.reported == [("first", 1.0), ("next", 0.5), ("stop", 1.5)]


def test_handles_are_never_used_again(bench: Bench) -> None:
    handles = []
    for _ in range(5):
        one = request()
        bench.client.submit(one)
        handles.append(one.handle)
        bench.client.abort(one)
    assert len(set(handles)) == 5


def test_a_stop_string_ends_it_with_the_tokens_kept(bench: Bench) -> None:
    one = request(stop="cd")
    bench.client.submit(one)
    assert not bench.deliver(1, 0, [0, 1, 2])
    (finished,) = bench.deliver(1, 3, [3, 4, 5])
    assert isinstance(finished, SequenceFinished)
    assert (finished.handle, finished.sequence, finished.tokens_kept) == (1, 0, 4)
    assert text_of(one) == "ab"
    assert not bench.deliver(1, 6, [6])  # surplus of the pipeline
    assert text_of(one) == ""


def test_a_stop_string_in_the_last_token_beats_the_length(bench: Bench) -> None:
    one = request(stop="cd")
    bench.client.submit(one)
    assert not bench.deliver(1, 0, [0, 1, 2, 3], FinishReason.LENGTH)
    assert (text_of(one), one.choices[0].finish_reason) == ("ab", "stop")


def test_deliveries_after_a_resync_are_not_taken_twice(bench: Bench) -> None:
    one, two = request(), request()
    bench.client.submit(one)
    bench.client.submit(two)
    bench.deliver(1, 0, [0, 1])
    bench.number += 1  # one is lost
    assert kinds(bench.deliver(1, 3, [3])) == [Resync]
    assert not bench.deliver(1, 4, [4])
    three = request()
    assert bench.client.submit(three) == []  # between two epochs
    assert bench.client.abort(two) == []
    sync, *submits = bench.welcome(2)
    assert isinstance(sync, GatewaySync)
    assert sync.number == 1
    assert sync.handles.tolist() == [one.handle, three.handle]
    assert [s.handle for s in submits if isinstance(s, SubmitRequest)] == [one.handle, three.handle]
    bench.deliver(1, 0, [0, 1, 2, 3])
    bench.deliver(1, 4, [4], FinishReason.LENGTH)
    assert text_of(one) == "abcde"


def test_a_finish_that_was_delivered_before_the_resync_is_known(bench: Bench) -> None:
    one = request()
    bench.client.submit(one)
    bench.deliver(1, 0, [0], FinishReason.LENGTH)
    bench.welcome(2)
    assert not bench.deliver(1, 0, [0], FinishReason.LENGTH)
    assert text_of(one) == "a"


def test_a_bare_finish(bench: Bench) -> None:
    one = request()
    bench.client.submit(one)
    bench.deliver(1, 0, [0])
    bench.welcome(2)
    bench.deliver(1, 0, [0], FinishReason.LENGTH)
    assert (text_of(one), one.choices[0].finish_reason, one.choices[0].num_tokens) == ("a", "length", 1)


def test_a_gap_in_the_tokens_is_an_error_and_no_wrong_text(bench: Bench) -> None:
    one = request()
    bench.client.submit(one)
    assert kinds(bench.deliver(1, 1, [1])) == [AbortRequest]
    assert one.output.error is not None
    assert one.output.error.status == 500
    assert text_of(one) == ""


def test_a_restarted_scheduler_ends_what_was_open(bench: Bench) -> None:
    one = request()
    bench.client.submit(one)
    (sync,) = bench.welcome(2, incarnation=2)
    assert isinstance(sync, GatewaySync)
    assert sync.handles.size == 0
    assert one.output.error is not None
    assert one.output.error.code == "scheduler_lost"


def test_a_silent_scheduler_ends_what_is_open_and_is_told_so(bench: Bench) -> None:
    one = request()
    bench.client.submit(one)
    for half_seconds in range(7):
        assert AbortRequest not in kinds(bench.client.tick(half_seconds / 2))
    assert AbortRequest in kinds(bench.client.tick(3.1))
    assert one.output.error is not None
    obstacle = bench.client.obstacle(3.1)
    assert obstacle is not None
    assert obstacle.lasting
    bench.client.received(4.0, Heartbeat(1, 0, 2))  # it was only slow: its workers are as it said
    assert bench.client.obstacle(4.0) is None


def test_failures_end_their_request_alone(bench: Bench) -> None:
    one, two = request(), request()
    bench.client.submit(one)
    bench.client.submit(two)
    bench.deliver(0, 0, [], failures=(RequestFailure(1, "no_worker", "gone", ""), RequestFailure(77, "x", "y", "")))
    assert one.output.error is not None
    assert (one.output.error.status, one.output.error.param) == (503, None)
    assert two.output.error is None
    assert len(bench.client) == 1


def test_odd_aborts_do_nothing(bench: Bench) -> None:
    never = request()
    assert bench.client.abort(never) == []
    one = request()
    bench.client.submit(one)
    assert kinds(bench.client.abort(one)) == [AbortRequest]
    assert bench.client.abort(one) == []
    assert not bench.deliver(one.handle, 0, [0])


def test_what_a_client_does_not_read_is_bounded(bench: Bench) -> None:
    one, whole = request(), request(streaming=False)
    for each in (one, whole):
        bench.client.submit(each)
    tokens = [0] * (MAX_UNREAD_TOKENS // 2 + 1)
    assert not bench.deliver(1, 0, tokens)
    assert kinds(bench.deliver(1, len(tokens), tokens)) == [AbortRequest]
    assert one.output.error is not None
    assert one.output.error.code == "client_too_slow"
    assert not bench.deliver(2, 0, tokens * 4)  # an answer that is not streamed waits for its end
    assert whole.output.error is None


@pytest.mark.parametrize("timeout", [0.0, 5.0])
def test_obstacles(timeout: float) -> None:
    bench = Bench(timeout)
    assert bench.client.obstacle(0.0) is not None
    bench.client.tick(0.0)
    bench.welcome(1, fleet=NO_FLEET)
    starting = bench.client.obstacle(0.0)
    assert starting is not None
    assert starting.lasting  # nobody waits for workers that were never there
    bench.client.received(1.0, FLEET)
    assert bench.client.obstacle(1.0) is None
    bench.client.received(2.0, NO_FLEET)
    gone = bench.client.obstacle(2.0)
    assert gone is not None
    assert gone.lasting == (timeout == 0.0)
    later = bench.client.obstacle(2.0 + timeout)
    assert later is not None
    assert later.lasting
    assert later.as_error().headers["Retry-After"]
    bench.client.received(9.0, FleetStatus(1, 100, 50, "other"))
    other = bench.client.obstacle(9.0)
    assert other is not None
    assert other.code == "model_mismatch"


def test_state_reports_are_kept_for_the_shell(bench: Bench) -> None:
    bench.client.received(0.0, StateReport(5, b"{}"))
    assert [report.query for report in bench.client.reports] == [5]


def test_a_message_for_others_is_a_protocol_error(bench: Bench) -> None:
    with pytest.raises(ProtocolError):
        bench.client.received(0.0, WorkerDismissed())


def test_failing_all_tells_the_scheduler(bench: Bench) -> None:
    one, two = request(), request()
    bench.client.submit(one)
    bench.client.submit(two)
    assert kinds(bench.client.fail_all(ApiError(503, "bye"))) == [AbortRequest, AbortRequest]
    assert one.output.done
    assert two.output.done
