"""A scheduler without workers: speaks the wire protocol over a real socket and replays scripted token ids."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import zmq

from pagemill_shared.channel import RouterChannel
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
    PromptReport,
    RequestFailure,
    Resync,
    SequenceFinished,
    StateQuery,
    StateReport,
    SubmitRequest,
    TokenLogprobs,
)
from pagemill_shared.numbering import Incoming, Outgoing, Verdict
from pagemill_shared.schema import Message
from pagemill_testing.scripts import Row, Running, Script, prompt_report
from pagemill_testing.sockets import PATIENCE

T = TypeVar("T")

_HEARTBEAT_S = 0.1


@dataclass
class Gateway:
    identity: str
    outgoing: Outgoing = field(default_factory=Outgoing)
    incoming: Incoming = field(default_factory=Incoming)
    running: dict[int, Running] = field(default_factory=dict)


class StubScheduler:
    """Runs in a thread while it is used as a context. What :meth:`wait_for` waits for is looked at between two of its
    steps, so that what it has recorded of a message is whole.

    Args:
        endpoint: where gateways connect, ``ipc://…``.
        fleet: what it says of its workers.
        answer: the script of a request; ``script`` is another way to say it.
        interval: seconds between deliveries, 0 for as fast as it can.
    """

    def __init__(
        self,
        endpoint: str,
        fleet: FleetStatus,
        answer: Callable[[SubmitRequest], Script] | None = None,
        incarnation: int = 1,
        interval: float = 0.0,
    ) -> None:
        self.endpoint = endpoint
        self.fleet = fleet
        self.answer = answer or (lambda _: self.script)
        self.script = Script()
        self.incarnation = incarnation
        self.interval = interval
        self.held = False
        """Whether deliveries wait."""
        self.cached_tokens = 0
        """What it says was found in the prefix cache, of every request."""
        self.state: dict[str, Any] = {"metrics": {"num_requests_running": 0}, "workers": [], "requests": []}
        self.submitted: list[SubmitRequest] = []
        self.aborted: list[int] = []
        """Of those that were submitted, as all that is recorded: what comes late of earlier ones is passed over."""
        self.finished: list[tuple[int, int, int]] = []
        """(handle, sequence, tokens kept) of each sequence that the gateway ended."""
        self.synced: list[list[int]] = []
        self.gateways: dict[bytes, Gateway] = {}
        self._epochs = incarnation << 32
        self._drop_next = 0
        self._silent = False
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="stub scheduler", daemon=True)

    # ------------------------------------------------------------ for tests

    def __enter__(self) -> StubScheduler:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel = RouterChannel(self._context, "frontend", self.endpoint, keys=None, allow_insecure_bind=False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join(PATIENCE)
        self._channel.close()
        self._context.destroy(linger=0)

    def wait_for(self, condition: Callable[[], T], timeout: float = PATIENCE) -> T:
        """The first true value of ``condition``; fails when there is none in time."""
        deadline = time.monotonic() + timeout
        while not (value := self._call(condition)):
            assert time.monotonic() < deadline, "the stub scheduler waited in vain"
            time.sleep(0.002)
        return value

    def replay(self, token_ids: Sequence[int], finish: FinishReason = FinishReason.LENGTH, **options: Any) -> None:
        """Answers requests with these tokens from now on. Waits until nothing runs, and forgets what was recorded."""
        self.wait_for(lambda: not self.running)
        self._call(lambda: self._begin(Script(list(token_ids), finish, **options)))

    def _begin(self, script: Script) -> None:
        self.script = script
        self.submitted, self.aborted, self.finished, self.synced = [], [], [], []

    def fall_silent(self) -> None:
        """From now on it reads nothing and says nothing, like a stopped process."""
        self._call(lambda: setattr(self, "_silent", True))

    def speak_again(self) -> None:
        self._call(lambda: setattr(self, "_silent", False))

    def deliver_once(self) -> None:
        """One delivery while the others are held."""
        self._call(lambda: [self._deliver(route, gateway) for route, gateway in self.gateways.items()])

    def go_on(self, token_ids: Sequence[int], finish: FinishReason = FinishReason.LENGTH) -> None:
        """Running requests that were left open get these tokens, too, and then end like this."""
        self._call(lambda: self._go_on(list(token_ids), finish))

    def set_fleet(self, fleet: FleetStatus) -> None:
        self._call(lambda: self._push_fleet(fleet))

    def fail(self, code: str, message: str, param: str = "") -> None:
        """Ends every running request with an error."""
        self._call(lambda: self._fail_all((code, message, param)))

    def lose_next_delivery(self) -> None:
        """The next delivery gets a number but is never sent."""
        self._call(lambda: setattr(self, "_drop_next", 1))

    def begin_epoch(self) -> None:
        """Welcomes every gateway anew, as after a broken epoch."""
        self._call(lambda: [self._welcome(route, gateway) for route, gateway in self.gateways.items()])

    @property
    def running(self) -> int:
        return sum(len(gateway.running) for gateway in list(self.gateways.values()))

    # ------------------------------------------------------------ the thread

    def _call(self, work: Callable[[], T]) -> T:
        """What ``work`` gives in the thread, between two steps."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._calls.put(run)
        return done.result(PATIENCE)

    def _run(self) -> None:
        poller = zmq.Poller()
        self._channel.register(poller)
        heartbeat = delivery = time.monotonic()
        while not self._stop:
            busy = self.running and not self.held and not self._silent
            poller.poll((self.interval * 1000 if self.interval else 0) if busy else 5)
            while not self._calls.empty():
                self._calls.get()()
            if self._silent:
                time.sleep(0.005)
                continue
            for route, message in self._channel.receive(1000):
                self._receive(route, message)
            self._channel.broken()
            now = time.monotonic()
            if now - heartbeat > _HEARTBEAT_S:
                heartbeat = now
                for route, gateway in self.gateways.items():
                    self._send(
                        route, Heartbeat(gateway.outgoing.epoch, gateway.outgoing.sent, gateway.incoming.received)
                    )
            if not self.held and now - delivery >= self.interval:
                delivery = now
                for route, gateway in self.gateways.items():
                    self._deliver(route, gateway)

    def _receive(self, route: bytes, message: Message) -> None:
        gateway = self.gateways.get(route)
        if isinstance(message, GatewayHello):
            known = [r for r, g in self.gateways.items() if g.identity == message.identity]
            gateway = self.gateways.pop(known[0]) if known else Gateway(message.identity)
            self.gateways[route] = gateway
            self._welcome(route, gateway)
        elif gateway is None:
            self._send(route, HelloRequest())
        elif isinstance(message, Resync):
            self._welcome(route, gateway)
        elif isinstance(message, Heartbeat):
            if gateway.incoming.check_heartbeat(message.epoch, message.sent) is Verdict.BROKEN:
                self._welcome(route, gateway)
        elif isinstance(message, StateQuery):
            self._send(route, StateReport(message.query, json.dumps(self.state).encode()))
        elif isinstance(message, GatewaySync | SubmitRequest | AbortRequest | SequenceFinished):
            verdict = gateway.incoming.accept(message.epoch, message.number)
            if verdict is Verdict.APPLY:
                self._apply(gateway, message)
            elif verdict is Verdict.BROKEN:
                self._welcome(route, gateway)

    def _apply(self, gateway: Gateway, message: Message) -> None:
        match message:
            case GatewaySync(handles=handles):
                self.synced.append(handles.tolist())
                for handle in gateway.running.keys() - set(handles.tolist()):
                    self.aborted.append(handle)
                    del gateway.running[handle]
            case SubmitRequest(handle=handle):
                if handle not in gateway.running:
                    gateway.running[handle] = Running(message, self.answer(message))
                    self.submitted.append(message)
            case AbortRequest(handle=handle) if self._recorded(handle):
                self.aborted.append(handle)
                gateway.running.pop(handle, None)
            case SequenceFinished(handle=handle, sequence=sequence, tokens_kept=kept) if self._recorded(handle):
                self.finished.append((handle, sequence, kept))
                running = gateway.running.get(handle)
                if running is not None:
                    running.open.discard(sequence)
                    if not running.open:
                        del gateway.running[handle]

    def _recorded(self, handle: int) -> bool:
        return any(submit.handle == handle for submit in self.submitted)

    def _welcome(self, route: bytes, gateway: Gateway) -> None:
        self._epochs += 1
        gateway.outgoing.begin(self._epochs)
        gateway.incoming.begin(self._epochs)
        for running in gateway.running.values():
            running.rewind()
        self._send(route, GatewayWelcome(self._epochs, self.incarnation))
        self._send(route, self.fleet)

    def _deliver(self, route: bytes, gateway: Gateway) -> None:
        rows: list[Row] = []
        tokens: list[int] = []
        packed: list[tuple[int, list[int], list[float]]] = []
        failures = []
        reports = []
        for handle, running in list(gateway.running.items()):
            script = running.script
            if script.failure is not None:
                failures.append(RequestFailure(handle, *script.failure))
                del gateway.running[handle]
                continue
            if not running.reported:
                running.reported = True
                reports.append(prompt_report(running.submit))
            for sequence in sorted(running.open):
                found = running.next_row(sequence)
                if found is None:
                    continue
                row, new = found
                if script.logprobs is not None and running.submit.sampling.logprobs is not None:
                    packed += [(len(tokens) + i, *script.logprobs(token)) for i, token in enumerate(new)]
                rows.append(row)
                tokens += new
            if not running.open:
                del gateway.running[handle]
        if rows or failures:
            self._send_delivery(route, gateway, rows, tokens, packed, failures, reports)

    def _send_delivery(
        self,
        route: bytes,
        gateway: Gateway,
        rows: list[Row],
        tokens: list[int],
        packed: list[tuple[int, list[int], list[float]]],
        failures: list[RequestFailure],
        reports: list[PromptReport],
    ) -> None:
        columns = np.array([[r.handle, r.sequence, r.offset, r.count, r.finish] for r in rows], np.int32).reshape(-1, 5)
        delivery = Delivery(
            gateway.outgoing.epoch,
            gateway.outgoing.next(),
            handles=columns[:, 0],
            sequences=columns[:, 1],
            offsets=columns[:, 2],
            counts=columns[:, 3],
            finishes=columns[:, 4],
            cached_tokens=np.full(len(rows), self.cached_tokens, np.int32),
            scores=np.array([r.score for r in rows], np.float32),
            token_ids=np.array(tokens, np.int32),
            logprobs=TokenLogprobs(
                rows=np.array([row for row, _, _ in packed], np.int32),
                counts=np.array([len(ids) for _, ids, _ in packed], np.int32),
                ranks=np.ones(len(packed), np.int32),
                token_ids=np.array([i for _, ids, _ in packed for i in ids], np.int32),
                values=np.array([v for _, _, values in packed for v in values], np.float32),
            ),
            failures=tuple(failures),
            reports=tuple(reports),
        )
        if self._drop_next:
            self._drop_next = 0
        else:
            self._send(route, delivery)

    def _go_on(self, token_ids: list[int], finish: FinishReason) -> None:
        for gateway in self.gateways.values():
            for running in gateway.running.values():
                output = [*running.script.token_ids, *token_ids]
                running.script = replace(running.script, token_ids=output, finish=finish)

    def _push_fleet(self, fleet: FleetStatus) -> None:
        self.fleet = fleet
        for route in self.gateways:
            self._send(route, fleet)

    def _fail_all(self, failure: tuple[str, str, str]) -> None:
        for route, gateway in self.gateways.items():
            failures = [RequestFailure(handle, *failure) for handle in gateway.running]
            gateway.running.clear()
            if failures:
                self._send_delivery(route, gateway, [], [], [], failures, [])

    def _send(self, route: bytes, message: Message) -> None:
        self._channel.send(route, message)
