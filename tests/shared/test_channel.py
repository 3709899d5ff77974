"""Sockets that carry messages: real ones, and ones whose process is killed."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from pagemill_testing.channels import ENDPOINTS, Bench, connected, said
from pagemill_testing.sockets import python, wait_until

from pagemill_shared.channel import DealerChannel
from pagemill_shared.codec import encode
from pagemill_shared.messages import Heartbeat, StateReport
from pagemill_shared.schema import MAX_MESSAGE_BYTES, Message

# ---------------------------------------------------------------- carrying


@ENDPOINTS
def test_messages_travel_both_ways(bench: Bench, folder: Path, endpoint: str) -> None:
    router = bench.router(endpoint.format(folder))
    first, second = bench.dealer(router.endpoint), bench.dealer(router.endpoint)
    routes = [connected(router, first, 1), connected(router, second, 2)]
    for number, route in enumerate(routes, start=10):
        assert router.send(route, Heartbeat(number, 0, 0))
    for dealer, number in ((first, 10), (second, 11)):
        got = wait_until(lambda dealer=dealer: dealer.receive(10), dealer.socket)  # type: ignore[misc]
        assert got == [Heartbeat(number, 0, 0)]
    assert (router.malformed, router.broken()) == (0, [])


def test_receiving_is_bounded_and_in_order(bench: Bench, folder: Path) -> None:
    router = bench.router(f"ipc://{folder}/s")
    dealer = bench.dealer(router.endpoint)
    connected(router, dealer)
    for number in range(10):
        assert dealer.send(Heartbeat(number, 0, 0))
    last = bench.dealer(router.endpoint)
    got: list[Message] = []
    while len(got) < 10:
        wait_until(lambda: router.socket.get(zmq.EVENTS) & zmq.POLLIN, router.socket)
        batch = router.receive(3)
        assert len(batch) <= 3
        got += [message for _, message in batch]
    assert got == [Heartbeat(number, 0, 0) for number in range(10)]
    assert router.receive(3) == []
    connected(router, last)


def test_nothing_waits_for_a_scheduler_that_is_not_there(bench: Bench, folder: Path) -> None:
    dealer = bench.dealer(f"ipc://{folder}/s")
    assert not dealer.send(Heartbeat(1, 0, 0))
    router = bench.router(f"ipc://{folder}/s")
    connected(router, dealer, 2)


@ENDPOINTS
def test_what_arrived_before_a_connection_ended_is_still_read(bench: Bench, folder: Path, endpoint: str) -> None:
    router = bench.router(endpoint.format(folder))
    dealer = bench.dealer(router.endpoint)
    route = connected(router, dealer)
    for number in range(20):
        assert router.send(route, Heartbeat(number, 0, 0))
    router.socket.linger = 20_000
    router.close()
    wait_until(lambda: not dealer.connected, what="end of the connection")
    got: list[Message] = []
    wait_until(lambda: got.extend(dealer.receive(3)) or len(got) == 20, dealer.socket)
    assert got == [Heartbeat(number, 0, 0) for number in range(20)]


def test_a_large_message_travels_and_a_larger_one_is_refused(bench: Bench, folder: Path) -> None:
    router = bench.router(f"ipc://{folder}/s")
    dealer = bench.dealer(router.endpoint)
    route = connected(router, dealer)
    report = StateReport(1, bytes(MAX_MESSAGE_BYTES - 64))
    assert router.send(route, report)
    assert wait_until(lambda: dealer.receive(1), dealer.socket) == [report]
    with pytest.raises(ValueError, match="exceeds"):
        router.send(route, StateReport(1, bytes(MAX_MESSAGE_BYTES)))
    assert router.send(route, Heartbeat(1, 0, 0))


def test_sending_to_a_route_that_never_was_fails(bench: Bench, folder: Path) -> None:
    router = bench.router(f"ipc://{folder}/s")
    assert not router.send(b"nobody", Heartbeat(1, 0, 0))
    dealer = bench.dealer(router.endpoint)
    assert router.send(connected(router, dealer), Heartbeat(1, 0, 0))


def test_a_full_queue_fails_and_never_blocks(bench: Bench, folder: Path) -> None:
    router = bench.router(f"ipc://{folder}/s")
    raw = bench.raw(router.endpoint)
    raw.send(encode(Heartbeat(1, 0, 0)))
    [(route, _)] = said(router)
    report = StateReport(1, bytes(64 * 1024))
    assert any(not router.send(route, report) for _ in range(1500))
    dealer = bench.dealer(router.endpoint)
    assert router.send(connected(router, dealer), Heartbeat(1, 0, 0))


# ---------------------------------------------------------------- broken connections

CHILD = """
import sys
import zmq
from pagemill_shared.channel import DealerChannel
from pagemill_shared.messages import Heartbeat
channel = DealerChannel(zmq.Context(), "backend", sys.argv[1], keys=None)
while not channel.send(Heartbeat(7, 0, 0)):
    channel._monitor.socket.poll()
