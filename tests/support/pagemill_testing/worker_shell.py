"""A worker's shell in a thread, between a stub runner and a stub scheduler that a test speaks through."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import zmq

from pagemill_shared.channel import Context, DealerChannel, RouterChannel
from pagemill_shared.link import PeerLink
from pagemill_shared.messages import (
    GrammarCompiled,
    Heartbeat,
    IterationPlan,
    IterationResult,
    WorkerHello,
    WorkerWelcome,
)
from pagemill_shared.schema import Message
from pagemill_shared.wakeup import Wakeup
from pagemill_testing.fake_worker import worker_hello
from pagemill_testing.sockets import PATIENCE, ipc_folder, wait_until
from pagemill_worker.shell import Shell

M = TypeVar("M", bound=Message)
HELLO = worker_hello("worker-1")
INTERVAL = 0.02


class StubRunner:
    """Remembers what it was given. A plan waits for ``gate``; ``fault`` is raised instead of a result."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.executed: list[tuple[int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Exception | None = None
        self.thread: threading.Thread | None = None
        self.announce: Callable[[GrammarCompiled], None] = lambda message: None

    def begin(self, welcome: WorkerWelcome) -> None:
        self.begun.append(welcome.epoch)

    def execute(self, plan: IterationPlan) -> IterationResult:
        self.thread = threading.current_thread()
        self.executed.append((plan.epoch, plan.iteration))
        assert self.gate.wait(PATIENCE)
        if self.fault is not None:
            raise self.fault
        return IterationResult(plan.epoch, plan.iteration, np.array([plan.iteration], np.int32), forward_us=5)


class StubScheduler:
    """A bound ROUTER that a test speaks through. ``expect`` passes over heartbeats unless they are asked for, and over
    what else is in ``passed_over``."""

    def __init__(self, context: Context, endpoint: str) -> None:
        self.channel = RouterChannel(context, "backend", endpoint, keys=None, allow_insecure_bind=False)
        self.channel.socket.linger = 0
        self.route = b""
        self.passed_over: tuple[type[Message], ...] = (Heartbeat,)
        self._queue: list[Message] = []

    def expect(self, kind: type[M]) -> M:
        """The next message, which must be a ``kind`` (after any that are passed over)."""
        while True:
            wait_until(self._fill, self.channel.socket, what=kind.__name__)
            message = self._queue.pop(0)
            if isinstance(message, kind):
                return message
            assert isinstance(message, self.passed_over), message

    def nothing_but_heartbeats(self, count: int) -> list[Heartbeat]:
        return [self.expect(Heartbeat) for _ in range(count)]

    def heartbeat_of(self, epoch: int, sent: int, received: int) -> Heartbeat:
        """The next that says so; those before were on their way already."""
        wanted = Heartbeat(epoch, sent, received)
        wait_until(lambda: self.expect(Heartbeat) == wanted, what=str(wanted))
        return wanted

    def send(self, *messages: Message) -> None:
        for message in messages:
            assert self.channel.send(self.route, message)

    def welcome(self, epoch: int) -> None:
        self.expect(WorkerHello)
        self.send(WorkerWelcome(epoch, 4, 64))

    def _fill(self) -> bool:
        for route, message in self.channel.receive(100):
            self.route = route
            self._queue.append(message)
        return bool(self._queue)


class Running:
    """A worker shell in a thread of its own, and the stub scheduler that it finds."""

    def __init__(self, stack: ExitStack, folder: Path, grace: float, peer_timeout: float) -> None:
        self._stack = stack
        self.context: Context = stack.enter_context(zmq.Context())
        self.endpoint = f"ipc://{folder}/backend"
        self.runner = StubRunner()
        self.channel = DealerChannel(self.context, "backend", self.endpoint, keys=None)
        self.channel.socket.linger = 0
        wakeup = Wakeup()
        stack.callback(wakeup.close)
        link = PeerLink(HELLO, heartbeat_interval=INTERVAL, peer_timeout=peer_timeout)
        self.shell = Shell(self.runner, self.channel, wakeup, link, shutdown_grace=grace)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        stack.callback(self._end)

    def scheduler(self) -> StubScheduler:
        scheduler = StubScheduler(self.context, self.endpoint)
        self._stack.callback(scheduler.channel.close)
        return scheduler

    def _run(self) -> None:
        try:
            self.shell.run()
        except BaseException as error:
            self.error = error
        finally:
            self.channel.close()  # as the process would

    def _end(self) -> None:
        self.runner.gate.set()
        self.shell._shutdown_grace = 0.0
        self.shell.request_stop()
        self.join()

    def join(self) -> None:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@contextmanager
def running(*, grace: float = 600.0, peer_timeout: float = 600.0) -> Iterator[Running]:
    with ipc_folder() as folder, ExitStack() as stack:
        yield Running(stack, folder, grace, peer_timeout)
