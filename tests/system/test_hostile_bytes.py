"""Bytes that no peer of ours sends, at both inner sockets of a running server; and aborts that make no sense."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from pagemill_testing.live_gateway import LiveGateway
from pagemill_testing.live_server import ServeCommand

from pagemill_shared.codec import encode
from pagemill_shared.messages import AbortRequest, GatewaySync, Heartbeat, IterationResult, Resync, WorkerLeaving
from pagemill_shared.sampling import SamplingParams
from pagemill_shared.schema import MAX_MESSAGE_BYTES

pytestmark = pytest.mark.timeout(300)


class Marker:
    """Loading its pickle makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def nonsense(marker: Path) -> list[list[bytes]]:
    """Messages, as frames, none of which decodes."""
    return [
        [pickle.dumps(Marker(marker))],
        [pickle.dumps(Marker(marker), protocol=0)],
        [b""],
        [os.urandom(1000)],
        [b"x"] * 1000,
        [b"\x91" * 300_000],  # msgpack, nested 300,000 deep
        [b"\x81\xa1a" * 100_000],
        [b"\xdd\xff\xff\xff\xff"],  # a list of 2**32 - 1 items, says the head
        [b"\xc6\xff\xff\xff\xff"],
        [msgpack.packb([255, 1])],
        [msgpack.packb([1, 999, "identity"])],
        [msgpack.packb([1, 1])],
        [msgpack.packb([2**63, 2**63, [], {}])],
        [bytes(MAX_MESSAGE_BYTES)],
    ]


def out_of_place() -> list[bytes]:
    """Messages that decode, from somebody who has not said hello."""
    return [
        encode(message)
        for message in (
            Heartbeat(1, 2**31 - 1, 2**31 - 1),
            Resync(3, "why not"),
            WorkerLeaving("nobody"),
            AbortRequest(1, 1, 1),
            GatewaySync(1, 1, np.arange(100, dtype=np.int32)),
            IterationResult(1, 1, np.zeros(3, np.int32)),
        )
    ]


@contextmanager
def stranger(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        yield socket


def test_a_running_server_takes_no_harm(server: ServeCommand, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    body: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 60, "ignore_eos": True}
    alone = server.ask(**body).token_ids
    earlier = server.state()
    stream = server.stream(**body)
    stream.until_tokens(2)
    with zmq.Context() as context:
        for side, endpoint in server.endpoints().items():
            before = dropped(server, side)
            with stranger(context, endpoint) as socket:
                for frames in nonsense(marker):
                    socket.send_multipart(frames)
                for data in out_of_place():
                    socket.send(data)
                server.until(lambda n=before, s=side: dropped(server, s) > n, f"{side} counts what it drops")  # type: ignore[misc]
                assert socket.poll(90_000)  # it is asked to say hello, as the last messages were well-formed
            with stranger(context, endpoint) as socket:
                socket.send(bytes(MAX_MESSAGE_BYTES + 1))  # ends the connection
    assert stream.succeeded().token_ids == alone
    assert not marker.exists()
    state = server.state()
    for peers in ("workers", "gateways"):
        assert [peer["identity"] for peer in state[peers]] == [peer["identity"] for peer in earlier[peers]]
        assert len(state[peers]) == 1
    assert state["metrics"]["resyncs_total"] == earlier["metrics"]["resyncs_total"]
    server.until_idle()
    server.assert_alive()


def dropped(server: ServeCommand, side: str) -> int:
    """Log lines about messages that were dropped at one socket; the first, second, fourth … of a sender are logged."""
    lines = server.serve.err.read_text(errors="replace").splitlines()
    return sum("malformed message dropped" in line and f"channel={side}" in line for line in lines)


def test_aborts_of_what_is_not_there_are_ignored_and_counted(server: ServeCommand) -> None:
    ignored = server.counter("ignored_messages_total")
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompt = [504, 3575, 282, 4649, 314]
    with zmq.Context() as context:
        gateway = LiveGateway(context, server.endpoints()["frontend"])
        try:
            gateway.until_ready()

            def abort(handle: int) -> None:
                assert gateway.channel.send(AbortRequest(*gateway.link.next_number(), handle))

            abort(1)  # before it is submitted
            first = gateway.submit(prompt, sampling)
            gateway.until_done(first)
            abort(1)  # after it has ended, twice
            abort(1)
            abort(2**31 - 1)  # never heard of
            gateway.submit(prompt, replace(sampling, max_tokens=4000))
            abort(2)  # before it was ever planned, or long before its end
            abort(2)
            third = gateway.submit(prompt, sampling)
            gateway.until_done(third)
            assert (first.failure, third.failure) == ("", "")
            assert first.tokens == third.tokens
            assert len(first.tokens) == 3
        finally:
            gateway.channel.close()
    assert server.counter("ignored_messages_total") == ignored + 5
    server.until_state(lambda state: len(state["gateways"]) == 1, "the other gateway is forgotten")
    server.until_idle()
    server.assert_alive()
