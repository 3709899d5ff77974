"""A worker process without a model: the real shell around a FakeWorker whose steps take a given time.

python -m pagemill_testing.worker_process ENDPOINT IDENTITY STEP_SECONDS PEER_TIMEOUT [CURVE_DIR]
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from pagemill_shared.channel import DealerChannel
from pagemill_shared.curve import load_client_keys
from pagemill_shared.link import PeerLink
from pagemill_shared.logs import configure_logging
from pagemill_shared.messages import GrammarCompiled, IterationPlan, IterationResult, WorkerWelcome
from pagemill_shared.wakeup import Wakeup
from pagemill_testing.fake_worker import FakeWorker, worker_hello
from pagemill_worker.shell import Shell


class PacedWorker:
    """A FakeWorker whose plans take a while, as a model's would."""

    def __init__(self, worker: FakeWorker, step_seconds: float) -> None:
        self._worker, self._step_seconds = worker, step_seconds
        self.announce: Callable[[GrammarCompiled], None] = lambda message: None

    def begin(self, welcome: WorkerWelcome) -> None:
        self._worker.begin(welcome)

    def execute(self, plan: IterationPlan) -> IterationResult:
        time.sleep(self._step_seconds)
        result = self._worker.execute(plan)
        for message in self._worker.compiled():
            self.announce(message)
        return result


def main(endpoint: str, identity: str, step_seconds: str, peer_timeout: str, curve_dir: str = "") -> None:
    configure_logging(identity, "info", "console")
    hello = worker_hello(identity)
    with zmq.Context() as context:
        keys = load_client_keys(Path(curve_dir)) if curve_dir else None
        channel = DealerChannel(context, "backend", endpoint, keys=keys)
        link = PeerLink(hello, heartbeat_interval=0.05, peer_timeout=float(peer_timeout))
        runner = PacedWorker(FakeWorker(hello), float(step_seconds))
        shell = Shell(runner, channel, Wakeup(), link, shutdown_grace=30.0)
        signal.signal(signal.SIGTERM, lambda *_: shell.request_stop())
        try:
            shell.run()
        finally:
            channel.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
