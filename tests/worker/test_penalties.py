from __future__ import annotations

import numpy as np
import torch

from pagemill_worker.penalties import PenaltyCounts


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def state(counts: PenaltyCounts, slot: int) -> tuple[list[int], list[int]]:
    line = counts.lines([slot])[0]
    return counts.output_counts[line].tolist(), counts.seen[line].int().tolist()


def test_counts_follow_their_slots() -> None:
    counts = PenaltyCounts(6, torch.device("cpu"))
    counts.join(9, ids(1, 1, 2), ids(3, 3))
    assert state(counts, 9) == ([0, 0, 0, 2, 0, 0], [0, 1, 1, 1, 0, 0])
    counts.fork(9, 4)
    counts.fork(5, 7)  # a parent without penalties
    assert 7 not in counts
    counts.count(np.array([9, 5, 4]), ids(0, 1, 3))
    assert state(counts, 9) == ([1, 0, 0, 2, 0, 0], [1, 1, 1, 1, 0, 0])
    assert state(counts, 4) == ([0, 0, 0, 3, 0, 0], [0, 1, 1, 1, 0, 0])
    counts.release(9)
    counts.release(9)
    assert 9 not in counts
    counts.join(2, ids(5), ids())  # takes the line of slot 9, and nothing of what it held
    assert state(counts, 2) == ([0] * 6, [0, 0, 0, 0, 0, 1])
    assert counts.output_counts.shape[0] == 4


def test_many_slots() -> None:
    counts = PenaltyCounts(10, torch.device("cpu"))
    for slot in range(20):
        counts.join(slot, ids(slot % 10), ids())
    counts.count(np.arange(20), np.arange(20, dtype=np.int32) % 10)
    for slot in range(20):
        expected = [int(token == slot % 10) for token in range(10)]
        assert state(counts, slot) == (expected, expected)
