"""The connecting side of the protocol alone."""

from __future__ import annotations

import numpy as np
import pytest
from pagemill_testing.links import (
    INTERVAL,
    TIMEOUT,
    WORKER,
    gateway_link,
    result,
    welcomed_worker,
    worker_link,
)

from pagemill_shared.errors import ProtocolError
from pagemill_shared.link import LinkState, PeerLink
from pagemill_shared.messages import (
    AbortRequest,
    Delivery,
    FleetStatus,
    GatewayWelcome,
    Heartbeat,
    HelloRequest,
    IterationPlan,
    Resync,
    StateReport,
    WorkerDismissed,
    WorkerWelcome,
)
from pagemill_shared.schema import Message

# ---------------------------------------------------------------- hello


def test_says_hello_once_then_probes_with_heartbeats_until_the_timeout() -> None:
    link = worker_link()
    assert link.tick(0.0) == [WORKER]
    assert link.tick(0.1) == []
    assert link.tick(0.5) == [Heartbeat(0, 0, 0)]
    said = [message for now in np.arange(1.0, 7.0, 0.5) for message in link.tick(float(now))]
    assert said.count(WORKER) == 2
    assert link.state is LinkState.CONNECTING


def test_a_hello_request_is_answered_by_one_hello_however_often_it_comes() -> None:
    link = worker_link()
    link.tick(0.0)
    assert link.received(0.9, HelloRequest()).send == (WORKER,)
    assert link.received(0.9, HelloRequest()).send == ()
    assert link.received(1.3, HelloRequest()).send == ()
    assert link.received(1.5, HelloRequest()).send == (WORKER,)


def test_a_hello_that_was_not_sent_is_said_again_soon() -> None:
    link = worker_link()
    assert link.tick(0.0) == [WORKER]
    link.unsent(0.0)
    assert link.tick(0.04) == []
    assert link.deadline == 0.05
    assert link.tick(0.05) == [WORKER]
    assert link.received(0.06, HelloRequest()).send == ()
    link.unsent(0.06)
    assert link.received(0.07, HelloRequest()).send == (WORKER,)


def test_a_heartbeat_that_was_not_sent_is_sent_again_soon_and_the_epoch_stays() -> None:
    link = welcomed_worker()
    assert link.tick(0.5) == [Heartbeat(10, 0, 0)]
    link.unsent(0.5)
    assert link.tick(0.55) == [Heartbeat(10, 0, 0)]
    assert link.tick(0.6) == []
    assert link.in_epoch


def test_a_hello_request_ends_the_epoch() -> None:
    link = welcomed_worker()
    assert link.received(5.0, HelloRequest()).send == (WORKER,)
    assert (link.in_epoch, link.state) == (False, LinkState.CONNECTING)
    assert not link.count_result(result(10, 1))


def test_a_restarted_scheduler_whose_clock_was_set_back_is_accepted() -> None:
    link = welcomed_worker(epoch=10)
    link.received(5.0, HelloRequest())
    assert link.received(5.0, WorkerWelcome(3, 4, 64)).apply
    assert link.received(5.0, IterationPlan(3, 1)).apply


def test_the_incarnation_is_that_of_the_last_welcome() -> None:
    link = gateway_link()
    link.tick(0.0)
    assert link.incarnation is None
    link.received(0.0, GatewayWelcome(10, 77))
    link.received(0.0, GatewayWelcome(9, 76))  # an old one
    assert link.incarnation == 77


# ---------------------------------------------------------------- epochs and numbers


def test_a_welcome_begins_an_epoch() -> None:
    link = welcomed_worker()
    assert (link.in_epoch, link.epoch, link.state) == (True, 10, LinkState.CONNECTED)
    first, second = IterationPlan(10, 1), IterationPlan(10, 2)
    assert link.received(0.1, first).apply == (first,)
    assert link.received(0.1, second).apply == (second,)


def test_a_repeated_or_older_welcome_does_not_begin_an_epoch_again() -> None:
    link = welcomed_worker()
    link.received(0.1, IterationPlan(10, 1))
    for epoch in (10, 9):
        outcome = link.received(0.1, WorkerWelcome(epoch, 4, 64))
        assert not outcome.apply
        assert not outcome.send
    assert link.received(0.1, IterationPlan(10, 2)).apply


@pytest.mark.parametrize("number", [0, 1, 3, 9])
def test_a_plan_out_of_turn_breaks_the_epoch_once(number: int) -> None:
    link = welcomed_worker()
    link.received(0.0, IterationPlan(10, 1))
    outcome = link.received(0.1, IterationPlan(10, number))
    assert not outcome.apply
    assert outcome.send == (Resync(10, f"IterationPlan {number} came, expected 2"),)
    assert not link.in_epoch
    for late in (IterationPlan(10, 2), IterationPlan(10, 5), Heartbeat(10, 5, 0), WorkerWelcome(10, 4, 64)):
        outcome = link.received(0.2, late)
        assert not outcome.apply
        assert not outcome.send
    assert link.received(0.3, WorkerWelcome(11, 4, 64)).apply
    assert link.received(0.3, IterationPlan(11, 1)).apply


