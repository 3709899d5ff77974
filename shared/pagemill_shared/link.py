"""The connecting side of docs/protocol.md, for gateways and workers alike: hello, epochs, numbers, heartbeats.

A :class:`PeerLink` is a pure state machine without socket, clock or thread. Its shell hands in what arrived and what
time it is, and sends what comes out, in order:

    outcome = link.received(now, message)    # for each message from the scheduler, before tick
    send(outcome.send); apply(outcome.apply)
    send(link.tick(now))                     # by link.deadline at the latest

``apply`` holds what the shell's owner must act on: welcomes, numbered messages that are in order, and the messages
that are not numbered. When a send fails, ``link.unsent(now)`` makes the link try again soon. What was to be sent is
gone; the number it carried is missing at the scheduler, which then begins a new epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pagemill_shared.errors import ProtocolError
from pagemill_shared.messages import (
    Delivery,
    FleetStatus,
    GatewayHello,
    GatewayWelcome,
    Heartbeat,
    HelloRequest,
    IterationPlan,
    IterationResult,
    Resync,
    StateReport,
    WorkerDismissed,
    WorkerHello,
    WorkerWelcome,
)
from pagemill_shared.numbering import Incoming, Outgoing, Verdict
from pagemill_shared.schema import Message


class LinkState(Enum):
    """What this side knows of the scheduler."""

    CONNECTING = "connecting"
    """No epoch is in force: not welcomed yet, or between a broken epoch and the next welcome."""
    CONNECTED = "connected"
    """An epoch is in force and the scheduler was heard of lately."""
    LOST = "lost"
    """The scheduler has been silent for ``peer_timeout``. An epoch may still be in force: a scheduler that was only
    slow goes on with it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one received message leads to: ``send`` goes back to the scheduler, ``apply`` is for the link's owner."""

    send: Sequence[Message] = ()
    apply: Sequence[Message] = ()


_NOTHING = Outcome()
ABSENCE_S = 0.5
"""So late, a process did not get to run: it was stopped, or starved, or its machine slept."""
RETRY_S = 0.05
"""How soon the link tries again when there is no connection; a scheduler that has just come up is found as fast."""


