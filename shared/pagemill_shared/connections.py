"""What ZeroMQ tells of connections: which are alive, which routing id belongs to which, which were refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""Connections that did not get through the handshake: wrong keys, not ZeroMQ."""
_REMEMBERED = 4096


class Monitor:
    """What happens to the connections of a socket, as (event, file descriptor). Make it before binding or connecting.

    Args:
        events: a mask of ``zmq.EVENT_…``.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], watched: zmq.Socket[bytes], events: int) -> None:
        self._watched = watched
        address = f"inproc://monitor-{id(self)}"
        watched.monitor(address, events)
        self.socket = context.socket(zmq.PAIR)
        self.socket.rcvhwm = 0  # a full queue would stop ZeroMQ's I/O thread
        self.socket.linger = 0
        self.socket.connect(address)

    def events(self) -> Iterator[tuple[zmq.Event, int]]:
        """Those since the last call."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event = parse_monitor_message(frames)
            yield zmq.Event(event["event"]), event["value"]

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close()


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
        self.monitor = Monitor(context, socket, zmq.EVENT_DISCONNECTED | REFUSALS)

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

    def close(self) -> None:
        self.monitor.close()

    def _drain(self) -> None:
        for event, value in self.monitor.events():
            if event & REFUSALS:
                self.refused += 1
                if is_power_of_two(self.refused):  # a refused peer tries on, ten times a second
                    self._log.warning("connection refused in the handshake", reason=event.name, count=self.refused)
                continue
            route = self._route_of.pop(value, None)
            if route is not None:
                del self._descriptor_of[route]
                self._bury(route)
                self._broken.append(route)

    def _bury(self, route: bytes) -> None:
        self._gone[route] = None
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)


def is_power_of_two(count: int) -> bool:
    """Whether the ``count``-th line of its kind is logged: a flood of events must not become a flood of lines."""
    return count & (count - 1) == 0
