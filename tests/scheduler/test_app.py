"""The scheduler as a process of its own, with worker processes and a gateway around it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pagemill_testing
import pytest
import zmq
from pagemill_testing.hash_model import expected_output
from pagemill_testing.live_gateway import Answer, LiveGateway
from pagemill_testing.sockets import PATIENCE, ipc_folder, wait_until

from pagemill_scheduler.app import core_config, new_incarnation, run
from pagemill_shared.channel import Context, DealerChannel
from pagemill_shared.curve import generate_keys, load_client_keys
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.messages import Heartbeat
from pagemill_shared.sampling import SamplingParams
from pagemill_shared.settings import SchedulerSettings

PYTHONPATH = os.pathsep.join([str(Path(pagemill_testing.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
SCHEDULER = """
import sys
from pagemill_scheduler.app import run
from pagemill_shared.settings import SchedulerSettings
sys.exit(run(SchedulerSettings()))
"""


class Fleet:
    """Processes on ipc sockets in one folder. ``peer_timeout`` is long, so that nothing is noticed by silence alone
    unless a test says otherwise."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self.folder = folder
        self.context: Context = stack.enter_context(zmq.Context())
        self.frontend, self.backend = f"ipc://{folder}/frontend", f"ipc://{folder}/backend"

    def scheduler(self, **settings: object) -> subprocess.Popen[str]:
        values: dict[str, object] = {
            "frontend": self.frontend,
            "backend": self.backend,
            "heartbeat_interval": 0.05,
            "peer_timeout": 60.0,
            "no_worker_timeout": 60.0,
            "shutdown_grace": 60.0,
            "check_invariants": True,
            **settings,
        }
        environment = {f"PAGEMILL_{name.upper()}": str(value) for name, value in values.items()}
        process = self._start([sys.executable, "-c", SCHEDULER], environment)
        wait_until(lambda: (self.folder / "frontend").exists() or process.poll() is not None, what="scheduler")
        return process

    def worker(self, identity: str, step: float = 0.005, curve_dir: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pagemill_testing.worker_process", self.backend, identity, str(step), "60"]
        return self._start([*command, curve_dir] if curve_dir else command, {"PYTHONPATH": PYTHONPATH})

    def gateway(self, curve_dir: Path | None = None) -> LiveGateway:
        keys = load_client_keys(curve_dir) if curve_dir else None
        gateway = LiveGateway(self.context, self.frontend, keys)
        self._stack.callback(gateway.channel.close)
        return gateway

    def _start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._stack.callback(self._end, process)
        return process

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGCONT)
        process.kill()
        output, _ = process.communicate()
        print(output)  # noqa: T201  pytest shows it when the test fails


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with ipc_folder() as folder, ExitStack() as stack:
        yield Fleet(stack, folder)


def ask(gateway: LiveGateway, count: int = 3, max_tokens: int = 120) -> list[Answer]:
    return [
        gateway.submit(
            [10 * number + offset for offset in range(1, 8)], SamplingParams(temperature=0.0, max_tokens=max_tokens)
        )
        for number in range(count)
    ]


def assert_right(gateway: LiveGateway, answers: list[Answer]) -> None:
    """All answers come, with the very tokens that an undisturbed run gives, and leave no block behind."""
    gateway.until_done(*answers)
    for answer in answers:
        assert answer.failure == ""
        assert answer.tokens == expected_output(answer.prompt, answer.sampling, 1000)
    gateway.until(lambda: gateway.state()["metrics"]["kv_cache_usage_perc"] == 0.0, "free blocks")


def ended(process: subprocess.Popen[str]) -> int:
    return process.wait(PATIENCE)


# ---------------------------------------------------------------- serving


def test_requests_are_served_and_sigterm_ends_with_status_0_and_no_file_left(fleet: Fleet) -> None:
    scheduler, worker = fleet.scheduler(), fleet.worker("w1")
    gateway = fleet.gateway()
    gateway.until_ready()
    assert_right(gateway, ask(gateway))
    worker.send_signal(signal.SIGTERM)
    assert ended(worker) == 0
    scheduler.send_signal(signal.SIGTERM)
    assert ended(scheduler) == 0
    assert list(fleet.folder.iterdir()) == []


def test_sigterm_lets_running_requests_finish(fleet: Fleet) -> None:
    scheduler, _ = fleet.scheduler(), fleet.worker("w1")
    gateway = fleet.gateway()
    gateway.until_ready()
    answers = ask(gateway, max_tokens=60)
    gateway.until(lambda: all(answer.tokens for answer in answers))  # what has not come yet is refused from now on
    scheduler.send_signal(signal.SIGTERM)
    gateway.until_done(*answers)
    for answer in answers:
        assert answer.tokens == expected_output(answer.prompt, answer.sampling, 1000)
    assert ended(scheduler) == 0


