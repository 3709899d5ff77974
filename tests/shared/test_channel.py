"""Sockets that carry messages: real ones, hostile ones, and ones whose process is killed."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from pagemill_testing.sockets import PATIENCE, ipc_folder, python, wait_until
from structlog.testing import capture_logs

from pagemill_shared.channel import Context, DealerChannel, RouterChannel
from pagemill_shared.codec import encode
from pagemill_shared.curve import (
    ClientKeys,
    ServerKeys,
    client_check,
    generate_keys,
    load_client_keys,
    load_server_keys,
)
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.messages import Heartbeat, StateReport
from pagemill_shared.schema import MAX_MESSAGE_BYTES, Message


@pytest.fixture
def folder() -> Iterator[Path]:
    with ipc_folder() as path:
        yield path


class Bench:
    """One context, one bound ROUTER, and any number of peers; closes all of them."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.context: Context = stack.enter_context(zmq.Context())
        self.context.set(zmq.BLOCKY, False)

    def router(self, endpoint: str, keys: ServerKeys | None = None) -> RouterChannel:
        channel = RouterChannel(self.context, "backend", endpoint, keys=keys, allow_insecure_bind=False)
        channel.socket.linger = 0
        self.stack.callback(channel.close)
        return channel

    def dealer(self, endpoint: str, keys: ClientKeys | None = None) -> DealerChannel:
        channel = DealerChannel(self.context, "backend", endpoint, keys=keys)
        channel.socket.linger = 0
        self.stack.callback(channel.close)
        return channel

    def raw(self, endpoint: str) -> zmq.Socket[bytes]:
        raw = self.stack.enter_context(self.context.socket(zmq.DEALER))
        raw.linger, raw.rcvhwm = 0, 1
        raw.connect(endpoint)
        return raw


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)


def said(channel: RouterChannel, count: int = 1) -> list[tuple[bytes, Message]]:
    """The next ``count`` messages."""
    got: list[tuple[bytes, Message]] = []

    def enough() -> bool:
        got.extend(channel.receive(100))
        return len(got) >= count

    wait_until(enough, channel.socket, what=f"{count} messages")
    assert len(got) == count
    return got


def connected(router: RouterChannel, dealer: DealerChannel, number: int = 1) -> bytes:
    """The route of ``dealer``, which says something once it is connected."""
    wait_until(lambda: dealer.send(Heartbeat(number, 0, 0)), what="connection")
    [(route, message)] = said(router)
    assert message == Heartbeat(number, 0, 0)
    return route


ENDPOINTS = pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "ipc://{}/s"], ids=["tcp", "ipc"])


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


# ---------------------------------------------------------------- hostile peers


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def test_hostile_messages_are_counted_logged_with_the_sender_and_dropped(bench: Bench, folder: Path) -> None:
    router = bench.router(f"ipc://{folder}/s")
    good = bench.dealer(router.endpoint)
    good_route = connected(router, good)
    raw = bench.raw(router.endpoint)
    hostile: list[list[bytes]] = [
        [pickle.dumps(Marker(folder / "marker"))],
        [b""],
        [os.urandom(4096)],
        [b"\x91" * 1_000_000],
        [b"x"] * 1000,
        [encode(Heartbeat(1, 0, 0)), b""],
        [b"", encode(Heartbeat(1, 0, 0))],
        [os.urandom(MAX_MESSAGE_BYTES)],
    ]
    with capture_logs() as logs:
        for number, parts in enumerate(hostile, start=1):
            raw.send_multipart(parts)
            wait_until(lambda: router.receive(10) or router.malformed, router.socket)
            wait_until(lambda number=number: router.receive(1) == [] and router.malformed == number, router.socket)  # type: ignore[misc]
        raw.send(encode(Heartbeat(2, 0, 0)))
        [(route, message)] = said(router)
    assert message == Heartbeat(2, 0, 0)
    assert [line["count"] for line in logs] == [1, 2, 4, 8]  # a flood is not logged line by line
    assert {line["peer"] for line in logs} == {f"backend:{route.hex()}"}
    assert logs[0]["address"].endswith(f":{os.getpid()}")
    assert not (folder / "marker").exists()
    assert router.send(good_route, Heartbeat(3, 0, 0))
    assert router.broken() == []


