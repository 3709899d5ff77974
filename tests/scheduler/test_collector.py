"""The garbage collector runs between iterations only."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from weakref import ref

import pytest

from pagemill_scheduler.collector import FULL_EVERY, YOUNG_EVERY, Collector


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:
    yield
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_nothing_is_collected_by_itself() -> None:
    with Collector():
        watched = ref(Cycle())
        for _ in range(20_000):
            Cycle()
        assert not gc.isenabled()
        assert watched() is not None


def test_busy_rounds_collect_now_and_then() -> None:
    with Collector() as collector:
        watched = ref(Cycle())
        for _ in range(YOUNG_EVERY - 1):
            collector.after_round(idle=False)
        assert watched() is not None
        collector.after_round(idle=False)
        assert watched() is None


def test_an_idle_round_after_work_collects_all_once(monkeypatch: pytest.MonkeyPatch) -> None:
    collections: list[int] = []
    with Collector() as collector:
        for _ in range(YOUNG_EVERY + 1):
            collector.after_round(idle=False)
        monkeypatch.setattr(gc, "collect", lambda generation=2: collections.append(generation))
        for _ in range(5):
            collector.after_round(idle=True)
        monkeypatch.undo()
    assert collections == [2]


def test_unbroken_work_is_collected_in_full_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    collections: list[int] = []
    with Collector() as collector:
        monkeypatch.setattr(gc, "collect", lambda generation=2: collections.append(generation))
        for _ in range(FULL_EVERY):
            collector.after_round(idle=False)
        monkeypatch.undo()
    assert collections.count(2) == 1
    assert collections.count(1) == FULL_EVERY // YOUNG_EVERY - 1
