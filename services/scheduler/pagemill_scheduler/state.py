"""All that the scheduler knows. Written only by the core and the modules that it calls, between two events never."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from pagemill_scheduler.config import CoreConfig
from pagemill_scheduler.end_tokens import EndTokens
from pagemill_scheduler.events import Action, Log, Peer, Send
from pagemill_scheduler.gateway import GatewayState
from pagemill_scheduler.request import Request, Sequence
from pagemill_scheduler.waiting import WaitingQueue
from pagemill_scheduler.worker import WorkerState
from pagemill_shared.messages import FleetStatus
from pagemill_shared.schema import Int32Array, Message


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    copied_blocks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    requests_finished: int = 0
    requests_failed: int = 0
    requests_aborted: int = 0
    workers_lost: int = 0
    resyncs: int = 0
    ignored_messages: int = 0


@dataclass(slots=True)
class State:
    """
    Attributes:
        peers: who speaks on which connection.
        fleet_changed: the set of workers has changed since it was last checked that some worker can hold what waits.
        no_worker_since: since when no worker is ready, None while one is.
        actions: what the current event has led to so far.
    """

    config: CoreConfig
    incarnation: int
    gateways: dict[str, GatewayState] = field(default_factory=dict)
    workers: dict[str, WorkerState] = field(default_factory=dict)
    peers: dict[Peer, GatewayState | WorkerState] = field(default_factory=dict)
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    counters: Counters = field(default_factory=Counters)
    fleet: FleetStatus = field(default_factory=lambda: FleetStatus(0, 0, 0, ""))
    fleet_changed: bool = False
    no_worker_since: float | None = 0.0
    stopping: bool = False
    actions: list[Action] = field(default_factory=list)
    end_tokens: EndTokens = field(default_factory=EndTokens)
    _epochs: int = 0
    _arrivals: int = 0
    _gateways: int = 0

    def next_epoch(self) -> int:
        self._epochs += 1
        return (self.incarnation << 24) + self._epochs

    def next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def next_gateway_index(self) -> int:
        self._gateways += 1
        return self._gateways

    def ready_workers(self) -> list[WorkerState]:
        return [worker for worker in self.workers.values() if not worker.leaving]

    def requests(self) -> Iterator[Request]:
        """Every live request."""
        for gateway in self.gateways.values():
            yield from gateway.requests.values()

    def send(self, peer: Peer, message: Message) -> None:
        self.actions.append(Send(peer, message))

    def log(self, level: Literal["debug", "info", "warning", "error"], event: str, **fields: object) -> None:
        self.actions.append(Log(level, event, fields))

    def tokens_of(self, sequence: Sequence) -> Int32Array:
        """[L] the sequence's tokens, wherever they live now."""
        if sequence.slot >= 0:
            table = self.workers[sequence.request.worker].table
            if not table.is_idle(sequence.slot):
                return table.tokens_of(sequence.slot)
        return sequence.tokens