class PeerLink:
    """One gateway's or worker's side of its connection to the scheduler.

    While no epoch is in force the link sends heartbeats as probes (a scheduler that does not know the sender answers
    them with HelloRequest) and says hello again when a hello or Resync stayed unanswered for ``peer_timeout``. It does
    not say hello more often, because each hello that reaches the scheduler begins an epoch: a scheduler that was
    stopped for a while would find many of them in its queue.

    Args:
        hello: what to introduce this peer with; its type decides the role.
        heartbeat_interval, peer_timeout: seconds.
    """

    def __init__(self, hello: GatewayHello | WorkerHello, *, heartbeat_interval: float, peer_timeout: float) -> None:
        self.hello = hello
        self.heartbeat_interval = heartbeat_interval
        self.peer_timeout = peer_timeout
        self.incarnation: int | None = None
        """Of the scheduler that welcomed this gateway last; None before the first welcome, and for workers."""
        self._incoming = Incoming()
        self._outgoing = Outgoing()
        self._open = False
        self._silent = False
        self._heard: float | None = None
        self._asked: float | None = None  # when the last hello or Resync was sent
        self._greeted: float | None = None  # when the last hello was sent
        self._next_heartbeat = 0.0

    # ------------------------------------------------------------ what the owner may ask

    @property
    def state(self) -> LinkState:
        """As of the last ``tick`` or ``received``."""
        if self._silent:
            return LinkState.LOST
        return LinkState.CONNECTED if self._open else LinkState.CONNECTING

    @property
    def in_epoch(self) -> bool:
        """Whether an epoch is in force, so that numbered messages may be sent."""
        return self._open

    @property
    def epoch(self) -> int:
        """The epoch in force, or the last one known; 0 before the first."""
        return self._incoming.epoch

    @property
    def deadline(self) -> float:
        """The time at which ``tick`` next has something to do."""
        return self._next_heartbeat

    # ------------------------------------------------------------ outgoing numbers

    def next_number(self) -> tuple[int, int]:
        """Epoch and number of a gateway's next numbered message.

        Raises:
            RuntimeError: no epoch is in force. Nothing needs sending then: after the next welcome the gateway
                describes all that is alive.
        """
        if not self._open:
            raise RuntimeError("no epoch is in force; ask in_epoch first")
        return self._outgoing.epoch, self._outgoing.next()

    def count_result(self, result: IterationResult) -> bool:
        """Counts a worker's result, which its plan has numbered, as sent. False: its epoch is over, drop it.

        Raises:
            RuntimeError: results of this epoch are out of order, which no scheduler could understand.
        """
        if not self._open or result.epoch != self._outgoing.epoch:
            return False
        if result.iteration != self._outgoing.sent + 1:
            raise RuntimeError(f"result {result.iteration} follows result {self._outgoing.sent}")
        self._outgoing.next()
        return True

    # ------------------------------------------------------------ incoming messages and time

    def received(self, now: float, message: Message) -> Outcome:
        """What to do with ``message`` from the scheduler.

        Raises:
            ProtocolError: a valid message that is not for this kind of peer. The link stays as it was.
        """
        outcome = self._dispatch(now, message)
        self._heard, self._silent = now, False
        return outcome

    def tick(self, now: float) -> list[Message]:
        """What is due at ``now``: heartbeats, and a hello when one must be said or repeated.

        Call it after all that has arrived was handed to ``received``. A peer that was itself stopped for a while, and
        so comes late, does not take the scheduler for silent: what was said meanwhile may still be on its way to it.
        """
        late = now - self._next_heartbeat
        if self._heard is not None and late > ABSENCE_S:
            self._heard += late
        if self._heard is not None and now - self._heard > self.peer_timeout:
            self._silent = True
        if now < self._next_heartbeat:
            return []
        if not self._open and (self._asked is None or now - self._asked >= self.peer_timeout):
            return [self._say_hello(now)]
        self._next_heartbeat = now + self.heartbeat_interval
        return [Heartbeat(self._incoming.epoch, self._outgoing.sent, self._incoming.received)]

    def unsent(self, now: float) -> None:
        """A message could not be handed over: there is no connection, or its queue is full."""
        self._next_heartbeat = min(self._next_heartbeat, now + RETRY_S)
        if not self._open:
            self._asked = self._greeted = None  # whatever was asked, nobody has heard it

    def _dispatch(self, now: float, message: Message) -> Outcome:
        match message, self.hello:
            case Heartbeat(epoch=epoch, sent=sent), _:
                return self._heartbeat(now, epoch, sent)
            case HelloRequest(), _:
                return self._not_known(now)
            case IterationPlan(epoch=epoch, iteration=number), WorkerHello():
                return self._numbered(now, epoch, number, message)
            case Delivery(epoch=epoch, number=number), GatewayHello():
                return self._numbered(now, epoch, number, message)
            case WorkerWelcome(epoch=epoch), WorkerHello():
                return self._welcomed(epoch, message)
            case GatewayWelcome(epoch=epoch, incarnation=incarnation), GatewayHello():
                outcome = self._welcomed(epoch, message)
                if outcome.apply:
                    self.incarnation = incarnation
                return outcome
            case (WorkerDismissed(), WorkerHello()) | (FleetStatus() | StateReport(), GatewayHello()):
                return Outcome(apply=(message,))
        role = "gateway" if isinstance(self.hello, GatewayHello) else "worker"
        raise ProtocolError(f"{type(message).__name__} is not for a {role}")

    def _numbered(self, now: float, epoch: int, number: int, message: Message) -> Outcome:
        if self._is_over(epoch):
            return _NOTHING
        expected = self._incoming.received + 1
        if self._incoming.accept(epoch, number) is Verdict.APPLY:
            return Outcome(apply=(message,))
        return self._broken(now, epoch, f"{type(message).__name__} {number} came", expected)

    def _heartbeat(self, now: float, epoch: int, sent: int) -> Outcome:
        if self._is_over(epoch):
            return _NOTHING
        expected = self._incoming.received
        if self._incoming.check_heartbeat(epoch, sent) is Verdict.APPLY:
            return _NOTHING
        return self._broken(now, epoch, f"heartbeat says {sent} were sent", expected)

    def _is_over(self, epoch: int) -> bool:
        """Epochs grow. One that is newer than the last known is not over: its welcome was lost."""
        return epoch < self.epoch or (epoch == self.epoch and not self._open)

    def _broken(self, now: float, epoch: int, what: str, expected: int) -> Outcome:
        reason = f"{what}, expected {expected}" if epoch == self.epoch else f"{what}, but no welcome"
        self._begin(epoch)
        self._open = False
        self._asked = now
        return Outcome(send=(Resync(epoch, reason),))

    def _welcomed(self, epoch: int, welcome: Message) -> Outcome:
        # A repeated welcome must not begin its epoch anew: the scheduler's count goes on. Between two epochs a lower
        # one counts too: a scheduler that restarted after its clock was set back gives such.
        if epoch == self.epoch or (epoch < self.epoch and self._open):
            return _NOTHING
        self._begin(epoch)
        self._open = True
        return Outcome(apply=(welcome,))

    def _not_known(self, now: float) -> Outcome:
        # A scheduler that just came back asks once for everything that waited in its queue; one hello answers all.
        if self._greeted is not None and now - self._greeted < self.heartbeat_interval:
            return _NOTHING
        self._open = False
        return Outcome(send=(self._say_hello(now),))

    def _begin(self, epoch: int) -> None:
        self._incoming.begin(epoch)
        self._outgoing.begin(epoch)

    def _say_hello(self, now: float) -> Message:
        self._asked = self._greeted = now
        self._next_heartbeat = now + self.heartbeat_interval
        return self.hello
