"""The connecting side of the protocol against a model of the scheduler's side, over a wire that loses messages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagemill_testing.links import (
    INTERVAL,
    gateway_link,
    result,
    worker_link,
)

from pagemill_shared.link import PeerLink
from pagemill_shared.messages import (
    AbortRequest,
    Delivery,
    GatewayHello,
    GatewaySync,
    GatewayWelcome,
    Heartbeat,
    HelloRequest,
    IterationPlan,
    IterationResult,
    Resync,
    WorkerHello,
    WorkerWelcome,
)
from pagemill_shared.numbering import Incoming, Outgoing, Verdict
from pagemill_shared.schema import Message


@dataclass
class SchedulerSide:
    """The other end as docs/protocol.md has it, with nothing but the numbers."""

    gateway: bool
    known: bool = False
    epoch: int = 0
    outgoing: Outgoing = field(default_factory=Outgoing)
    incoming: Incoming = field(default_factory=Incoming)
    applied: list[tuple[int, int]] = field(default_factory=list)
    heartbeat_at: float = 0.0

    def received(self, message: Message) -> list[Message]:
        if isinstance(message, WorkerHello | GatewayHello):
            self.known = True
            return self.begin()
        if not self.known:
            return [HelloRequest()]
        match message:
            case Resync(epoch=epoch) if epoch == self.epoch:
                return self.begin()
            case Heartbeat(epoch=epoch, sent=sent):
                if self.incoming.check_heartbeat(epoch, sent) is Verdict.BROKEN:
                    return self.begin()
            case (
                IterationResult(epoch=epoch, iteration=number)
                | AbortRequest(epoch=epoch, number=number)
                | GatewaySync(epoch=epoch, number=number)
            ):
                verdict = self.incoming.accept(epoch, number)
                if verdict is Verdict.BROKEN:
                    return self.begin()
                if verdict is Verdict.APPLY:
                    self.applied.append((epoch, number))
        return []

    def begin(self) -> list[Message]:
        self.epoch += 1
        self.outgoing.begin(self.epoch)
        self.incoming.begin(self.epoch)
        return [GatewayWelcome(self.epoch, 1) if self.gateway else WorkerWelcome(self.epoch, 4, 64)]

    def step(self, now: float) -> list[Message]:
        if not self.known:
            return []
        number = self.outgoing.next()
        messages: list[Message] = [Delivery(self.epoch, number) if self.gateway else IterationPlan(self.epoch, number)]
        if now >= self.heartbeat_at:
            self.heartbeat_at = now + INTERVAL
            messages.append(Heartbeat(self.epoch, self.outgoing.sent, self.incoming.received))
        return messages


@dataclass
class PeerSide:
    """A link and what its owner would do: answer plans, or send a sync and then one message a step."""

    link: PeerLink
    applied: list[tuple[int, int]] = field(default_factory=list)
    welcomes: int = 0

    def received(self, now: float, message: Message) -> list[Message]:
        outcome = self.link.received(now, message)
        replies = list(outcome.send)
        for item in outcome.apply:
            match item:
                case IterationPlan():
                    self.applied.append((item.epoch, item.iteration))
                    answer = result(item.epoch, item.iteration)
                    if self.link.count_result(answer):
                        replies.append(answer)
                case Delivery():
                    self.applied.append((item.epoch, item.number))
                case GatewayWelcome():
                    self.welcomes += 1
                    replies.append(GatewaySync(*self.link.next_number(), np.zeros(0, np.int32)))
                case WorkerWelcome():
                    self.welcomes += 1
        return replies

    def step(self, now: float) -> list[Message]:
        messages: list[Message] = []
        if isinstance(self.link.hello, GatewayHello) and self.link.in_epoch:
            messages.append(AbortRequest(*self.link.next_number(), 1))
        return messages + self.link.tick(now)


@dataclass
class Wire:
    """One direction. The message with index ``at`` is dropped, sent twice, or overtaken by the next."""

    fault: str
    at: int
    sent: int = 0
    held: Message | None = None
    hit: Message | None = None

    def carry(self, messages: list[Message]) -> list[Message]:
        arriving: list[Message] = []
        for message in messages:
            index, self.sent = self.sent, self.sent + 1
            if index == self.at:
                self.hit = message
                if self.fault == "repeat":
                    arriving += [message, message]
                elif self.fault == "swap":
                    self.held = message
            else:
                arriving.append(message)
                if self.held is not None:
                    arriving.append(self.held)
                    self.held = None
        return arriving


STEPS = 120


def converse(gateway: bool, to_peer: Wire, to_scheduler: Wire) -> tuple[SchedulerSide, PeerSide]:
    scheduler = SchedulerSide(gateway)
    peer = PeerSide(gateway_link() if gateway else worker_link())
    inbound: list[Message] = []  # on their way to the scheduler
    for step in range(STEPS):
        now = step * 0.1
        outbound = [reply for message in inbound for reply in scheduler.received(message)]
        outbound = to_peer.carry(outbound + scheduler.step(now))
        replies = [reply for message in outbound for reply in peer.received(now, message)]
        inbound = to_scheduler.carry(replies + peer.step(now))
    return scheduler, peer


def assert_in_order(applied: list[tuple[int, int]]) -> None:
    """Within an epoch 1, 2, 3, … and epochs in order: nothing was left out, repeated or applied out of turn."""
    epoch, number = -1, 0
    for this in applied:
        assert this == (epoch, number + 1) or (this[0] > epoch and this[1] == 1), (applied, this)
        epoch, number = this


@pytest.mark.parametrize("gateway", [False, True], ids=["worker", "gateway"])
def test_a_sound_wire_needs_one_epoch(gateway: bool) -> None:
    scheduler, peer = converse(gateway, Wire("none", -1), Wire("none", -1))
    assert (scheduler.epoch, peer.welcomes) == (1, 1)
    assert len(peer.applied) >= STEPS - 3
    assert len(scheduler.applied) >= STEPS - 5


@given(
    gateway=st.booleans(),
    fault=st.sampled_from(["drop", "repeat", "swap"]),
    towards_peer=st.booleans(),
    at=st.integers(0, 60),
)
def test_one_fault_leads_to_at_most_one_resend(gateway: bool, fault: str, towards_peer: bool, at: int) -> None:
    faulty, sound = Wire(fault, at), Wire("none", -1)
    scheduler, peer = converse(gateway, *((faulty, sound) if towards_peer else (sound, faulty)))
    assert faulty.hit is not None
    assert_in_order(peer.applied)
    assert_in_order(scheduler.applied)
    assert scheduler.epoch <= 2
    if isinstance(faulty.hit, IterationPlan | Delivery | IterationResult | AbortRequest | GatewaySync):
        assert scheduler.epoch == 2
        assert peer.welcomes == 2
    # Whatever happened, at the end both agree again and all goes on.
    assert peer.link.in_epoch
    assert peer.link.epoch == scheduler.epoch
    assert peer.applied[-1] == (scheduler.epoch, scheduler.outgoing.sent)
    assert scheduler.applied[-1][0] == scheduler.epoch


@given(
    gateway=st.booleans(),
    faults=st.lists(
        st.tuples(st.sampled_from(["drop", "repeat", "swap"]), st.booleans(), st.integers(0, 40)), max_size=6
    ),
)
def test_many_faults_never_lead_to_a_wrong_application(gateway: bool, faults: list[tuple[str, bool, int]]) -> None:
    scheduler, peer = converse(
        gateway,
        _chain([Wire(fault, at) for fault, towards_peer, at in faults if towards_peer]),
        _chain([Wire(fault, at) for fault, towards_peer, at in faults if not towards_peer]),
    )
    assert_in_order(peer.applied)
    assert_in_order(scheduler.applied)
    assert peer.applied[-1] == (scheduler.epoch, scheduler.outgoing.sent)


def _chain(wires: list[Wire]) -> Wire:
    class Chain(Wire):
        def carry(self, messages: list[Message]) -> list[Message]:
            for wire in wires:
                messages = wire.carry(messages)
            return messages

    return Chain("none", -1)
