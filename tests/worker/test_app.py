"""The worker process from settings to exit status, with a stub in place of the model."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq
from pagemill_testing.fake_worker import worker_hello
from pagemill_testing.sockets import PATIENCE, ipc_folder, wait_until
from structlog.testing import capture_logs

from pagemill_shared.channel import RouterChannel
from pagemill_shared.curve import generate_keys
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.messages import (
    IterationPlan,
    IterationResult,
    WorkerDismissed,
    WorkerHello,
    WorkerLeaving,
    WorkerWelcome,
)
from pagemill_shared.schema import Message
from pagemill_shared.settings import WorkerSettings
from pagemill_worker import app

Report = Callable[[str, float | None], None]
Answer = Callable[[Message], list[Message]]


class StubRunner:
    def begin(self, welcome: WorkerWelcome) -> None:
        pass

    def execute(self, plan: IterationPlan) -> IterationResult:
        if plan.iteration == 2:
            raise RuntimeError("out of device memory")
        return IterationResult(plan.epoch, plan.iteration, np.zeros(0, np.int32))


def load_stub(settings: WorkerSettings, report: Report) -> tuple[StubRunner, WorkerHello]:
    report("loading", None)
    return StubRunner(), worker_hello("w")


@pytest.fixture(autouse=True)
def _process_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(app, "load_worker", load_stub)
    monkeypatch.setattr(app, "configure_logging", lambda *_: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextmanager
def scheduler(answer: Answer) -> Iterator[str]:
    """A scheduler in a thread that answers each message by a rule; its endpoint."""
    with ipc_folder() as folder, zmq.Context() as context:
        channel = RouterChannel(context, "backend", f"ipc://{folder}/s", keys=None, allow_insecure_bind=False)
        done = threading.Event()

        def serve() -> None:
            while not done.is_set():
                channel.socket.poll(10)
                for route, message in channel.receive(10):
                    for reply in answer(message):
                        channel.send(route, reply)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield channel.endpoint
        finally:
            done.set()
            thread.join(PATIENCE)
            channel.socket.linger = 0
            channel.close()


def settings(backend: str, **values: object) -> WorkerSettings:
    defaults: dict[str, object] = {"heartbeat_interval": 0.02, "peer_timeout": PATIENCE, "shutdown_grace": PATIENCE}
    return WorkerSettings(backend=backend, **(defaults | values))  # type: ignore[arg-type]


def test_sigterm_leaves_in_good_order_with_status_0() -> None:
    seen: list[Message] = []

    def answer(message: Message) -> list[Message]:
        seen.append(message)
        match message:
            case WorkerHello():
                return [WorkerWelcome(10, 4, 64), IterationPlan(10, 1)]
            case IterationResult():
                os.kill(os.getpid(), signal.SIGTERM)
            case WorkerLeaving():
                return [WorkerDismissed("its work has moved")]
        return []

    with scheduler(answer) as endpoint:
        assert app.run(settings(endpoint)) == 0
    assert WorkerLeaving("w") in seen


def test_a_failing_runner_is_logged_and_gives_status_1() -> None:
    def answer(message: Message) -> list[Message]:
        if isinstance(message, WorkerHello):
            return [WorkerWelcome(10, 4, 64), IterationPlan(10, 1), IterationPlan(10, 2)]
        return []

    with capture_logs() as logs, scheduler(answer) as endpoint:
        assert app.run(settings(endpoint)) == 1
    [line] = [line for line in logs if line["log_level"] == "error"]
    assert line["event"] == "the worker failed; ending"
    assert line["exc_info"]


def test_a_refusal_is_the_operators_business() -> None:
    def answer(message: Message) -> list[Message]:
        return [WorkerDismissed("model fingerprint a differs from b")] if isinstance(message, WorkerHello) else []

    with scheduler(answer) as endpoint, pytest.raises(ConfigurationError, match="fingerprint a differs from b"):
        app.run(settings(endpoint))


def test_keys_are_read_before_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("loaded a model in vain")

    monkeypatch.setattr(app, "load_worker", refuse)
    with pytest.raises(ConfigurationError, match="CURVE key"):
        app.run(settings("ipc:///nowhere", curve_dir=tmp_path))


def test_sigterm_while_loading_ends_with_status_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def told_to_stop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: False)

    monkeypatch.setattr(app, "load_worker", told_to_stop)
    with pytest.raises(SystemExit) as ending:
        app.run(settings("ipc:///nowhere"))
    assert ending.value.code == 0


def test_keys_are_used(tmp_path: Path) -> None:
    generate_keys(tmp_path)
    seen: list[Message] = []

    def answer(message: Message) -> list[Message]:
        seen.append(message)
        return []

    with capture_logs() as logs, scheduler(answer) as endpoint:
        threading.Thread(
            target=lambda: (
                wait_until(lambda: [line for line in logs if "no scheduler answers" in line["event"]]),
                os.kill(os.getpid(), signal.SIGTERM),
            )
        ).start()
        assert app.run(settings(endpoint, curve_dir=tmp_path, peer_timeout=0.2)) == 0
    assert seen == [], "a worker with keys must not talk to a scheduler without"


def test_loading_is_logged_by_steps_and_tenths() -> None:
    with capture_logs() as logs:
        report = app.progress_log(app.structlog.get_logger("x"))
        report("fetching", None)
        report("fetching", None)
        for percent in range(101):
            report("converting", percent / 100)
    assert [line["event"] for line in logs] == ["fetching"] + ["converting"] * 11
    assert [line["done"] for line in logs[1:]] == [f"{tenth} %" for tenth in range(0, 101, 10)]
