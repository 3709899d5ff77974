"""A ROUTER and its peers in one process."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import zmq

from pagemill_shared.channel import Context, DealerChannel, RouterChannel
from pagemill_shared.curve import (
    ClientKeys,
    ServerKeys,
)
from pagemill_shared.messages import Heartbeat
from pagemill_shared.schema import Message
from pagemill_testing.sockets import wait_until


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

    def dealer(self, endpoint: str, keys: ClientKeys | None = None, peer_timeout: float = 0.0) -> DealerChannel:
        channel = DealerChannel(self.context, "backend", endpoint, keys=keys, peer_timeout=peer_timeout)
        channel.socket.linger = 0
        self.stack.callback(channel.close)
        return channel

    def raw(self, endpoint: str) -> zmq.Socket[bytes]:
        raw = self.stack.enter_context(self.context.socket(zmq.DEALER))
        raw.linger, raw.rcvhwm = 0, 1
        raw.connect(endpoint)
        return raw


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
