"""Whom a socket lets in and what it makes of those who break the rules: hostile bytes, endpoints, keys."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import stat
from pathlib import Path

import pytest
import zmq
from pagemill_testing.channels import Bench, connected, said
from pagemill_testing.sockets import PATIENCE, wait_until
from structlog.testing import capture_logs

from pagemill_shared.channel import DealerChannel, RouterChannel
from pagemill_shared.codec import encode
from pagemill_shared.curve import (
    ClientKeys,
    client_check,
    generate_keys,
    load_client_keys,
    load_server_keys,
)
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.messages import Heartbeat
from pagemill_shared.schema import MAX_MESSAGE_BYTES

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
