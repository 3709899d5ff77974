"""A scheduler core with fake gateways and workers around it, in one thread, with a clock that the test moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from pagemill_scheduler.config import CoreConfig
from pagemill_scheduler.core import SchedulerCore
from pagemill_scheduler.events import Action, Event, Log, Peer, Received, Send, SendFailed, Stop, Tick
from pagemill_scheduler.state import State
from pagemill_shared.codec import decode, encode
from pagemill_shared.messages import (
    AbortRequest,
    Delivery,
    FinishReason,
    FleetStatus,
    GatewayHello,
    GatewaySync,
    GatewayWelcome,
    Heartbeat,
    HelloRequest,
    IterationPlan,
    IterationResult,
    PromptReport,
    RequestFailure,
    Resync,
    SequenceFinished,
    SubmitRequest,
    WorkerDismissed,
    WorkerHello,
    WorkerLeaving,
    WorkerWelcome,
)
from pagemill_shared.numbering import Incoming, Outgoing, Verdict
from pagemill_shared.sampling import Pooling, SamplingParams
from pagemill_shared.schema import Message
from pagemill_testing.fake_worker import FakeWorker, worker_hello


@dataclass
class Answer:
    """What a gateway has received for one request."""

    submit: SubmitRequest
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finishes: dict[int, FinishReason] = field(default_factory=dict)
    reports: list[PromptReport] = field(default_factory=list)
    failure: RequestFailure | None = None
    stopped: bool = False
    cached_tokens: int = 0
    scores: dict[int, float] = field(default_factory=dict)

    @property
    def prompt_logprobs(self) -> list[float]:
        return [float(value) for report in self.reports for value in report.logprobs.values]

    @property
    def pooled(self) -> float:
        values = [float(report.pooled[0]) for report in self.reports if len(report.pooled)]
        return sum(values) if self.submit.sampling.pooling == Pooling.MEAN else values[-1]

    @property
    def done(self) -> bool:
        return len(self.finishes) == self.submit.sampling.n or self.failure is not None or self.stopped


class FakeGateway:
    """Speaks the gateway's side of the protocol and checks what it gets."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.name = name
        self.peer = Peer("frontend", name.encode())
        self.outgoing, self.incoming = Outgoing(), Incoming()
        self.answers: dict[int, Answer] = {}
        self.fleet = FleetStatus(0, 0, 0, "")
        self.welcomes = 0
        self.lose_next_delivery = False
        self._handles = 0

    def hello(self) -> None:
        self.simulation.receive(self.peer, GatewayHello(self.name, "model"))

    def submit(self, prompt: list[int], sampling: SamplingParams, priority: int = 0, salt: str = "") -> int:
        self._handles += 1
        request_id = f"{self.name}-{self._handles}"
        epoch, number = self.outgoing.epoch, self.outgoing.next()
        ids = np.array(prompt, np.int32)
        message = SubmitRequest(epoch, number, self._handles, request_id, ids, sampling, priority, salt)
        self.answers[self._handles] = Answer(message)
        self.simulation.receive(self.peer, message)
        return self._handles

    def abort(self, handle: int) -> None:
        self.answers.pop(handle, None)
        self.simulation.receive(self.peer, AbortRequest(self.outgoing.epoch, self.outgoing.next(), handle))

    def stop_string(self, handle: int, kept: int) -> None:
        """A stop string ends sequence 0; of a request with one sequence nothing more is expected."""
        answer = self.answers[handle]
        answer.stopped = answer.submit.sampling.n == 1
        answer.finishes[0] = FinishReason.STOP_TOKEN
        message = SequenceFinished(self.outgoing.epoch, self.outgoing.next(), handle, 0, kept)
        self.simulation.receive(self.peer, message)

    def heartbeat(self) -> None:
        self.simulation.receive(self.peer, Heartbeat(self.outgoing.epoch, self.outgoing.sent, self.incoming.received))

    def take(self, message: Message) -> None:
        match message:
            case GatewayWelcome():
                self.welcomes += 1
                self.outgoing.begin(message.epoch)
                self.incoming.begin(message.epoch)
                alive = [h for h, answer in self.answers.items() if not answer.done]
                self._send(GatewaySync(message.epoch, self.outgoing.next(), np.array(alive, np.int32)))
                for handle in alive:
                    old = self.answers[handle].submit
                    self._send(
                        SubmitRequest(
                            message.epoch,
                            self.outgoing.next(),
                            handle,
                            old.request_id,
                            old.prompt_token_ids,
                            old.sampling,
                            old.priority,
                            old.cache_salt,
                        )
                    )
            case FleetStatus():
                self.fleet = message
            case Delivery():
                if self.lose_next_delivery:
                    self.lose_next_delivery = False
                    return
                match self.incoming.accept(message.epoch, message.number):
                    case Verdict.APPLY:
                        self._deliver(message)
                    case Verdict.BROKEN:
                        self._send(Resync(message.epoch, "gap"))
            case Heartbeat():
                if self.incoming.check_heartbeat(message.epoch, message.sent) is Verdict.BROKEN:
                    self._send(Resync(message.epoch, "lost"))
            case HelloRequest():
                self.hello()
            case _:
                raise AssertionError(f"a gateway got {message}")

    def _send(self, message: Message) -> None:
        self.simulation.outbox.append((self.peer, message))

    def _deliver(self, delivery: Delivery) -> None:
        for report in delivery.reports:
            asker = self.answers.get(report.owner)
            if asker is None:
                continue  # aborted meanwhile
            if asker.reports and report.start <= asker.reports[0].start:
                asker.reports.clear()  # all of it is delivered anew
            if asker.submit.sampling.needs_every_position:
                assert report.start == (asker.reports[-1].end if asker.reports else 0)
            asker.reports.append(report)
        start = 0
        values = dict(zip(delivery.logprobs.rows.tolist(), delivery.logprobs.values.tolist(), strict=True))
        for i, handle in enumerate(delivery.handles.tolist()):
            count, sequence = int(delivery.counts[i]), int(delivery.sequences[i])
            tokens = delivery.token_ids[start : start + count].tolist()
            logprobs = [values.get(start + k) for k in range(count)]
            start += count
            answer = self.answers.get(handle)
            if answer is None or answer.stopped:
                continue  # aborted meanwhile
            answer.cached_tokens = int(delivery.cached_tokens[i])
            answer.scores[sequence] = float(delivery.scores[i])
            have = answer.tokens.setdefault(sequence, [])
            offset = int(delivery.offsets[i])
            assert offset <= len(have), f"request {handle}: tokens {len(have)}..{offset} are missing"
            known = have[offset : offset + count]
            assert known == tokens[: len(known)], f"request {handle}: {tokens} differ from {known}"
            have.extend(tokens[len(known) :])
            answer.logprobs.setdefault(sequence, []).extend(v for v in logprobs[len(known) :] if v is not None)
            finish = FinishReason(int(delivery.finishes[i]))
            if finish is not FinishReason.NOT_FINISHED:
                answer.finishes[sequence] = finish
        assert start == len(delivery.token_ids)
        for failure in delivery.failures:
            if failure.handle in self.answers:
                self.answers[failure.handle].failure = failure


