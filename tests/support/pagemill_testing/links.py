"""The connecting side of the protocol, before and after it was welcomed."""

from __future__ import annotations

import numpy as np

from pagemill_shared.link import PeerLink
from pagemill_shared.messages import (
    GatewayHello,
    IterationResult,
    WorkerHello,
    WorkerWelcome,
)

INTERVAL, TIMEOUT = 0.5, 3.0
WORKER = WorkerHello("w", "f", "m", "cpu", "float32", "torch", 100, 100, 16, 8, 0, 1024, 1.0, 1.0)
GATEWAY = GatewayHello("g", "f")


def worker_link() -> PeerLink:
    return PeerLink(WORKER, heartbeat_interval=INTERVAL, peer_timeout=TIMEOUT)


def gateway_link() -> PeerLink:
    return PeerLink(GATEWAY, heartbeat_interval=INTERVAL, peer_timeout=TIMEOUT)


def welcomed_worker(epoch: int = 10, now: float = 0.0) -> PeerLink:
    link = worker_link()
    assert link.tick(now) == [WORKER]
    assert link.received(now, WorkerWelcome(epoch, 4, 64)).apply
    return link


def result(epoch: int, iteration: int) -> IterationResult:
    return IterationResult(epoch, iteration, np.zeros(0, np.int32))
