"""The scheduler core: one door, events in, actions out. It knows no socket, no clock and no thread."""

from __future__ import annotations

import json

from pagemill_scheduler import fleet, grammars, intake, invariants, planner, report, results
from pagemill_scheduler.config import CoreConfig
from pagemill_scheduler.events import Action, Event, Peer, Received, SendFailed, Stop, StopRequested, Tick
from pagemill_scheduler.gateway import GatewayState
from pagemill_scheduler.state import State
from pagemill_scheduler.worker import WorkerState
from pagemill_shared.errors import ProtocolError
from pagemill_shared.messages import (
    AbortRequest,
    GatewayHello,
    GatewaySync,
    GrammarCompiled,
    Heartbeat,
    HelloRequest,
    IterationResult,
    Resync,
    SequenceFinished,
    StateQuery,
    StateReport,
    SubmitRequest,
    WorkerHello,
    WorkerLeaving,
)
from pagemill_shared.numbering import Verdict
from pagemill_shared.schema import Message

FROM_GATEWAY = GatewaySync | SubmitRequest | AbortRequest | SequenceFinished
"""The numbered messages of a gateway."""


class SchedulerCore:
    """Owns every block table, queue and request. Single-threaded.

    Args:
        config: the policy.
        incarnation: grows with every start of a scheduler, below 2**39, so that no epoch repeats.
    """

    def __init__(self, config: CoreConfig, incarnation: int) -> None:
        self._state = State(config, incarnation)

    def handle(self, event: Event) -> list[Action]:
        """Take in one event; what to do about it, in order.

        Raises:
            InvariantError: only with ``check_invariants``; the core must not be used any further.
        """
        state = self._state
        match event:
            case Received():
                self._received(event.now, event.peer, event.message)
            case Tick():
                self._tick(event.now)
            case SendFailed():
                self._send_failed(event.now, event.peer)
            case StopRequested():
                state.stopping = True
                state.log("info", "stopping", requests=sum(1 for _ in state.requests()))
        self._flush_deliveries()
        if state.config.check_invariants:
            invariants.check(state)
        actions, state.actions = state.actions, []
        return actions

    def snapshot(self, now: float) -> dict[str, object]:
        """The state for people and metrics, as JSON-compatible values. docs/api.md describes it."""
        return report.snapshot(self._state, now)

    def _received(self, now: float, peer: Peer, message: Message) -> None:
        state = self._state
        match message:
            case WorkerHello() if peer.side == "backend":
                fleet.join(state, peer, message, now)
                return
            case GatewayHello() if peer.side == "frontend":
                intake.join(state, peer, message, now)
                return
            case StateQuery() if peer.side == "frontend":
                body = json.dumps(self.snapshot(now)).encode()
                state.send(peer, StateReport(message.query, body))
                return
        known = state.peers.get(peer)
        if known is None:
            if not isinstance(message, HelloRequest):
                state.send(peer, HelloRequest())
            return
        known.last_heard = now
        if isinstance(known, WorkerState):
            self._from_worker(now, known, message)
        else:
            self._from_gateway(now, known, message)

    def _from_worker(self, now: float, worker: WorkerState, message: Message) -> None:
        state = self._state
        match message:
            case IterationResult():
                verdict = worker.incoming.accept(message.epoch, message.iteration)
                if verdict is Verdict.APPLY and not worker.flights:
                    verdict = Verdict.BROKEN  # it answers a plan that was never sent
                if verdict is Verdict.BROKEN:
                    fleet.begin_epoch(state, worker, f"result {message.iteration} was out of turn", now)
                elif verdict is Verdict.STALE:
                    state.counters.ignored_messages += 1
                else:
                    worker.progress_at = now
                    try:
                        results.apply_result(state, worker, message)
                    except ProtocolError as error:
                        fleet.lose(state, worker, error.reason, now)
            case GrammarCompiled():
                grammars.compiled(state, worker, message)
            case Heartbeat():
                if worker.incoming.check_heartbeat(message.epoch, message.sent) is Verdict.BROKEN:
                    fleet.begin_epoch(state, worker, "a result was lost", now)
            case Resync():
                if message.epoch == worker.outgoing.epoch:
                    fleet.begin_epoch(state, worker, message.reason, now)
            case WorkerLeaving():
                fleet.leave(state, worker, now)
            case _:
                self._out_of_place(worker.identity, message)

    def _from_gateway(self, now: float, gateway: GatewayState, message: Message) -> None:
        match message:
            case SubmitRequest() | SequenceFinished() | AbortRequest() | GatewaySync():
                verdict = gateway.incoming.accept(message.epoch, message.number)
                if verdict is Verdict.APPLY:
                    self._apply(now, gateway, message)
                elif verdict is Verdict.BROKEN:
                    self._resync_gateway(gateway, f"message {message.number} was out of turn")
                else:
                    self._state.counters.ignored_messages += 1
            case Heartbeat():
                if message.epoch == gateway.outgoing.epoch:
                    gateway.acknowledge(message.received)
                if gateway.incoming.check_heartbeat(message.epoch, message.sent) is Verdict.BROKEN:
                    self._resync_gateway(gateway, "a message was lost")
            case Resync():
                if message.epoch == gateway.outgoing.epoch:
                    self._resync_gateway(gateway, message.reason)
            case _:
                self._out_of_place(gateway.identity, message)

    def _apply(self, now: float, gateway: GatewayState, message: FROM_GATEWAY) -> None:
        match message:
            case SubmitRequest():
                intake.submit(self._state, gateway, message, now)
            case AbortRequest():
                intake.abort(self._state, gateway, message.handle)
            case SequenceFinished():
                intake.sequence_finished(self._state, gateway, message)
            case GatewaySync():
                intake.sync(self._state, gateway, message)

    def _resync_gateway(self, gateway: GatewayState, reason: str) -> None:
        state = self._state
        state.counters.resyncs += 1
        state.log("warning", "gateway epoch ended", gateway=gateway.identity, reason=reason)
        intake.begin_epoch(state, gateway)

    def _out_of_place(self, sender: str, message: Message) -> None:
        self._state.counters.ignored_messages += 1
        self._state.log("warning", "message out of place", sender=sender, message=type(message).__name__)

    def _send_failed(self, now: float, peer: Peer) -> None:
        state = self._state
        known = state.peers.get(peer)
        if isinstance(known, WorkerState):
            fleet.lose(state, known, "its connection is gone", now)
        elif known is not None:
            # It may come back on a new connection and ask for its answers; if it stays away, its silence ends it.
            del state.peers[peer]
            known.peer = None

    def _tick(self, now: float) -> None:
        state = self._state
        fleet.check_deadlines(state, now)
        for gateway in list(state.gateways.values()):
            if now - gateway.last_heard > state.config.peer_timeout:
                intake.lose(state, gateway, f"silent for {now - gateway.last_heard:.1f} s")
        fleet.dismiss_leaving(state)
        intake.expire(state, now)
        for worker in list(state.workers.values()):
            while len(worker.flights) < state.config.pipeline_depth:
                plan = planner.make_plan(state, worker, now)
                if plan is None:
                    break
                state.send(worker.peer, plan)
        self._heartbeats(now)
        if state.stopping and not any(True for _ in state.requests()):
            state.actions.append(Stop())

    def _heartbeats(self, now: float) -> None:
        state = self._state
        for peer, known in state.peers.items():
            if now >= known.heartbeat_at:
                known.heartbeat_at = now + state.config.heartbeat_interval
                link = known.outgoing
                state.send(peer, Heartbeat(link.epoch, link.sent, known.incoming.received))

    def _flush_deliveries(self) -> None:
        for gateway in self._state.gateways.values():
            if gateway.delivery and gateway.peer is not None:
                for delivery in gateway.take_deliveries():
                    self._state.send(gateway.peer, delivery)
            elif gateway.peer is None:
                # Nothing can reach it now; should it come back, it gets everything anew.
                gateway.keep(0, gateway.delivery.ended)
                gateway.delivery.reset()
