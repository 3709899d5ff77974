"""The supervisor over stub programs that stand for the three parts, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pagemill_testing.processes import is_alive, until

PROGRAMS = Path(__file__).parent / "programs"
DEADLINE = 90.0
THREE_PARTS = [[["scheduler", []]], [["worker 1", []], ["worker 2", []]], [["gateway", []]]]


class Run:
    """A supervisor process, and what its parts noted."""

    def __init__(self, folder: Path, **spec: object) -> None:
        self.events = folder / "events"
        self.events.touch()
        self.process = subprocess.Popen(
            [sys.executable, PROGRAMS / "supervise.py", self.events, json.dumps(spec)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Unbuffered text streams lose the rest of a write that a signal interrupts.
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )

    def notes(self) -> list[str]:
        """What happened, as ``worker 1 started``."""
        return [line.rpartition(" ")[0] for line in self.events.read_text().splitlines()]

    def pids(self) -> list[int]:
        return [int(line.rpartition(" ")[2]) for line in self.events.read_text().splitlines()]

    def until_noted(self, *notes: str) -> None:
        until(lambda: all(note in self.notes() for note in notes), f"{notes} in {self.notes()}")

    def until_up(self) -> None:
        self.until_noted("scheduler started", "worker 1 started", "worker 2 started", "gateway started")

    def end(self) -> tuple[int, str]:
        """Exit status and all output."""
        output, _ = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, output

    def no_part_left(self) -> None:
        until(lambda: not any(is_alive(pid) for pid in self.pids()), "no part is left")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start_run(**spec: object) -> Run:
        runs.append(Run(tmp_path, **spec))
        return runs[-1]

    yield start_run
    for run in runs:
        run.process.kill()
        run.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_stages_in_reverse_order(start: Callable[..., Run], number: signal.Signals) -> None:
    run = start(stages=THREE_PARTS)
    run.until_up()
    run.process.send_signal(number)
    status, output = run.end()
    assert status == 0, output
    notes = run.notes()
    assert notes.index("gateway ended") < notes.index("worker 1 told")
    assert max(notes.index("worker 1 ended"), notes.index("worker 2 ended")) < notes.index("scheduler told")
    assert notes[-1] == "scheduler ended"
    run.no_part_left()


def test_a_stage_waits_for_the_slowest_of_the_one_above_it(start: Callable[..., Run]) -> None:
    slow = ["stop_after=worker 2 ended", "slow_stop=0.5"]
    run = start(stages=[[["scheduler", []]], [["worker 1", slow], ["worker 2", []]], [["gateway", []]]])
    run.until_up()
    run.process.terminate()
    assert run.end()[0] == 0
    assert run.notes()[-3:] == ["worker 1 ended", "scheduler told", "scheduler ended"]


def test_ctrl_c_in_a_terminal_reaches_the_supervisor_alone(start: Callable[..., Run]) -> None:
    run = start(stages=THREE_PARTS)
    run.until_up()
    assert {os.getpgid(pid) for pid in run.pids()}.isdisjoint({os.getpgid(run.process.pid)})
    run.process.send_signal(signal.SIGINT)
    run.end()
    assert not any("interrupted" in note for note in run.notes())


def test_the_announcement_is_made_once_the_parts_are_started(start: Callable[..., Run]) -> None:
    run = start(stages=THREE_PARTS)
    run.until_up()
    run.process.terminate()
    assert "announced" in run.end()[1].splitlines()


def test_lines_of_the_parts_carry_their_name(start: Callable[..., Run]) -> None:
    run = start(stages=[[["scheduler", ["print=one\ntwo"]]], [["worker", ["print=\u00e9\n"]]]])
    run.until_noted("scheduler started", "worker started")
    run.process.terminate()
    lines = run.end()[1].splitlines()
    assert {"scheduler| one", "scheduler| two", "worker| \u00e9"} <= set(lines)


def test_a_very_long_line_is_passed_on_whole_in_pieces(start: Callable[..., Run]) -> None:
    run = start(stages=[[["worker", ["print=" + "x" * 100_000]]]])
    run.until_noted("worker started")
    run.process.terminate()
    assert run.end()[1].count("x") == 100_000


def test_a_part_that_dies_is_started_again(start: Callable[..., Run]) -> None:
    run = start(stages=THREE_PARTS)
    run.until_up()
    first = run.pids()[run.notes().index("worker 2 started")]
    os.kill(first, signal.SIGKILL)
    until(lambda: run.notes().count("worker 2 started") == 2, "worker 2 is back")
    run.process.terminate()
    status, output = run.end()
    assert status == 0
    assert "killed by SIGKILL" in output
    assert run.notes().count("gateway started") == 1
    run.no_part_left()


@pytest.mark.parametrize("status", [0, 1, 3])
def test_an_unasked_end_with_any_status_is_followed_by_a_start(start: Callable[..., Run], status: int) -> None:
    run = start(stages=[[["scheduler", []]], [["worker", [f"exit_once={status}"]]]])
    until(lambda: run.notes().count("worker started") == 2, "the worker is back")
    run.process.terminate()
    assert run.end()[0] == 0


def test_a_part_that_dies_too_often_ends_the_server_with_the_cause(start: Callable[..., Run]) -> None:
    dying = ["wait_for=scheduler started", "exit=7"]
    run = start(stages=[[["scheduler", []]], [["worker", dying]], [["gateway", []]]], limit=2)
    status, output = run.end()
    assert status == 1
    assert "failed: the worker ended more than 2 times within 60 s (last: exit status 7); giving up" in output
    assert run.notes().count("worker started") == 3
    assert run.notes()[-1] == "scheduler ended"
    run.no_part_left()


def test_a_part_that_refuses_its_configuration_is_not_started_again(start: Callable[..., Run]) -> None:
    run = start(stages=[[["scheduler", []]], [["worker", ["print=no such device\n", "exit=2"]]]])
    status, output = run.end()
    assert status == 2
    assert "worker| no such device" in output
    assert "failed: the worker refused to start" in output
    assert run.notes().count("worker started") == 1
    run.no_part_left()


def test_a_part_that_does_not_stop_in_time_is_killed(start: Callable[..., Run]) -> None:
    run = start(stages=[[["scheduler", []]], [["worker", ["ignore_term", "stop_timeout=0.2"]]]])
    run.until_noted("scheduler started", "worker started")
    run.process.terminate()
    status, output = run.end()
    assert status == 0
    assert "did not end in time" in output
    assert run.notes()[-1] == "scheduler ended"
    run.no_part_left()


def test_a_second_signal_hurries_who_is_stopping(start: Callable[..., Run]) -> None:
    run = start(stages=[[["scheduler", []]], [["gateway", ["second_term"]]]], hurry=1000.0)
    run.until_noted("scheduler started", "gateway started")
    run.process.send_signal(signal.SIGINT)
    run.until_noted("gateway told")
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert run.notes()[2:5] == ["gateway told", "gateway told", "gateway ended"]
    run.no_part_left()


def test_a_third_signal_kills_at_once(start: Callable[..., Run]) -> None:
    run = start(stages=[[["worker", ["ignore_term"]]]], hurry=1000.0)
    run.until_noted("worker started")
    for count in (1, 2):
        run.process.send_signal(signal.SIGINT)
        until(lambda count=count: run.notes().count("worker told") == count, "the worker is told")
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    run.no_part_left()


def test_who_does_not_hurry_is_killed(start: Callable[..., Run]) -> None:
    run = start(stages=[[["scheduler", []]], [["worker", ["ignore_term"]]]], hurry=0.5)
    run.until_noted("scheduler started", "worker started")
    run.process.send_signal(signal.SIGINT)
    run.until_noted("worker told")
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert "scheduler told" not in run.notes()
    run.no_part_left()


def test_no_part_outlives_a_supervisor_that_is_killed(start: Callable[..., Run]) -> None:
    run = start(stages=THREE_PARTS)
    run.until_up()
    run.process.kill()
    run.end()
    run.no_part_left()


def test_what_a_part_has_started_ends_with_it(start: Callable[..., Run]) -> None:
    run = start(stages=[[["worker", ["grandchild"]]]])
    run.until_noted("worker started", "grandchild started")
    run.process.terminate()
    assert run.end()[0] == 0
    run.no_part_left()


def test_a_grandchild_that_holds_the_output_does_not_hold_up_the_end(start: Callable[..., Run]) -> None:
    run = start(stages=[[["worker", ["grandchild", "own_group"]]]])
    run.until_noted("worker started", "grandchild started")
    grandchild = run.pids()[run.notes().index("grandchild started")]
    run.process.terminate()
    try:
        until(lambda: run.process.poll() is not None, "the supervisor ended")
    finally:
        os.kill(grandchild, signal.SIGKILL)
    assert run.process.returncode == 0


def test_the_first_parts_run_to_their_end_before_the_others_start(start: Callable[..., Run]) -> None:
    run = start(first=[["prepare", ["exit=0"]]], stages=[[["scheduler", []]]])
    run.until_noted("scheduler started")
    assert run.notes()[0] == "prepare started"
    run.process.terminate()
    assert run.end()[0] == 0


def test_a_first_part_that_fails_ends_it_with_the_same_status(start: Callable[..., Run]) -> None:
    run = start(first=[["prepare", ["print=no such model\n", "exit=2"]]], stages=[[["scheduler", []]]])
    status, output = run.end()
    assert status == 2
    assert "prepare| no such model" in output
    assert run.notes() == ["prepare started"]


def test_a_signal_during_a_first_part_ends_it_cleanly(start: Callable[..., Run]) -> None:
    run = start(first=[["prepare", []]], stages=[[["scheduler", []]]])
    run.until_noted("prepare started")
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 0
    assert run.notes() == ["prepare started", "prepare told", "prepare ended"]
    run.no_part_left()
