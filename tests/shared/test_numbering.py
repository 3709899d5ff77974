"""Numbers within an epoch: only the next one is applied, and a broken epoch says so once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagemill_shared.numbering import Incoming, Outgoing, Verdict


def incoming(epoch: int = 1) -> Incoming:
    checker = Incoming()
    checker.begin(epoch)
    return checker


def test_outgoing_numbers_count_from_one_in_each_epoch() -> None:
    outgoing = Outgoing()
    outgoing.begin(7)
    assert [outgoing.next(), outgoing.next(), outgoing.sent] == [1, 2, 2]
    outgoing.begin(8)
    assert (outgoing.epoch, outgoing.sent, outgoing.next()) == (8, 0, 1)


def test_nothing_is_applied_before_the_first_epoch() -> None:
    assert Incoming().accept(0, 1) is Verdict.STALE
    assert Incoming().check_heartbeat(0, 1) is Verdict.STALE


def test_another_epoch_is_stale_and_breaks_nothing() -> None:
    checker = incoming(5)
    assert checker.accept(4, 1) is Verdict.STALE
    assert checker.accept(6, 1) is Verdict.STALE
    assert checker.accept(5, 1) is Verdict.APPLY


def test_a_heartbeat_notices_a_lost_last_message() -> None:
    checker = incoming()
    assert checker.check_heartbeat(1, 0) is Verdict.APPLY
    assert checker.accept(1, 1) is Verdict.APPLY
    assert checker.check_heartbeat(1, 2) is Verdict.BROKEN
    assert checker.accept(1, 2) is Verdict.STALE


@given(st.lists(st.integers(0, 6), max_size=20))
def test_only_the_unbroken_run_is_applied(numbers: list[int]) -> None:
    checker = incoming()
    verdicts = [checker.accept(1, number) for number in numbers]
    applied = [number for number, verdict in zip(numbers, verdicts, strict=True) if verdict is Verdict.APPLY]
    assert applied == list(range(1, len(applied) + 1))
    assert verdicts[: len(applied)] == [Verdict.APPLY] * len(applied)
    assert verdicts.count(Verdict.BROKEN) == (len(applied) < len(numbers))