def test_a_message_beyond_the_size_limit_ends_the_connection_that_sent_it(bench: Bench, folder: Path) -> None:
    router = bench.router(f"ipc://{folder}/s")
    good = bench.dealer(router.endpoint)
    good_route = connected(router, good)
    raw = bench.raw(router.endpoint)
    raw.send(encode(Heartbeat(1, 0, 0)))
    [(route, _)] = said(router)
    raw.send(bytes(MAX_MESSAGE_BYTES + 1))
    assert wait_until(lambda: router.receive(1) or router.broken(), router.socket) == [route]
    assert router.send(good_route, Heartbeat(3, 0, 0))


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NONSENSE".ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 50, b"\0" * 1000, os.urandom(1000), GREETING])
def test_bytes_that_are_not_our_protocol_reach_nobody(bench: Bench, data: bytes) -> None:
    router = bench.router("tcp://127.0.0.1:*")
    good = bench.dealer(router.endpoint)
    route = connected(router, good)
    host, port = router.endpoint.removeprefix("tcp://").split(":")
    # The other side may hang up at any point.
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as raw, contextlib.suppress(OSError):
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(1000):
            pass
    assert router.send(route, Heartbeat(1, 0, 0))
    connected(router, bench.dealer(router.endpoint))
    assert router.broken() == []


def test_connections_that_fail_the_handshake_are_counted_and_logged(bench: Bench) -> None:
    router = bench.router("tcp://127.0.0.1:*")
    host, port = router.endpoint.removeprefix("tcp://").split(":")
    with capture_logs() as logs, socket.create_connection((host, int(port)), timeout=PATIENCE) as raw:
        raw.sendall(GREETING)
        wait_until(lambda: router.broken() or router.refused, what="refusal")
    assert router.refused == 1
    assert [line["event"] for line in logs] == ["connection refused in the handshake"]


def test_a_dealer_drops_and_counts_what_is_malformed(bench: Bench, folder: Path) -> None:
    router = bench.router(f"ipc://{folder}/s")
    dealer = bench.dealer(router.endpoint)
    route = connected(router, dealer)
    for parts in ([b""], [b"\x80\x04."], [encode(Heartbeat(1, 0, 0))] * 2):
        router.socket.send_multipart([route, *parts])
    router.send(route, Heartbeat(5, 0, 0))
    assert wait_until(lambda: dealer.receive(10), dealer.socket) == [Heartbeat(5, 0, 0)]
    assert dealer.malformed == 3


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


