"""Memory is there before it is needed, and nothing in it changes."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from pagemill_worker.first_touch import SHARE, STEP, touch, touch_beside

MIB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(
    platform.system() != "Linux" or tuple(map(int, platform.release().split(".")[:2])) < (5, 14),
    reason="needs Linux 5.14",
)
def test_memory_is_there_and_the_rest_is_not() -> None:
    pool = torch.empty(256 * MIB, dtype=torch.uint8)
    before = resident()
    thread = touch_beside(pool)
    thread.join(60)
    assert not thread.is_alive()
    assert 0.9 * SHARE * pool.nbytes < resident() - before < 0.6 * pool.nbytes


def test_what_is_written_stays() -> None:
    pool = torch.arange(3 * STEP // 4 + 1000, dtype=torch.int32)
    kept = pool.clone()
    assert touch(pool, 2 * pool.nbytes) <= pool.nbytes
    assert torch.equal(pool, kept)


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 10_000])
def test_only_whole_pages_within_it(size: int) -> None:
    pool = torch.zeros(size, dtype=torch.uint8)
    assert touch(pool, size) % 4096 == 0
    assert touch(pool, size) <= size
