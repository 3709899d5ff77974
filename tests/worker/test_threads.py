from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagemill_worker.threads import PREFILL_FROM, ThreadPolicy, candidates, choose, usable_cores


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