sys.stdin.read()
"""


@ENDPOINTS
def test_a_killed_process_is_noticed_at_once_and_it_alone(bench: Bench, folder: Path, endpoint: str) -> None:
    router = bench.router(endpoint.format(folder))
    good = bench.dealer(router.endpoint)
    good_route = connected(router, good)
    poller = zmq.Poller()
    router.register(poller)
    with python(CHILD, router.endpoint) as child:
        [(route, _)] = said(router)
        child.send_signal(signal.SIGKILL)
        assert poller.poll(60_000), "the poller must wake without a message"
        assert wait_until(router.broken) == [route]
    assert not router.send(route, Heartbeat(1, 0, 0))
    assert router.send(good_route, Heartbeat(1, 0, 0))
    assert router.broken() == []


ROUTER_CHILD = """
import sys
import zmq
from pagemill_shared.channel import RouterChannel
from pagemill_shared.messages import Heartbeat
channel = RouterChannel(zmq.Context(), "backend", sys.argv[1], keys=None, allow_insecure_bind=False)
print("bound", flush=True)
while True:
    channel.socket.poll()
    for route, message in channel.receive(10):
        channel.send(route, message)
"""


@contextmanager
def router_child(endpoint: str) -> Iterator[subprocess.Popen[str]]:
    """Another process with a router that sends back what it gets, bound by now."""
    with python(ROUTER_CHILD, endpoint) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "bound\n"
        yield child


def test_a_connection_to_a_host_that_vanished_without_a_word_ends(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill_shared.channel.PROBE_MS", 50)
    monkeypatch.setattr("pagemill_shared.channel.PROBE_TIMEOUT_MS", 200)
    with router_child(f"ipc://{folder}/s") as child:
        dealer = bench.dealer(f"ipc://{folder}/s")
        # Either process may itself stand still for so long that the connection ends and another one begins.
        wait_until(lambda: dealer.send(Heartbeat(1, 0, 0)) and dealer.receive(100), what="connection")
        child.send_signal(signal.SIGSTOP)  # answers nothing, closes nothing
        wait_until(lambda: not dealer.send(Heartbeat(2, 0, 0)), what="end of the connection")
        child.send_signal(signal.SIGCONT)
        wait_until(
            lambda: dealer.send(Heartbeat(3, 0, 0)) and Heartbeat(3, 0, 0) in dealer.receive(100),
            what="new connection",
        )


def test_a_peer_that_is_given_more_time_keeps_its_connection(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill_shared.channel.PROBE_MS", 10)
    monkeypatch.setattr("pagemill_shared.channel.PROBE_TIMEOUT_MS", 50)
    with router_child(f"ipc://{folder}/s") as child:
        patient = bench.dealer(f"ipc://{folder}/s", peer_timeout=600)
        hasty = bench.dealer(f"ipc://{folder}/s")
        for dealer in (patient, hasty):
            wait_until(lambda dealer=dealer: dealer.send(Heartbeat(1, 0, 0)) and dealer.receive(100), what="connection")
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: not hasty.send(Heartbeat(2, 0, 0)), what="end of the connection of the other")
        assert patient.send(Heartbeat(2, 0, 0))
        child.send_signal(signal.SIGCONT)
        wait_until(lambda: Heartbeat(2, 0, 0) in patient.receive(100), what="answer on the old connection")
        assert patient.connections == 1


@ENDPOINTS
def test_connections_that_come_and_go_are_told_apart(bench: Bench, folder: Path, endpoint: str) -> None:
    router = bench.router(endpoint.format(folder))
    good = bench.dealer(router.endpoint)
    good_route = connected(router, good)
    descriptors = set()
    for number in range(30):
        dealer = DealerChannel(bench.context, "backend", router.endpoint, keys=None)
        route = connected(router, dealer, number)
        descriptors.add(router._connections._descriptor_of[route])
        dealer.close()
        assert wait_until(router.broken) == [route]
    assert len(descriptors) < 30, "descriptors must have been reused for this test to mean anything"
    assert router.send(good_route, Heartbeat(1, 0, 0))


def test_what_a_dead_peer_left_behind_is_dropped(bench: Bench, folder: Path) -> None:
    router = bench.router(f"ipc://{folder}/s")
    dealer = DealerChannel(bench.context, "backend", router.endpoint, keys=None)
    route = connected(router, dealer)
    dealer.send(Heartbeat(2, 0, 0))
    dealer.close()
    assert wait_until(router.broken) == [route]
    other = bench.dealer(router.endpoint)
    connected(router, other, 3)  # its message comes after the dead one's, which is not among what was received


def test_a_failed_send_is_told_once(bench: Bench, folder: Path) -> None:
    router = bench.router(f"ipc://{folder}/s")
    dealer = DealerChannel(bench.context, "backend", router.endpoint, keys=None)
    route = connected(router, dealer)
    dealer.close()
    wait_until(lambda: not router.send(route, Heartbeat(1, 0, 0)))
    other = bench.dealer(router.endpoint)
    connected(router, other)
    assert router.broken() == []
