"""The loop around the scheduler core: receive, handle, send. It decides nothing about requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Literal, Protocol

import numpy as np
import structlog
import zmq

from pagemill_scheduler.collector import Collector
from pagemill_scheduler.events import Action, Event, Log, Peer, Received, Send, SendFailed, Stop, StopRequested, Tick
from pagemill_shared.channel import RouterChannel
from pagemill_shared.link import ABSENCE_S
from pagemill_shared.schema import Message
from pagemill_shared.wakeup import Wakeup

Side = Literal["frontend", "backend"]

DRAIN_LIMIT = 256
"""Messages taken from one socket before the core plans again: a flood must not keep it from planning."""


class Core(Protocol):
    """What the shell needs of :class:`pagemill_scheduler.core.SchedulerCore`."""

    def handle(self, event: Event) -> list[Action]: ...


class EventError(Exception):
    """The core, or carrying out what it said, failed on an event; logged with that event already."""


class Shell:
    """Carries messages between two ROUTER sockets and the core until the core says Stop.

    For the core time stands still while this process does not get to run: what its peers said meanwhile may still be on
    its way, and nobody must be taken for silent.

    Args:
        core: the state machine. An exception from it ends the process: its state cannot be trusted any more.
        channels: the bound sockets by side; the shell uses them from the thread that calls ``run`` alone.
        tick_interval: the core gets a Tick at least this often, in seconds.
        shutdown_grace: seconds after ``request_stop`` until the shell ends even if requests still run.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        core: Core,
        channels: Mapping[Side, RouterChannel],
        wakeup: Wakeup,
        *,
        tick_interval: float,
        shutdown_grace: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._channels = channels
        self._wakeup = wakeup
        self._tick_interval = tick_interval
        self._shutdown_grace = shutdown_grace
        self._clock = clock
        self._log = structlog.get_logger("pagemill.scheduler")
        self._absent = 0.0  # seconds in which this process did not get to run
        self._looked_at = clock()  # when the clock was last read
        self._stop_requested = False
        self._stop_at: float | None = None
        self._stopped = False
        self._failed: dict[Peer, None] = {}  # in order of failure, each peer once

    def request_stop(self) -> None:
        """Refuse new requests, let running ones finish, then return from ``run``. From any thread or signal handler."""
        self._stop_requested = True
        self._wakeup.wake()

    def run(self) -> None:
        """Returns when the core has stopped or the grace period is over.

        Raises:
            EventError: the core is not to be trusted any more.
        """
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        for channel in self._channels.values():
            channel.register(poller)
        timeout_ms = max(1, int(self._tick_interval * 1000))
        with Collector() as collector:
            while not self._stopped:
                idle = not poller.poll(timeout_ms)
                self._wakeup.drain()
                self._round()
                collector.after_round(idle=idle)

    def _round(self) -> None:
        """Everything that has arrived, up to a bound, then one Tick."""
        reported: set[Peer] = set()
        self._check_stop()
        for side, channel in self._channels.items():
            for route, message in channel.receive(DRAIN_LIMIT):
                self._handle(Received(self._now(), Peer(side, route), message))
        for side, channel in self._channels.items():
            for route in channel.broken():
                self._failed[Peer(side, route)] = None
        self._report_failures(reported)
        self._handle(Tick(self._now()))
        self._report_failures(reported)

    def _now(self) -> float:
        now = self._clock()
        late = now - self._looked_at - self._tick_interval
        if late > ABSENCE_S:
            self._absent += late
        self._looked_at = now
        return now - self._absent

    def _check_stop(self) -> None:
        now = self._now()
        if self._stop_requested and self._stop_at is None:
            self._stop_at = now + self._shutdown_grace
            self._handle(StopRequested(now))
        elif self._stop_at is not None and now >= self._stop_at:
            self._log.warning("requests still run at the end of the grace period", grace_s=self._shutdown_grace)
            self._stopped = True

    def _report_failures(self, reported: set[Peer]) -> None:
        # Each peer once a round: a core that answers a failed send with another one must not keep us here for ever.
        while due := [peer for peer in self._failed if peer not in reported]:
            for peer in due:
                reported.add(peer)
                del self._failed[peer]
                self._handle(SendFailed(self._now(), peer))

    def _handle(self, event: Event) -> None:
        try:
            for action in self._core.handle(event):
                self._carry_out(action)
        except Exception as error:
            self._log.exception("the scheduler core failed; ending", core_event=describe(event))
            raise EventError(describe(event)) from error

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(peer=peer, message=message):
                if not self._channels[peer.side].send(peer.route, message):
                    self._failed[peer] = None
            case Log(level=level, event=text, fields=values):
                getattr(self._log, level)(text, **values)
            case Stop():
                self._stopped = True


def describe(event: Event) -> str:
    """The event for a log: everything but what users wrote, so arrays and nested messages as their shape alone."""
    if isinstance(event, Received):
        return f"{event.now:.6f} {event.peer} {_describe_message(event.message)}"
    peer = f" {event.peer}" if isinstance(event, SendFailed) else ""
    return f"{event.now:.6f} {type(event).__name__}{peer}"


def _describe_message(message: Message) -> str:
    parts = [f"{field.name}={_describe_value(getattr(message, field.name))}" for field in fields(message)]  # type: ignore[arg-type]
    return f"{type(message).__name__}({', '.join(parts)})"


def _describe_value(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(_describe_value(item) for item in value[:8])}{', …' if len(value) > 8 else ''})"
    if isinstance(value, Message):
        return _describe_message(value)
    if isinstance(value, bytes):
        return f"bytes[{len(value)}]"
    return repr(value)