def test_the_grace_period_ends_a_scheduler_whose_requests_do_not_finish(fleet: Fleet) -> None:
    scheduler, worker = fleet.scheduler(shutdown_grace=0.1), fleet.worker("w1")
    gateway = fleet.gateway()
    gateway.until_ready()
    answers = ask(gateway)
    gateway.until(lambda: answers[0].tokens)
    worker.send_signal(signal.SIGSTOP)
    scheduler.send_signal(signal.SIGINT)
    assert ended(scheduler) == 0
    assert list(fleet.folder.iterdir()) == []


# ---------------------------------------------------------------- workers come and go


def test_a_killed_workers_requests_finish_on_another(fleet: Fleet) -> None:
    fleet.scheduler()
    workers = [fleet.worker("w1"), fleet.worker("w2")]
    gateway = fleet.gateway()
    gateway.until_ready(2)
    answers = ask(gateway, count=4)
    gateway.until(lambda: all(answer.tokens for answer in answers))
    workers[0].kill()
    gateway.until(lambda: gateway.fleet.ready_workers == 1, "loss of the worker")
    assert_right(gateway, answers)
    fleet.worker("w3")
    gateway.until_ready(2)


def test_the_last_workers_requests_wait_for_the_next_worker(fleet: Fleet) -> None:
    fleet.scheduler()
    worker = fleet.worker("w1")
    gateway = fleet.gateway()
    gateway.until_ready()
    answers = ask(gateway)
    gateway.until(lambda: all(answer.tokens for answer in answers))
    worker.kill()
    gateway.until(lambda: gateway.fleet.ready_workers == 0, "loss of the worker")
    fleet.worker("w2")
    assert_right(gateway, answers)


def test_a_leaving_worker_hands_over(fleet: Fleet) -> None:
    fleet.scheduler()
    workers = [fleet.worker("w1"), fleet.worker("w2")]
    gateway = fleet.gateway()
    gateway.until_ready(2)
    answers = ask(gateway, count=4)
    gateway.until(lambda: all(answer.tokens for answer in answers))
    workers[0].send_signal(signal.SIGTERM)
    gateway.until(lambda: workers[0].poll() is not None, "end of the worker")
    assert workers[0].returncode == 0
    assert_right(gateway, answers)


def test_the_last_leaving_worker_finishes_what_it_runs(fleet: Fleet) -> None:
    fleet.scheduler()
    worker = fleet.worker("w1")
    gateway = fleet.gateway()
    gateway.until_ready()
    answers = ask(gateway, max_tokens=60)
    gateway.until(lambda: all(answer.tokens for answer in answers))
    worker.send_signal(signal.SIGTERM)
    gateway.until_done(*answers)
    for answer in answers:
        assert answer.tokens == expected_output(answer.prompt, answer.sampling, 1000)
    gateway.until(lambda: worker.poll() is not None, "end of the worker")
    assert worker.returncode == 0


def test_a_stopped_worker_is_lost_by_its_silence_and_joins_again(fleet: Fleet) -> None:
    fleet.scheduler(peer_timeout=5.0)
    worker = fleet.worker("w1")
    fleet.worker("w2")
    gateway = fleet.gateway()
    gateway.until_ready(2)
    answers = ask(gateway, count=4)
    gateway.until(lambda: all(answer.tokens for answer in answers))
    worker.send_signal(signal.SIGSTOP)
    gateway.until(lambda: gateway.fleet.ready_workers == 1, "loss of the worker")
    assert_right(gateway, answers)
    worker.send_signal(signal.SIGCONT)
    gateway.until_ready(2)
    assert_right(gateway, ask(gateway, count=4, max_tokens=20))


# ---------------------------------------------------------------- the scheduler itself


def test_after_a_kill_and_a_restart_all_go_on_by_themselves(fleet: Fleet) -> None:
    first, worker = fleet.scheduler(), fleet.worker("w1")
    gateway = fleet.gateway()
    gateway.until_ready()
    assert_right(gateway, ask(gateway, count=1, max_tokens=10))
    gateway.answers.clear()
    first.kill()
    ended(first)
    fleet.scheduler()  # its ipc files are still there
    gateway.until(lambda: len(set(gateway.incarnations)) == 2, "welcome of the new scheduler")
    gateway.until_ready()
    assert_right(gateway, ask(gateway, max_tokens=20))
    assert worker.poll() is None


def test_a_scheduler_that_was_stopped_for_a_while_goes_on(fleet: Fleet) -> None:
    scheduler = fleet.scheduler(peer_timeout=60)
    fleet.worker("w1")
    gateway = fleet.gateway()
    gateway.until_ready()
    answers = ask(gateway, max_tokens=60)
    gateway.until(lambda: answers[0].tokens)
    scheduler.send_signal(signal.SIGSTOP)
    beats = gateway.link.deadline + 5 * gateway.link.heartbeat_interval
    gateway.until(lambda: gateway.link.deadline > beats, "some heartbeats")
    scheduler.send_signal(signal.SIGCONT)
    assert_right(gateway, answers)
    assert gateway.state()["metrics"]["resyncs_total"] == 0


