from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pagemill_worker.threads import (
    FIRST_TRIAL,
    NEXT_TRIAL,
    PREFILL_FROM,
    TURNS,
    AdaptiveThreads,
    ThreadPolicy,
    candidates,
    choose,
    usable_cores,
)


@pytest.mark.parametrize(
    ("cores", "expected"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 3]), (8, [1, 2, 4, 7]), (9, [1, 2, 4, 8])]
)
def test_candidates_leave_a_core_where_there_are_many(cores: int, expected: list[int]) -> None:
    assert candidates(cores) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 1.0}, 1),
        ({1: 1.0, 2: 0.5, 4: 0.3}, 4),
        ({1: 1.0, 2: 0.5, 4: 0.48}, 2),
        ({1: 1.0, 2: 1.2, 4: 0.1}, 1),
        ({1: 1.0, 2: 0.95}, 1),
    ],
)
def test_more_threads_must_pay(seconds: dict[int, float], expected: int) -> None:
    chosen, tried = choose(list(seconds), seconds.__getitem__)
    assert chosen == expected
    assert tried.items() <= seconds.items()


def test_policy_tells_decode_from_prefill() -> None:
    policy = ThreadPolicy(decode=1, prefill=2)
    assert [policy.of(tokens) for tokens in (1, PREFILL_FROM - 1, PREFILL_FROM, 4096)] == [1, 1, 2, 2]


def test_cores_within_the_quota_of_the_control_group(tmp_path: Path) -> None:
    available = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == available
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == available
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert usable_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path) == 1
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores(tmp_path) == available
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("100000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == 1


class Machine:
    """Iterations, each as long as its tokens and threads make it; and what the threads report."""

    def __init__(self, counts: list[int], decode: int, seconds: Callable[[int, int], float]) -> None:
        self.reports: list[str] = []
        self.threads = AdaptiveThreads(counts, ThreadPolicy(decode, prefill=counts[-1]), self.reports.append)
        self._seconds = seconds

    def run(self, iterations: int, tokens: int = 32) -> list[int]:
        """The threads that each of them had."""
        had = []
        for _ in range(iterations):
            count = self.threads.of(tokens)
            self.threads.took(tokens, self._seconds(tokens, count))
            had.append(count)
        return had


def test_a_wrong_count_is_found_out_and_told() -> None:
    machine = Machine([1, 2], 1, lambda tokens, threads: tokens / threads)
    assert machine.run(FIRST_TRIAL) == [1] * FIRST_TRIAL
    assert machine.run(2 * TURNS) == [1, 2] * TURNS
    assert machine.run(FIRST_TRIAL) == [2] * FIRST_TRIAL
    assert machine.reports == [
        "threads: 2 instead of 1 for iterations of about 32 tokens, which take 0.50 times as long",
    ]


@pytest.mark.parametrize("start", [1, 2, 4, 7])
@pytest.mark.parametrize("best", [1, 2, 4, 7])
def test_the_best_count_is_found_from_any_other(start: int, best: int) -> None:
    counts = [1, 2, 4, 7]
    machine = Machine(counts, start, lambda _, threads: 1 + abs(counts.index(threads) - counts.index(best)))
    machine.run(len(counts) * (NEXT_TRIAL + 2 * TURNS))
    assert machine.threads.of(32) == best


def test_more_threads_that_hardly_help_are_given_back() -> None:
    machine = Machine([1, 2], 2, lambda _, threads: 1.1 / threads**0.1)
    assert machine.run(FIRST_TRIAL + 2 * TURNS + 1)[-1] == 1
    [report] = machine.reports
    assert report.endswith("which take 1.07 times as long, and a core is left to others")


def test_counts_that_are_equally_good_do_not_swap_all_the_time() -> None:
    """The other count always seems much better, whichever it is."""
    times = iter([1.0] * FIRST_TRIAL + ([2.0, 1.0] * TURNS + [1.0] * NEXT_TRIAL) * 3)
    machine = Machine([1, 2], 1, lambda *_: next(times))
    machine.run(FIRST_TRIAL + 3 * (2 * TURNS + NEXT_TRIAL))
    assert len(machine.reports) == 3


def test_a_right_count_is_seldom_tried() -> None:
    machine = Machine([1, 2], 2, lambda tokens, threads: tokens / threads)
    had = machine.run(FIRST_TRIAL + 4 * (NEXT_TRIAL + TURNS))
    assert had.count(1) == 4 * TURNS // 2
    assert machine.reports == []


def test_one_slow_iteration_decides_nothing() -> None:
    slow = iter([9.0] + [1.0] * (TURNS - 1))
    machine = Machine([1, 2], 2, lambda _, threads: next(slow) if threads == 2 else 2.0)
    for _ in range(FIRST_TRIAL):
        machine.threads.took(32, 1.0)
    assert machine.run(TURNS) == [2, 1] * (TURNS // 2)
    assert machine.threads.of(32) == 2
    assert machine.reports == []


def test_each_size_has_a_count_of_its_own() -> None:
    machine = Machine([1, 2], 2, lambda tokens, threads: threads if tokens == 1 else 1 / threads)
    machine.run(FIRST_TRIAL + 2 * TURNS, tokens=1)
    machine.run(FIRST_TRIAL + 2 * TURNS, tokens=32)
    sizes = (1, 2, 32, PREFILL_FROM - 1, PREFILL_FROM, 4096)
    assert [machine.threads.of(tokens) for tokens in sizes] == [1, 2, 2, 2, 2, 2]


def test_iterations_of_other_lengths_are_not_compared() -> None:
    machine = Machine([1, 2], 1, lambda tokens, threads: tokens / threads)
    machine.run(FIRST_TRIAL + 1, tokens=32)
    machine.run(2 * TURNS, tokens=60)
    assert machine.threads.of(32) == 1
    assert machine.reports == []


def test_one_count_is_never_tried() -> None:
    assert set(Machine([1], 1, lambda *_: 1.0).run(5 * NEXT_TRIAL)) == {1}


def test_prompts_have_counts_of_their_own() -> None:
    machine = Machine([1, 2], 1, lambda tokens, threads: 1.0 if tokens >= 512 else tokens / threads)
    for tokens in (100, 600, 2048):
        assert machine.threads.of(tokens) == 2
        machine.run(FIRST_TRIAL + 2 * TURNS, tokens)
    assert [machine.threads.of(tokens) for tokens in (32, 100, 600, 2048)] == [1, 2, 1, 1]
