"""The worker's two threads against a stub scheduler over a real socket, with a stub runner."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from pagemill_testing.sockets import wait_until
from pagemill_testing.worker_shell import HELLO, INTERVAL, running
from structlog.testing import capture_logs

from pagemill_shared.errors import ConfigurationError
from pagemill_shared.messages import (
    Delivery,
    GatewayWelcome,
    GrammarCompiled,
    Heartbeat,
    HelloRequest,
    IterationPlan,
    IterationResult,
    Resync,
    WorkerDismissed,
    WorkerHello,
    WorkerLeaving,
    WorkerWelcome,
)

SOON = 0.2
"""A time after which a worker may count its scheduler as lost. Elsewhere it never does, however slow this process."""


# ---------------------------------------------------------------- plans and results


def test_hello_welcome_plans_results() -> None:
    with running() as run:
        scheduler = run.scheduler()
        assert scheduler.expect(WorkerHello) == HELLO
        scheduler.send(WorkerWelcome(10, 4, 64), IterationPlan(10, 1), IterationPlan(10, 2))
        first, second = scheduler.expect(IterationResult), scheduler.expect(IterationResult)
        assert (first.epoch, first.iteration, second.iteration) == (10, 1, 2)
        assert (first.token_ids.tolist(), first.forward_us) == ([1], 5)
        assert run.runner.begun == [10]
        assert run.runner.thread is run.thread


def test_what_the_runner_announces_is_sent_between_results_and_only_in_its_epoch() -> None:
    with running() as run:
        scheduler = run.scheduler()
        scheduler.welcome(10)
        wait_until(lambda: run.runner.begun)
        run.runner.announce(GrammarCompiled(9, 1, 2))
        run.runner.announce(GrammarCompiled(10, 1, 2, "broken"))
        assert scheduler.expect(GrammarCompiled) == GrammarCompiled(10, 1, 2, "broken")
        scheduler.send(IterationPlan(10, 1))
        assert scheduler.expect(IterationResult).iteration == 1


def test_a_result_says_how_long_its_plan_was_waited_for() -> None:
    with running() as run:
        scheduler = run.scheduler()
        scheduler.welcome(10)
        wait_until(lambda: run.runner.begun)
        scheduler.heartbeat_of(10, 0, 0)
        scheduler.nothing_but_heartbeats(3)
        scheduler.send(IterationPlan(10, 1))
        assert scheduler.expect(IterationResult).wait_us >= INTERVAL * 1e6


def test_heartbeats_go_on_while_a_plan_is_carried_out_and_count_what_came_and_went() -> None:
    with running() as run:
        scheduler = run.scheduler()
        scheduler.welcome(10)
        run.runner.gate.clear()
        scheduler.send(IterationPlan(10, 1), IterationPlan(10, 2))
        wait_until(lambda: run.runner.executed)
        beat = scheduler.heartbeat_of(10, 0, 2)
        assert scheduler.nothing_but_heartbeats(5) == [beat] * 5
        run.runner.gate.set()
        scheduler.expect(IterationResult)
        scheduler.expect(IterationResult)
        beat = scheduler.nothing_but_heartbeats(2)[-1]
        assert (beat.epoch, beat.sent, beat.received) == (10, 2, 2)


# ---------------------------------------------------------------- epochs


def test_a_new_welcome_discards_what_was_planned_before() -> None:
    with running() as run:
        scheduler = run.scheduler()
        scheduler.welcome(10)
        run.runner.gate.clear()
        scheduler.send(IterationPlan(10, 1), IterationPlan(10, 2))
        wait_until(lambda: run.runner.executed)
        scheduler.send(WorkerWelcome(11, 4, 64), IterationPlan(11, 1))
        wait_until(lambda: scheduler.expect(Heartbeat).epoch == 11)
        run.runner.gate.set()
        answer = scheduler.expect(IterationResult)
        assert (answer.epoch, answer.iteration) == (11, 1)
        assert run.runner.begun == [10, 11]
        assert run.runner.executed == [(10, 1), (11, 1)]


def test_a_plan_out_of_turn_is_not_carried_out() -> None:
    with running() as run:
        scheduler = run.scheduler()
        scheduler.welcome(10)
        scheduler.send(IterationPlan(10, 1))
        scheduler.expect(IterationResult)
        scheduler.send(IterationPlan(10, 3), IterationPlan(10, 2), IterationPlan(10, 4))
        assert scheduler.expect(Resync).epoch == 10
        scheduler.send(WorkerWelcome(11, 4, 64), IterationPlan(11, 1))
        assert scheduler.expect(IterationResult).epoch == 11
        assert run.runner.executed == [(10, 1), (11, 1)]


# ---------------------------------------------------------------- the scheduler's ways


def test_a_worker_that_comes_first_says_so_and_waits_for_its_scheduler() -> None:
    with capture_logs() as logs, running(peer_timeout=SOON) as run:
        wait_until(lambda: [line for line in logs if line["event"] == "no scheduler answers; trying on"])
        scheduler = run.scheduler()
        scheduler.passed_over += (WorkerHello,)  # it is repeated when the welcome is late
        scheduler.welcome(10)
        scheduler.send(IterationPlan(10, 1))
        scheduler.expect(IterationResult)
    assert [line["endpoint"] for line in logs if line["event"].startswith("no scheduler")] == [run.endpoint]


def test_a_restarted_scheduler_is_joined_again() -> None:
    with running() as run:
        first = run.scheduler()
        first.welcome(10)
        first.send(IterationPlan(10, 1))
        first.expect(IterationResult)
        first.channel.close()
        second = run.scheduler()
        second.nothing_but_heartbeats(1)
        second.send(HelloRequest())
        second.welcome(3)
        second.send(IterationPlan(3, 1))
        assert second.expect(IterationResult).epoch == 3
        assert run.runner.begun == [10, 3]


def test_a_silent_scheduler_is_waited_for() -> None:
    with capture_logs() as logs, running(peer_timeout=SOON) as run:
        scheduler = run.scheduler()
        scheduler.passed_over += (WorkerHello,)  # it is repeated when the welcome is late
        scheduler.welcome(10)
        wait_until(lambda: run.runner.begun)
        wait_until(lambda: "the scheduler is silent; trying on" in [line["event"] for line in logs])
        scheduler.nothing_but_heartbeats(3)
        scheduler.send(IterationPlan(10, 1))  # it was only slow: the epoch goes on
        scheduler.expect(IterationResult)
        assert run.runner.begun == [10]
        assert run.thread.is_alive()


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def test_hostile_bytes_and_messages_for_others_are_counted_and_dropped(tmp_path: Path) -> None:
    hostile = [
        [pickle.dumps(Marker(tmp_path / "marker"))],
        [b""],
        [os.urandom(512)],
        [b"\x91" * 500_000],
        [b"x"] * 1000,
    ]
    with running() as run:
        scheduler = run.scheduler()
        scheduler.welcome(10)
        for parts in hostile:
            scheduler.channel.socket.send_multipart([scheduler.route, *parts])
        scheduler.send(GatewayWelcome(11, 1), Delivery(10, 1), HELLO)
        wait_until(lambda: run.channel.malformed == len(hostile) + 3)
        scheduler.send(IterationPlan(10, 1))
        scheduler.expect(IterationResult)
        assert run.runner.begun == [10]
    assert not (tmp_path / "marker").exists()


def test_a_refused_worker_ends_with_the_reason() -> None:
    with running() as run:
        scheduler = run.scheduler()
        scheduler.expect(WorkerHello)
        scheduler.send(WorkerDismissed("model fingerprint differs"))
        run.join()
        with pytest.raises(ConfigurationError, match="refuses this worker: model fingerprint differs"):
            raise run.error or AssertionError("it ended without an error")


# ---------------------------------------------------------------- the end


def test_a_leaving_worker_goes_on_until_it_is_dismissed() -> None:
    with running() as run:
        scheduler = run.scheduler()
        scheduler.welcome(10)
        scheduler.send(IterationPlan(10, 1))
        scheduler.expect(IterationResult)
        run.shell.request_stop()
        assert scheduler.expect(WorkerLeaving) == WorkerLeaving("worker-1")
        scheduler.send(IterationPlan(10, 2))
        assert scheduler.expect(IterationResult).iteration == 2
        assert run.thread.is_alive()
        scheduler.send(WorkerDismissed("its work has moved"))
        run.join()
        assert run.error is None


def test_leaving_is_said_at_once_even_during_a_plan_and_again_in_a_new_epoch() -> None:
    with running() as run:
        scheduler = run.scheduler()
        scheduler.welcome(10)
        run.runner.gate.clear()
        scheduler.send(IterationPlan(10, 1))
        wait_until(lambda: run.runner.executed)
        run.shell.request_stop()
        scheduler.expect(WorkerLeaving)
        scheduler.send(WorkerWelcome(11, 4, 64))
        scheduler.expect(WorkerLeaving)
        scheduler.send(WorkerDismissed(""))
        run.runner.gate.set()
        run.join()
        assert run.error is None


def test_a_worker_without_scheduler_leaves_at_once() -> None:
    with running() as run:
        run.shell.request_stop()
        run.join()
        assert run.error is None


def test_a_leaving_worker_that_nobody_dismisses_ends_with_the_grace_period() -> None:
    with capture_logs() as logs, running(grace=SOON / 4) as run:
        scheduler = run.scheduler()
        scheduler.welcome(10)
        wait_until(lambda: run.runner.begun)
        run.shell.request_stop()
        run.join()
        assert run.error is None
    assert "left at the end of the grace period" in [line["event"] for line in logs]


def test_a_leaving_worker_whose_scheduler_forgot_it_ends() -> None:
    with running() as run:
        scheduler = run.scheduler()
        scheduler.welcome(10)
        wait_until(lambda: run.runner.begun)
        run.shell.request_stop()
        scheduler.expect(WorkerLeaving)
        scheduler.nothing_but_heartbeats(3)  # so long after its hello that it takes the request for a new one
        scheduler.send(HelloRequest())
        run.join()
        assert run.error is None


def test_a_failing_runner_ends_the_worker_and_its_connection() -> None:
    with running() as run:
        scheduler = run.scheduler()
        scheduler.welcome(10)
        run.runner.fault = RuntimeError("out of device memory")
        scheduler.send(IterationPlan(10, 1))
        run.join()
        assert isinstance(run.error, RuntimeError)
        assert wait_until(scheduler.channel.broken) == [scheduler.route]
