"""Packed records: they survive the trip, what is wrong with them is found before they are made, and they go on as they
came."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given, settings
from pagemill_testing.wire import values

from pagemill_shared.errors import ProtocolError
from pagemill_shared.message import Record
from pagemill_shared.records import Packed, PackedSequence, Rows
from pagemill_shared.schema import Bool, Float, Float32s, Int, Int32s, Optional, Text

ROOM = 4


@dataclass(frozen=True, slots=True, eq=False)
class Inner(Record):
    seed: Annotated[int, Int(0, 2**63 - 1)]
    ids: Annotated[Any, Int32s(5, low=0)]


@dataclass(frozen=True, slots=True, eq=False)
class Outer(Record):
    count: Annotated[int, Int(-3, 9)]
    inner: Annotated[Inner, Packed(Inner)]
    share: Annotated[float, Float(0.0, 1.0)]
    name: Annotated[str, Text(5)]
    on: Annotated[bool, Bool()]
    top: Annotated[int | None, Optional(Int(0, 20))]
    first: Annotated[Any, Int32s(5, low=0)]
    blocks: Annotated[Any, Int32s(5, low=1)]
    second: Annotated[Any, Int32s(5, low=0)]
    bias: Annotated[Any, Float32s(5)]


ONE, MANY = Packed(Outer), PackedSequence(Outer, ROOM)
# The numbers of a head, in order: count, share, on, top, and the lengths of first, blocks, second, bias.
HEAD = "<qdqqqqqq"


def array(*items: int) -> Any:
    return np.array(items, np.int32)


OUTER = Outer(
    1, Inner(7, array(8, 9)), 0.5, "n", True, None, array(1, 2), array(3), array(4), np.array([0.25], np.float32)
)


@settings(deadline=None)
@given(values(MANY))
def test_packed_then_unpacked_is_the_same(records: Sequence[Outer]) -> None:
    unpacked = MANY.unpack(MANY.pack(records))
    assert len(unpacked) == len(records)
    assert tuple(unpacked) == tuple(records)


@settings(deadline=None)
@given(values(ONE))
def test_one_record_is_the_same_too_and_goes_on_as_it_came(record: Outer) -> None:
    parts = list(ONE.pack(record))
    unpacked = ONE.unpack(parts)
    assert unpacked == record
    assert all(kept is part for kept, part in zip(ONE.pack(unpacked), parts, strict=True))


def test_a_changed_copy_is_packed_anew() -> None:
    unpacked = ONE.unpack(list(ONE.pack(OUTER)))
    assert ONE.unpack(list(ONE.pack(replace(unpacked, count=5)))).count == 5


def test_several_records_go_on_as_they_came() -> None:
    parts = MANY.pack((OUTER, OUTER))
    assert MANY.pack(MANY.unpack(parts)) is parts


@settings(deadline=None)
@given(values(MANY))
def test_rows_travel_as_the_records_that_they_stand_for(records: Sequence[Outer]) -> None:
    rows = Rows(Outer, [tuple(getattr(record, field.name) for field in fields(record)) for record in records])
    assert MANY.pack(rows) == MANY.pack(records)
    assert len(rows) == len(records)
    assert rows == tuple(records)


def test_no_records_take_no_room() -> None:
    assert MANY.pack(()) == []
    assert MANY.unpack([]) == ()


def head(**changes: Any) -> Callable[[list[Any]], None]:
    names = ("count", "share", "on", "top", "first", "blocks", "second", "bias")

    def change(parts: list[Any]) -> None:
        numbers = dict(zip(names, struct.unpack(HEAD, parts[0]), strict=True)) | changes
        parts[0] = struct.pack(HEAD, *numbers.values())

    return change


def part(index: int, value: Any) -> Callable[[list[Any]], None]:
    def change(parts: list[Any]) -> None:
        parts[index] = value

    return change


def seeds(*seeds: int) -> bytes:
    return b"".join(struct.pack("<qq", seed, 1) for seed in seeds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (head(count=10), r"Outer\.count: 10 is outside -3\.\.9"),
        (head(share=math.nan), r"Outer\.share: nan is outside 0\.0\.\.1\.0"),
        (head(on=2), r"Outer\.on: 2 is outside 0\.\.1"),
        (head(top=-2), r"Outer\.top: -2 is outside -1\.\.20"),
        (head(first=-1), r"Outer\.first: -1 is outside 0\.\.5"),
        (head(first=6), r"Outer\.first: 6 is outside 0\.\.5"),
        (head(first=3), r"arrays of \[4, 1, 1\] items in sections of \[3, 1, 1\]"),
        (head(bias=0), r"arrays of \[3, 1, 0\] items in sections of \[3, 1, 1\]"),
        (part(0, b"x"), "expected heads of 64 bytes each"),
        (part(0, None), "expected heads of 64 bytes each"),
        (part(1, b"\xff" * 12), "array item -1 is below 0"),
        (part(2, bytes(4)), "array item 0 is below 1"),
        (part(3, b"123"), "3 bytes do not hold rows"),
        (part(3, "text"), "expected a packed array, got str"),
        (part(4, None), "expected a list of 1 lists"),
        (part(4, [["n"], ["n"]]), "expected a list of 1 lists"),
        (part(4, [["n", "n"]]), "expected lists of 1 items"),
        (part(4, [7]), "expected lists of 1 items"),
        (part(4, [["longer"]]), r"Outer\.name: text of 6 characters is longer than 5"),
        (part(5, seeds(-1)), r"Inner\.seed: -1 is outside 0"),
        (part(5, seeds()), "arrays of"),
        (part(5, seeds(1, 2)), "2 records are more than 1"),
        (part(6, b""), r"arrays of \[2\] items in sections of \[0\]"),
        (list.pop, "expected the 7 parts of packed Outer"),
        (lambda parts: parts.append(b""), "expected the 7 parts of packed Outer"),
    ],
)
def test_what_is_wrong_is_told_before_a_record_is_made(change: Callable[[list[Any]], None], message: str) -> None:
    parts = MANY.pack((OUTER,))
    change(parts)
    with pytest.raises(ProtocolError, match=message):
        MANY.unpack(parts)


def test_a_record_too_few_and_one_too_many_are_refused() -> None:
    with pytest.raises(ProtocolError, match="no Outer"):
        ONE.unpack([b"", b"", b"", b"", [], b"", b""])
    with pytest.raises(ProtocolError, match="2 records are more than 1"):
        ONE.unpack(MANY.pack((OUTER, OUTER)))
    with pytest.raises(ProtocolError, match="5 records are more than 4"):
        MANY.unpack(MANY.pack((OUTER,) * 5))
    with pytest.raises(ProtocolError, match="expected the 7 parts"):
        MANY.unpack(7)


def test_what_a_head_cannot_hold_is_a_value_error() -> None:
    for wrong in ({"count": 2**63}, {"count": None}, {"share": "high"}):
        with pytest.raises(ValueError, match="Outer cannot be packed"):
            ONE.pack(replace(OUTER, **wrong))
