"""The two threads of a worker: the courier talks to the scheduler, the main thread carries out plans.

The courier owns the socket and the link, so heartbeats go on however long a forward pass takes. It hands welcomes and
plans over in a queue; results come back in another, with a wake-up.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import structlog
import zmq

from pagemill_shared.channel import DealerChannel
from pagemill_shared.errors import ConfigurationError, ProtocolError
from pagemill_shared.link import LinkState, PeerLink
from pagemill_shared.messages import (
    GrammarCompiled,
    IterationPlan,
    IterationResult,
    WorkerDismissed,
    WorkerLeaving,
    WorkerWelcome,
)
from pagemill_shared.schema import Message
from pagemill_shared.wakeup import Wakeup

DRAIN_LIMIT = 64
_STATES = {
    LinkState.CONNECTING: ("info", "waiting for the scheduler's welcome"),
    LinkState.CONNECTED: ("info", "the scheduler counts on this worker"),
    LinkState.LOST: ("warning", "the scheduler is silent; trying on"),
}


class Runner(Protocol):
    """What the shell needs of the model runner. Both methods are called from the main thread, in the scheduler's
    order; an exception ends the worker, whose blocks cannot be trusted any more.

    Attributes:
        announce: set by the shell; takes, from any thread, what is to be said between results.
    """

    announce: Callable[[GrammarCompiled], None]

    def begin(self, welcome: WorkerWelcome) -> None: ...

    def execute(self, plan: IterationPlan) -> IterationResult: ...


@dataclass(frozen=True, slots=True)
class _End:
    """The courier has ended: nothing more comes."""

    error: Exception | None = None


class Shell:
    """Runs until the scheduler lets a worker that was told to stop go.

    A scheduler that is silent or restarts is waited for, without limit.

    Args:
        channel: used by the courier thread alone while ``run`` lasts.
        wakeup: wakes the courier; ``request_stop`` does, too.
        link: this worker's side of the protocol, not used yet.
        shutdown_grace: seconds after ``request_stop`` in which the scheduler may still send plans.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        runner: Runner,
        channel: DealerChannel,
        wakeup: Wakeup,
        link: PeerLink,
        *,
        shutdown_grace: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._channel = channel
        self._wakeup = wakeup
        self._link = link
        self._shutdown_grace = shutdown_grace
        self._clock = clock
        self._log = structlog.get_logger("pagemill.worker")
        self._inbox: queue.SimpleQueue[WorkerWelcome | IterationPlan | _End] = queue.SimpleQueue()
        self._outbox: deque[IterationResult | GrammarCompiled] = deque()
        runner.announce = self._announce
        self._epoch: int | None = None  # the one in force; written by the courier
        self._stop_requested = False
        self._ended = False
        # The courier's own:
        self._leave_by: float | None = None
        self._state = LinkState.CONNECTING
        self._warn_at: float | None = None

    def request_stop(self) -> None:
        """Hand the work over, then return from ``run``. From any thread or signal handler, also during a plan."""
        self._stop_requested = True
        self._wakeup.wake()

    def _announce(self, message: GrammarCompiled) -> None:
        self._outbox.append(message)
        self._wakeup.wake()

    def run(self) -> None:
        """Carries out plans until this worker has left.

        Raises:
            ConfigurationError: the scheduler refuses this worker, and why.
            Exception: what the runner raised.
        """
        courier = threading.Thread(target=self._courier, name="courier", daemon=True)
        courier.start()
        try:
            self._execute_plans()
        finally:
            self._ended = True
            self._wakeup.wake()
            courier.join()

    # ------------------------------------------------------------ main thread

    def _execute_plans(self) -> None:
        while True:
            idle_since = self._clock()
            item = self._inbox.get()
            waited = self._clock() - idle_since
            match item:
                case _End(error=error):
                    if error is not None:
                        raise error
                    return
                case WorkerWelcome(epoch=epoch) if epoch == self._epoch:
                    self._runner.begin(item)
                case IterationPlan(epoch=epoch) if epoch == self._epoch and not self._ended:
                    result = self._runner.execute(item)
                    self._outbox.append(replace(result, wait_us=int(waited * 1e6)))
                    self._wakeup.wake()

    # ------------------------------------------------------------ courier thread

    def _courier(self) -> None:
        error: Exception | None = None
        try:
            self._carry()
        except Exception as caught:  # handed to the main thread, which raises it
            error = caught
        self._ended = True
        self._inbox.put(_End(error))

    def _carry(self) -> None:
        poller = zmq.Poller()
        poller.register(self._channel.socket, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        self._warn_at = self._clock() + self._link.peer_timeout
        while not self._ended:
            poller.poll(max(0, math.ceil((self._link.deadline - self._clock()) * 1000)))
            self._wakeup.drain()
            for message in self._channel.receive(DRAIN_LIMIT):
                self._receive(message)
            self._send_results()
            for message in self._link.tick(self._clock()):
                self._send(message)
            self._note_state()
            self._leave_if_asked()

    def _receive(self, message: Message) -> None:
        try:
            outcome = self._link.received(self._clock(), message)
        except ProtocolError as error:
            self._channel.reject(error)
            return
        # Before the main thread can see the welcome: it passes over whatever is not of the epoch in force.
        self._epoch = self._link.epoch if self._link.in_epoch else None
        if self._leave_by is not None and self._epoch is None:
            return  # no new hello from one that leaves; _leave_if_asked ends
        for reply in outcome.send:
            self._send(reply)
        for item in outcome.apply:
            match item:
                case WorkerWelcome():
                    self._log.debug("welcomed", epoch=item.epoch)
                    self._inbox.put(item)
                    if self._leave_by is not None:
                        self._send(WorkerLeaving(self._link.hello.identity))
                case IterationPlan():
                    self._inbox.put(item)
                case WorkerDismissed(reason=reason):
                    if self._leave_by is None:
                        raise ConfigurationError(f"the scheduler refuses this worker: {reason}")
                    self._log.info("dismissed", reason=reason)
                    self._ended = True

    def _send_results(self) -> None:
        while self._outbox:
            message = self._outbox.popleft()
            current = self._link.in_epoch and message.epoch == self._link.epoch
            if self._link.count_result(message) if isinstance(message, IterationResult) else current:
                self._send(message)

    def _send(self, message: Message) -> None:
        if not self._channel.send(message):
            self._link.unsent(self._clock())

    def _note_state(self) -> None:
        if self._warn_at is not None and (self._link.epoch or self._clock() >= self._warn_at):
            if not self._link.epoch:
                self._log.warning("no scheduler answers; trying on", endpoint=self._channel.endpoint)
            self._warn_at = None
        state = self._link.state
        if state is not self._state:
            level, text = _STATES[state]
            getattr(self._log, level)(text, endpoint=self._channel.endpoint)
            self._state = state

    def _leave_if_asked(self) -> None:
        now = self._clock()
        if self._stop_requested and self._leave_by is None:
            self._log.info("leaving")
            self._leave_by = now + self._shutdown_grace
            if self._link.in_epoch:
                self._send(WorkerLeaving(self._link.hello.identity))
        if self._leave_by is None:
            return
        if self._link.state is not LinkState.CONNECTED:
            self._log.info("left; no scheduler counts on this worker")
            self._ended = True
        elif now >= self._leave_by:
            self._log.warning("left at the end of the grace period", grace_s=self._shutdown_grace)
            self._ended = True