class WorkerPeer:
    """A fake worker at the end of a connection. Plans wait until the test lets it ``step``."""

    def __init__(self, simulation: Simulation, hello: WorkerHello) -> None:
        self.simulation = simulation
        self.worker = FakeWorker(hello)
        self.peer = Peer("backend", hello.identity.encode())
        self.plans: deque[IterationPlan] = deque()
        self.incoming = Incoming()
        self.welcomes = 0
        self.sent = 0
        self.leaving = False
        self.dismissed: str | None = None

    def hello(self) -> None:
        self.simulation.receive(self.peer, self.worker.hello)

    def take(self, message: Message) -> None:
        match message:
            case WorkerWelcome():
                self.welcomes += 1
                self.plans.clear()
                self.incoming.begin(message.epoch)
                self.sent = 0
                self.worker.begin(message)
            case IterationPlan():
                match self.incoming.accept(message.epoch, message.iteration):
                    case Verdict.APPLY:
                        self.plans.append(message)
                    case Verdict.BROKEN:
                        self.simulation.outbox.append((self.peer, Resync(message.epoch, "gap")))
            case Heartbeat():
                if self.incoming.check_heartbeat(message.epoch, message.sent) is Verdict.BROKEN:
                    self.simulation.outbox.append((self.peer, Resync(message.epoch, "lost")))
            case HelloRequest():
                self.simulation.outbox.append((self.peer, self.worker.hello))
            case WorkerDismissed():
                self.dismissed = message.reason
                self.plans.clear()
                self.simulation.kill(self)
            case _:
                raise AssertionError(f"a worker got {message}")

    def result(self) -> IterationResult | None:
        """Carry out the next plan, without sending its result."""
        return self.worker.execute(self.plans.popleft()) if self.plans else None

    def step(self) -> bool:
        """Carry out the next plan and send its result; whether there was one. Tells of grammars that are compiled."""
        result = self.result()
        compiled = self.worker.compiled()
        for message in compiled:
            self.simulation.receive(self.peer, message)
        if result is None:
            return bool(compiled)
        self.sent = result.iteration
        self.simulation.receive(self.peer, result)
        return True

    def leave(self) -> None:
        """SIGTERM: it goes on working until it is dismissed."""
        self.leaving = True
        self.simulation.receive(self.peer, WorkerLeaving(self.worker.hello.identity))

    def heartbeat(self) -> None:
        epoch = self.worker.epoch
        self.simulation.receive(self.peer, Heartbeat(epoch, self.sent, self.incoming.received))