def test_a_heartbeat_that_counts_more_than_came_breaks_the_epoch() -> None:
    link = welcomed_worker()
    assert link.received(0.1, Heartbeat(10, 0, 0)).send == ()
    assert link.received(0.2, Heartbeat(10, 1, 0)).send == (Resync(10, "heartbeat says 1 were sent, expected 0"),)


@pytest.mark.parametrize("message", [IterationPlan(11, 1), Heartbeat(11, 1, 0)])
def test_a_message_of_an_epoch_without_welcome_asks_for_another(message: Message) -> None:
    link = welcomed_worker()
    outcome = link.received(0.1, message)
    assert [type(reply) for reply in outcome.send] == [Resync]
    assert (outcome.send[0].epoch, link.in_epoch) == (11, False)  # type: ignore[attr-defined]
    assert not link.received(0.1, WorkerWelcome(11, 4, 64)).apply  # it comes too late: a number was passed over
    assert link.received(0.1, WorkerWelcome(12, 4, 64)).apply


def test_an_unanswered_resync_is_followed_by_a_hello() -> None:
    link = welcomed_worker()
    link.received(1.0, IterationPlan(10, 7))
    said = [message for step in range(2, 9) for message in link.tick(step * 0.5)]
    assert said.count(WORKER) == 1
    assert [type(message) for message in said[:-1]] == [Heartbeat] * (len(said) - 1)


def test_gateway_numbers_count_from_one_and_end_with_the_epoch() -> None:
    link = gateway_link()
    link.tick(0.0)
    with pytest.raises(RuntimeError, match="no epoch"):
        link.next_number()
    link.received(0.0, GatewayWelcome(10, 1))
    assert [link.next_number(), link.next_number()] == [(10, 1), (10, 2)]
    assert link.tick(0.5) == [Heartbeat(10, 2, 0)]
    link.received(0.6, Delivery(10, 2))
    with pytest.raises(RuntimeError, match="no epoch"):
        link.next_number()


def test_results_are_counted_by_their_plans_and_dropped_with_their_epoch() -> None:
    link = welcomed_worker()
    link.received(0.0, IterationPlan(10, 1))
    link.received(0.0, IterationPlan(10, 2))
    assert link.tick(0.5) == [Heartbeat(10, 0, 2)]
    assert link.count_result(result(10, 1))
    assert link.tick(1.0) == [Heartbeat(10, 1, 2)]
    with pytest.raises(RuntimeError, match="result 3 follows result 1"):
        link.count_result(result(10, 3))
    assert not link.count_result(result(9, 2))
    link.received(1.0, WorkerWelcome(11, 4, 64))
    assert not link.count_result(result(10, 2))
    assert link.tick(1.5) == [Heartbeat(11, 0, 0)]


@pytest.mark.parametrize(
    ("link", "message"),
    [
        (worker_link(), Delivery(1, 1)),
        (worker_link(), GatewayWelcome(1, 1)),
        (worker_link(), StateReport(1, b"{}")),
        (worker_link(), Resync(1, "")),
        (worker_link(), WORKER),
        (gateway_link(), IterationPlan(1, 1)),
        (gateway_link(), WorkerWelcome(1, 4, 64)),
        (gateway_link(), WorkerDismissed("")),
        (gateway_link(), AbortRequest(1, 1, 1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_messages_for_others_are_refused_and_change_nothing(link: PeerLink, message: Message) -> None:
    with pytest.raises(ProtocolError, match="is not for a"):
        link.received(0.0, message)
    assert (link.state, link.epoch) == (LinkState.CONNECTING, 0)


def test_messages_without_number_are_applied_at_any_time() -> None:
    for link, message in (
        (worker_link(), WorkerDismissed("no")),
        (gateway_link(), FleetStatus(0, 0, 0, "")),
        (gateway_link(), StateReport(1, b"{}")),
    ):
        assert link.received(0.0, message).apply == (message,)


# ---------------------------------------------------------------- silence


def test_a_peer_that_was_itself_stopped_takes_nobody_for_silent() -> None:
    link = welcomed_worker()
    link.tick(0.5)
    for stopped in (10.0, 20.0):  # what was said meanwhile has not been read yet
        assert link.tick(stopped) != []
        assert link.state is LinkState.CONNECTED
    for now in np.arange(20.5, 24.0, INTERVAL):  # nothing had been said
        link.tick(float(now))
    assert link.state is LinkState.LOST


def test_a_silent_scheduler_is_lost_and_the_epoch_outlives_its_silence() -> None:
    link = welcomed_worker()
    for now in np.arange(0.0, TIMEOUT + 0.01, INTERVAL):
        link.tick(float(now))
        assert link.state is LinkState.CONNECTED
    link.tick(TIMEOUT + 0.1)
    assert link.state is LinkState.LOST
    assert link.in_epoch
    plan = IterationPlan(10, 1)
    assert link.received(9.0, plan).apply == (plan,)
    assert link.state is LinkState.CONNECTED


def test_a_lost_scheduler_is_probed_by_heartbeats_alone() -> None:
    link = welcomed_worker()
    said = [message for step in range(1, 60) for message in link.tick(step * 0.25)]
    assert said == [Heartbeat(10, 0, 0)] * len(said)
    assert len(said) == 29


def test_a_scheduler_that_was_never_heard_of_is_not_lost() -> None:
    link = worker_link()
    for step in range(20):
        link.tick(float(step))
    assert link.state is LinkState.CONNECTING
