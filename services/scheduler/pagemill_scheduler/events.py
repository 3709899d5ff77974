"""What goes into the scheduler core and what comes out: the only things its shell knows about it.

The shell receives, calls ``SchedulerCore.handle``, sends. Time is a field of every event, in seconds of any monotonic
clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pagemill_shared.schema import Message


class Peer(NamedTuple):
    """One connection: the socket that it came in on and the routing id that ZeroMQ gave it."""

    side: Literal["frontend", "backend"]
    route: bytes

    def __str__(self) -> str:
        return f"{self.side}:{self.route.hex()}"


class Received(NamedTuple):
    """A decoded message came from ``peer``."""

    now: float
    peer: Peer
    message: Message


@dataclass(frozen=True, slots=True)
class SendFailed:
    """A message to ``peer`` could not be handed over: its connection is gone or its queue is full."""

    now: float
    peer: Peer


@dataclass(frozen=True, slots=True)
class Tick:
    """All that has arrived was handled: plan the next iterations, and notice what is overdue.

    Plans leave on ticks alone, so that requests that arrive together are scheduled together.
    """

    now: float


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The process was told to end: refuse new requests, let running ones finish. ``handle`` answers with Stop when
    nothing is left to do; the shell stops by itself after its grace period."""

    now: float


Event = Received | SendFailed | Tick | StopRequested


class Send(NamedTuple):
    """Send ``message`` to ``peer``."""

    peer: Peer
    message: Message


class Log(NamedTuple):
    """Something that an operator should see. ``fields`` become structured log fields."""

    level: Literal["debug", "info", "warning", "error"]
    event: str
    fields: dict[str, object]


@dataclass(frozen=True, slots=True)
class Stop:
    """Nothing is left to do after StopRequested."""


Action = Send | Log | Stop
