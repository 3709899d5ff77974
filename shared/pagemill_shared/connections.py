"""Which connections of a ROUTER socket are alive, and which routing id belongs to which."""

from __future__ import annotations

from collections import OrderedDict

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_REMEMBERED = 4096


class Connections:
    """Tells at once which peer's connection broke, which a ROUTER does not say by itself.

    ZeroMQ's monitor names a broken connection by its file descriptor, and every message carries the descriptor that it
    came in on; so the first message of a routing id ties the two together. Descriptors are reused, but a connection's
    end always reaches the monitor before its descriptor can carry another one, and routing ids are never reused.

    Args:
        socket: a ROUTER that is not bound yet.
        name: for logs.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], name: str) -> None:
        self.refused = 0
        """Connections that did not get through the handshake: wrong key, not ZeroMQ."""
        self._log = structlog.get_logger("pagemill.channel").bind(channel=name)
        self._route_of: dict[int, bytes] = {}
        self._descriptor_of: dict[bytes, int] = {}
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._broken: list[bytes] = []
        address = f"inproc://monitor-{id(self)}"
        socket.monitor(address, zmq.EVENT_DISCONNECTED | _REFUSALS)
        self.monitor = context.socket(zmq.PAIR)
        self.monitor.rcvhwm = 0  # a full queue would stop ZeroMQ's I/O thread
        self.monitor.linger = 0
        self.monitor.connect(address)

    def knows(self, route: bytes) -> bool:
        return route in self._descriptor_of or route in self._gone

    def has_ended(self, route: bytes) -> bool:
        """Whether its connection has ended: what is still found of it in the queue no longer counts."""
        return route in self._gone

    def admit(self, route: bytes, descriptor: int) -> None:
        """Ties a route that is not known to the descriptor that its first message came in on.

        A negative descriptor says that the transport has none (``inproc``): such a connection never breaks.
        """
        if descriptor < 0:
            return
        self._drain()  # whoever had the descriptor before has gone
        if descriptor in self._route_of:
            self._bury(route)  # the last words of a connection whose descriptor has a new owner already
            return
        self._route_of[descriptor] = route
        self._descriptor_of[route] = descriptor

    def forget(self, route: bytes) -> None:
        """A send showed that ``route`` has gone; ``broken`` will not tell it again."""
        descriptor = self._descriptor_of.pop(route, None)
        if descriptor is not None:
            del self._route_of[descriptor]
        self._bury(route)

    def broken(self) -> list[bytes]:
        """The routes whose connection broke since the last call."""
        self._drain()
        routes, self._broken = self._broken, []
        return routes

    def close(self, socket: zmq.Socket[bytes]) -> None:
        socket.disable_monitor()
        self.monitor.close()

    def _drain(self) -> None:
        while True:
            try:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            if event["event"] & _REFUSALS:
                self.refused += 1
                self._log.warning("connection refused in the handshake", reason=zmq.Event(event["event"]).name)
                continue
            route = self._route_of.pop(event["value"], None)
            if route is not None:
                del self._descriptor_of[route]
                self._bury(route)
                self._broken.append(route)

    def _bury(self, route: bytes) -> None:
        self._gone[route] = None
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