class Simulation:
    """Owns the core and its peers. Invariants are checked after every event."""

    def __init__(self, **config: object) -> None:
        defaults: dict[str, object] = {"check_invariants": True}
        self.core = SchedulerCore(CoreConfig(**(defaults | config)), incarnation=1)  # type: ignore[arg-type]
        self.now = 0.0
        self.gateways: dict[Peer, FakeGateway] = {}
        self.workers: dict[Peer, WorkerPeer] = {}
        self.outbox: deque[tuple[Peer, Message]] = deque()
        self.logs: list[Log] = []
        self.stopped = False
        self.events = 0
        self.gone: set[Peer] = set()

    def add_gateway(self, name: str = "g") -> FakeGateway:
        gateway = FakeGateway(self, name)
        self.gateways[gateway.peer] = gateway
        gateway.hello()
        return gateway

    def add_worker(self, identity: str = "w", **changes: object) -> WorkerPeer:
        worker = WorkerPeer(self, worker_hello(identity, **changes))
        self.workers[worker.peer] = worker
        worker.hello()
        return worker

    def kill(self, worker: WorkerPeer) -> None:
        """The process dies: its connection is gone from the next send on."""
        del self.workers[worker.peer]
        self.gone.add(worker.peer)

    def receive(self, peer: Peer, message: Message) -> None:
        self.outbox.append((peer, message))
        while self.outbox:
            sender, queued = self.outbox.popleft()
            self.handle(Received(self.now, sender, queued))

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.handle(Tick(self.now))
        while self.outbox:
            sender, queued = self.outbox.popleft()
            self.handle(Received(self.now, sender, queued))

    def handle(self, event: Event) -> None:
        failed: list[Peer] = []
        self.events += 1
        for action in self.core.handle(event):
            self._act(action, failed)
        for peer in failed:
            self.handle(SendFailed(self.now, peer))

    def _act(self, action: Action, failed: list[Peer]) -> None:
        match action:
            case Log():
                self.logs.append(action)
            case Stop():
                self.stopped = True
            case Send():
                message = decode(encode(action.message))  # what the wire would make of it
                target = self.gateways.get(action.peer) or self.workers.get(action.peer)
                if target is not None:
                    target.take(message)
                elif action.peer not in failed:
                    failed.append(action.peer)

    def run(self, steps: int = 10_000) -> int:
        """Let everybody work until nothing is left to do; the number of rounds. Fails after ``steps`` rounds."""
        for round_ in range(steps):
            self.tick()
            stepped = [worker.step() for worker in list(self.workers.values())]
            if not any(stepped):
                return round_
        raise AssertionError(f"still busy after {steps} rounds")

    def beat(self, seconds: float = 0.5, silent: Collection[Peer] = ()) -> None:
        """Time passes, with heartbeats from everybody but ``silent``."""
        self.now += seconds
        for peer in [*self.gateways.values(), *self.workers.values()]:
            if peer.peer not in silent:
                peer.heartbeat()
        self.tick()

    @property
    def state(self) -> State:
        """What the core knows, to be looked at."""
        return self.core._state

    def snapshot(self) -> dict[str, object]:
        return self.core.snapshot(self.now)

    def assert_free(self) -> None:
        """FREE: when idle, every block is free and nothing is known of any request."""
        snapshot = self.snapshot()
        for worker in snapshot["workers"]:  # type: ignore[attr-defined]
            assert worker["blocks"]["free"] == worker["blocks"]["total"], worker
            assert worker["swap_blocks"]["free"] == worker["swap_blocks"]["total"], worker
            assert worker["running_sequences"] == 0
        assert snapshot["requests"] == []