def test_a_connection_to_a_host_that_vanished_without_a_word_ends(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill_shared.channel.PROBE_MS", 50)
    monkeypatch.setattr("pagemill_shared.channel.PROBE_TIMEOUT_MS", 200)
    with python(ROUTER_CHILD, f"ipc://{folder}/s") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "bound\n"
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


# ---------------------------------------------------------------- binding


def test_an_endpoint_in_use_is_a_clear_error(bench: Bench, folder: Path) -> None:
    for endpoint in ("tcp://127.0.0.1:*", f"ipc://{folder}/s"):
        router = bench.router(endpoint)
        with pytest.raises(ConfigurationError, match="cannot be bound") as caught:
            bench.router(router.endpoint)
        assert router.endpoint in str(caught.value)
        assert "\n" not in str(caught.value)
        connected(router, bench.dealer(router.endpoint))


def test_the_network_is_refused_without_keys(bench: Bench, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="allow-insecure-bind"):
        bench.router("tcp://0.0.0.0:*")
    generate_keys(folder)
    assert bench.router("tcp://0.0.0.0:*", load_server_keys(folder)).endpoint.startswith("tcp://0.0.0.0:")


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:99999", "tcp://127.0.0.1:x", "nonsense", "ipc:///" + "x" * 200])
def test_what_cannot_be_bound_is_a_clear_error(bench: Bench, endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not an endpoint|cannot be bound"):
        bench.router(endpoint)


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://", "foo://bar"])
def test_what_cannot_be_connected_to_is_a_clear_error(bench: Bench, endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="is not an endpoint"):
        bench.dealer(endpoint)


def test_an_ipc_file_is_private_and_goes_with_its_channel(folder: Path) -> None:
    path = folder / "s"
    for _ in range(2):
        with zmq.Context() as context:
            router = RouterChannel(context, "backend", f"ipc://{path}", keys=None, allow_insecure_bind=False)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            router.close()
        assert not path.exists()


# ---------------------------------------------------------------- CURVE


def test_a_client_with_the_right_keys_is_let_in(bench: Bench, folder: Path) -> None:
    generate_keys(folder)
    keys = load_server_keys(folder)
    bench.stack.enter_context(client_check(bench.context, keys))
    router = bench.router("tcp://127.0.0.1:*", keys)
    dealer = bench.dealer(router.endpoint, load_client_keys(folder))
    route = connected(router, dealer)
    assert router.send(route, Heartbeat(1, 0, 0))
    assert wait_until(lambda: dealer.receive(1), dealer.socket) == [Heartbeat(1, 0, 0)]
    assert router.refused == 0


def test_clients_with_other_keys_or_none_are_refused(bench: Bench, folder: Path) -> None:
    ours, theirs = folder / "ours", folder / "theirs"
    generate_keys(ours)
    generate_keys(theirs)
    keys, client, stranger = load_server_keys(ours), load_client_keys(ours), load_client_keys(theirs)
    bench.stack.enter_context(client_check(bench.context, keys))
    router = bench.router("tcp://127.0.0.1:*", keys)
    wrong_keys: list[ClientKeys | None] = [
        ClientKeys(keys.public, stranger.public, stranger.secret),  # knows the scheduler, is not known to it
        stranger,  # takes it for another scheduler
        None,
    ]
    for wrong in wrong_keys:
        before = router.refused
        dealer = DealerChannel(bench.context, "backend", router.endpoint, keys=wrong)
        wait_until(lambda before=before: router.broken() or router.refused > before, what="refusal")  # type: ignore[misc]
        assert not dealer.send(Heartbeat(1, 0, 0))
        dealer.close()
    assert router.receive(10) == []
    connected(router, bench.dealer(router.endpoint, client))


def test_a_refused_client_says_why_it_has_no_connection(bench: Bench, folder: Path) -> None:
    generate_keys(folder / "ours")
    generate_keys(folder / "theirs")
    keys, stranger = load_server_keys(folder / "ours"), load_client_keys(folder / "theirs")
    bench.stack.enter_context(client_check(bench.context, keys))
    router = bench.router("tcp://127.0.0.1:*", keys)
    with capture_logs() as logs:
        dealer = bench.dealer(router.endpoint, ClientKeys(keys.public, stranger.public, stranger.secret))
        wait_until(lambda: not dealer.send(Heartbeat(1, 0, 0)) and dealer.refused)
    said = [line for line in logs if "do the CURVE keys" in line["event"]]
    assert [line["endpoint"] for line in said] == [router.endpoint] * len(said) != []


def test_nobody_comes_in_while_nobody_checks(bench: Bench, folder: Path) -> None:
    generate_keys(folder)
    router = bench.router("tcp://127.0.0.1:*", load_server_keys(folder))
    dealer = bench.dealer(router.endpoint, load_client_keys(folder))
    wait_until(lambda: router.broken() or router.refused, what="refusal")
    assert not dealer.send(Heartbeat(1, 0, 0))