def test_hostile_bytes_leave_it_alive(fleet: Fleet) -> None:
    scheduler = fleet.scheduler()
    fleet.worker("w1")
    gateway = fleet.gateway()
    gateway.until_ready()
    for endpoint in (fleet.frontend, fleet.backend):
        with fleet.context.socket(zmq.DEALER) as raw:
            raw.linger = 0
            raw.connect(endpoint)
            for parts in ([b""], [os.urandom(256)], [b"\x91" * 300_000], [b"x"] * 1000, [os.urandom(4_000_000)]):
                raw.send_multipart(parts)
            dealer = DealerChannel(fleet.context, "x", endpoint, keys=None)
            wait_until(lambda dealer=dealer: dealer.send(Heartbeat(1, 0, 0)))  # type: ignore[misc]
            wait_until(lambda dealer=dealer: dealer.receive(1), dealer.socket)  # type: ignore[misc]
            dealer.close()
    assert_right(gateway, ask(gateway, max_tokens=20))
    assert scheduler.poll() is None


# ---------------------------------------------------------------- CURVE and configuration


def test_with_keys_friends_are_served_and_strangers_are_not(fleet: Fleet) -> None:
    ours, theirs = fleet.folder / "ours", fleet.folder / "theirs"
    generate_keys(ours)
    generate_keys(theirs)
    fleet.scheduler(curve_dir=ours)
    fleet.worker("stranger", curve_dir=str(theirs))
    fleet.worker("plain")
    fleet.worker("w1", curve_dir=str(ours))
    gateway, stranger, plain = fleet.gateway(ours), fleet.gateway(theirs), fleet.gateway()
    gateway.until_ready()
    assert_right(gateway, ask(gateway, max_tokens=20))
    for other in (stranger, plain):
        other._work()
        assert other.incarnations == []
    assert [worker["identity"] for worker in gateway.state()["workers"]] == ["w1"]


def settings(fleet: Fleet, **values: object) -> SchedulerSettings:
    return SchedulerSettings(**{"frontend": fleet.frontend, "backend": fleet.backend, **values})  # type: ignore[arg-type]


def test_endpoints_and_keys_that_cannot_be_used_are_clear_errors(fleet: Fleet) -> None:
    fleet.scheduler()
    for values, pattern in (
        ({}, "another process uses it"),
        ({"backend": "tcp://0.0.0.0:0"}, "allow-insecure-bind"),
        ({"curve_dir": fleet.folder}, "CURVE key .* is not readable"),
    ):
        with pytest.raises(ConfigurationError, match=pattern):
            run(settings(fleet, **values))
    gateway = fleet.gateway()
    gateway.until(lambda: gateway.link.in_epoch)


def test_a_failing_core_ends_the_process_with_status_1(fleet: Fleet) -> None:
    script = "from pagemill_scheduler.core import SchedulerCore; SchedulerCore._tick = None" + SCHEDULER
    process = fleet._start(
        [sys.executable, "-c", script],
        {
            "PAGEMILL_FRONTEND": fleet.frontend,
            "PAGEMILL_BACKEND": fleet.backend,
            "PAGEMILL_COMPILED_SCHEDULER": "false",  # compiled, a method cannot be replaced
        },
    )
    assert ended(process) == 1
    assert process.stdout is not None
    output = process.stdout.read()
    assert "the scheduler core failed; ending" in output
    assert "Tick" in output
    assert list(fleet.folder.iterdir()) == []


def test_a_token_budget_that_limits_the_sequences_is_warned_of(fleet: Fleet) -> None:
    process = fleet.scheduler(max_num_seqs=32, max_num_batched_tokens=31)
    assert process.stdout is not None
    warning = next(line for line in process.stdout if "warning" in line)
    assert "max_num_batched_tokens=31 max_num_seqs=32" in warning


def test_every_policy_setting_reaches_the_core(fleet: Fleet) -> None:
    values = {
        "max_num_seqs": 7,
        "max_num_batched_tokens": 77,
        "max_prefill_seconds": 0.3,
        "pipeline_depth": 1,
        "heartbeat_interval": 0.7,
        "peer_timeout": 7.0,
        "no_worker_timeout": 0.07,
        "worker_return_timeout": 0.7,
        "check_invariants": True,
    }
    config = core_config(settings(fleet, **values))
    assert {name: getattr(config, name) for name in values} == values


def test_incarnations_grow_and_fit() -> None:
    first = new_incarnation()
    wait_until(lambda: new_incarnation() > first)
    assert 0 < new_incarnation() < 2**39
    assert np.log2(new_incarnation()) > 36
