"""Dataclasses that travel as packed bytes: cheap where many come in one message, or where one goes on unchanged.

K records of one class travel as a list of parts, as many as one record has:

* *heads*, 8 little-endian bytes for each number, truth value and flat array of a record: the number, or the length;
* for each sort of array a *section*: the contents of all arrays of that sort, record after record;
* if there are fields of other kinds, a list with a list of them for each record;
* the parts of each record nested in them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, ClassVar

from pagemill_shared.errors import ProtocolError
from pagemill_shared.message import Record
from pagemill_shared.schema import Bool, Float, Float32s, Int, Int32s, Kind, Optional, getter, layout_of

Parts = tuple[Any, ...]
_ITEM_BYTES = 4
Heads = list[tuple[Any, ...]]
Inserted = list[tuple[int, Sequence[Any]]]
"""For each field that has no place in the head: its place among the fields, and its value in each record."""
Checked = tuple[Heads, list[Any], Inserted]


class RecordLayout:
    """How the records of one class are packed."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self._names: list[str] = []
        self._lows: list[Any] = []  # whole numbers and others: compiled, a list of float would hold none but those
        self._highs: list[Any] = []
        # By place in the head: what is not there as it is.
        self._switches: list[int] = []
        self._optional: list[tuple[int, int]] = []  # ..., the number that stands for None
        self._arrays: list[tuple[int, Kind, int, Any]] = []  # ..., section, an empty one
        self._sections: list[Kind] = []
        # By place among the fields.
        self._others: list[tuple[int, str, Kind]] = []
        self._nested: list[tuple[int, RecordLayout]] = []
        self._places: list[int] = []
        formats = "<"
        fields = layout_of(cls).fields
        for place, (name, kind) in enumerate(fields):
            if isinstance(kind, Packed):
                self._nested.append((place, kind.layout))
            elif (bounds := self._add_to_head(kind)) is None:
                self._others.append((place, name, kind))
            else:
                self._names.append(name)
                self._places.append(place)
                self._lows.append(bounds[0])
                self._highs.append(bounds[1])
                formats += "d" if isinstance(kind, Float) else "q"
        self._head = struct.Struct(formats)
        self.names = [name for name, _ in fields]
        self.get = getter(self.names)
        self._num_own = 1 + len(self._sections) + bool(self._others)
        self.num_parts: int = self._num_own + sum(layout.num_parts for _, layout in self._nested)

    def _add_to_head(self, kind: Kind) -> tuple[Any, Any] | None:
        """The bounds of what stands in the head for a field; None if it has no place there."""
        at = len(self._names)
        match kind:
            case Int(low=low, high=high) | Float(low=low, high=high):
                return low, high
            case Bool():
                self._switches.append(at)
                return 0, 1
            case Optional(inner=Int(low=low, high=high)):
                self._optional.append((at, low - 1))
                return low - 1, high
            case Int32s(columns=1) | Float32s(columns=1):
                # How long each array is, the head tells; how long a section may be, only the size of a message limits.
                sorts = [(type(section), section.low) for section in self._sections]  # type: ignore[attr-defined]
                if (type(kind), kind.low) not in sorts:
                    sorts.append((type(kind), kind.low))
                    self._sections.append(type(kind)(2**31, low=kind.low))
                section = sorts.index((type(kind), kind.low))
                self._arrays.append((at, kind, section, kind.unpack(b"")))
                return 0, kind.max_items
        return None

    def pack(self, columns: Sequence[Sequence[Any]]) -> list[Any]:
        """The parts of K records, given field by field: K values for each, in order.

        Raises:
            ValueError: a field holds what its kind cannot carry.
        """
        heads = [columns[place] for place in self._places]
        for at, none in self._optional:
            heads[at] = [none if value is None else value for value in heads[at]]
        contents: list[list[list[bytes]]] = [[] for _ in self._sections]
        for at, kind, section, _ in self._arrays:
            packed = list(map(kind.pack, heads[at]))
            heads[at] = [len(data) // _ITEM_BYTES for data in packed]
            contents[section].append(packed)
        try:
            parts: list[Any] = [b"".join(map(self._head.pack, *heads))]
        except struct.error as error:
            raise ValueError(f"{self.cls.__name__} cannot be packed: {error}") from None
        for arrays in contents:
            parts.append(b"".join(arrays[0] if len(arrays) == 1 else chain.from_iterable(zip(*arrays, strict=True))))
        if self._others:
            others = [map(kind.pack, columns[place]) for place, _, kind in self._others]
            parts.append(list(map(list, zip(*others, strict=True))))
        for place, layout in self._nested:
            nested = [layout.pack_one(record) for record in columns[place]]
            parts += nested[0] if len(nested) == 1 else map(_joined, zip(*nested, strict=True))
        return parts

    def pack_one(self, record: Any) -> Parts:
        """The parts of one record, those that it came with if it came from the wire."""
        kept: Parts | None = getattr(record, "_parts", None)
        if kept is not None:
            return kept
        return tuple(self.pack([(value,) for value in self.get(record)]))

    def check(self, parts: Any, max_items: int) -> Records:
        """The records that ``parts`` hold.

        Raises:
            ProtocolError: anything is wrong with them.
        """
        if type(parts) is not list or len(parts) != self.num_parts:
            raise ProtocolError(f"expected the {self.num_parts} parts of packed {self.cls.__name__}")
        data = parts[0]
        if type(data) is not bytes or len(data) % self._head.size:
            raise ProtocolError(f"expected heads of {self._head.size} bytes each")
        heads = list(self._head.iter_unpack(data))
        if len(heads) > max_items:
            raise ProtocolError(f"{len(heads)} records are more than {max_items}")
        lows, highs = self._lows, self._highs
        for head in heads:
            for at, value in enumerate(head):
                if not lows[at] <= value <= highs[at]:  # also refuses NaN
                    raise self._blamed(head)
        sections = [kind.unpack(raw) for kind, raw in zip(self._sections, parts[1:], strict=False)]
        lengths = [0] * len(sections)
        for at, _, section, _ in self._arrays:
            for head in heads:
                lengths[section] += head[at]
        if lengths != [len(section) for section in sections]:
            raise ProtocolError(f"arrays of {lengths} items in sections of {[len(section) for section in sections]}")
        return Records(self, parts, (heads, sections, self._check_inserted(parts, len(heads))))

    def make(self, heads: Heads, sections: list[Any], inserted: Inserted) -> Iterator[Any]:
        """The records of what ``check`` has found right."""
        cls, starts = self.cls, [0] * len(sections)
        for number, head in enumerate(heads):
            values = list(head)
            for at in self._switches:
                values[at] = head[at] == 1
            for at, none in self._optional:
                if head[at] == none:
                    values[at] = None
            for at, _, section, empty in self._arrays:
                if head[at]:
                    start = starts[section]
                    starts[section] = end = start + head[at]
                    values[at] = sections[section][start:end]
                else:
                    values[at] = empty
            for place, items in inserted:
                values.insert(place, items[number])
            yield cls(*values)

    def _check_inserted(self, parts: list[Any], count: int) -> Inserted:
        columns: list[tuple[int, Sequence[Any]]] = []
        if self._others:
            rows = parts[self._num_own - 1]
            if type(rows) is not list or len(rows) != count:
                raise ProtocolError(f"expected a list of {count} lists")
            if any(type(row) is not list or len(row) != len(self._others) for row in rows):
                raise ProtocolError(f"expected lists of {len(self._others)} items")
            for number, (place, name, kind) in enumerate(self._others):
                try:
                    columns.append((place, [kind.unpack(row[number]) for row in rows]))
                except ProtocolError as error:
                    raise ProtocolError(f"{self.cls.__name__}.{name}: {error.reason}") from None
        first = self._num_own
        for place, layout in self._nested:
            nested = layout.check(parts[first : first + layout.num_parts], count)
            if len(nested) != count:
                raise ProtocolError(f"{len(nested)} {layout.cls.__name__} for {count} {self.cls.__name__}")
            first += layout.num_parts
            columns.append((place, nested))
        return sorted(columns, key=itemgetter(0))

    def _blamed(self, head: tuple[Any, ...]) -> ProtocolError:
        """The error of the first number that is out of bounds."""
        for name, low, value, high in zip(self._names, self._lows, head, self._highs, strict=True):
            if not low <= value <= high:
                return ProtocolError(f"{self.cls.__name__}.{name}: {value} is outside {low}..{high}")
        raise AssertionError(f"{self.cls.__name__}: no number is wrong")


class _MadeLate(Sequence[Any]):
    """Records that are made when they are first asked for: to send them, none need be."""

    _items: tuple[Any, ...] | None = None

    def _make(self) -> Iterator[Any]:
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        if self._items is None:
            self._items = tuple(self._make())
        return self._items[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


class Records(_MadeLate):
    """Records that came from the wire, checked."""

    def __init__(self, layout: RecordLayout, parts: list[Any], checked: Checked) -> None:
        self.parts = parts
        self._layout, self._checked = layout, checked

    def __len__(self) -> int:
        return len(self._checked[0])

    def _make(self) -> Iterator[Any]:
        return self._layout.make(*self._checked)


class Rows(_MadeLate):
    """Records of class ``cls`` to be sent, each given as a tuple of what its fields hold, in order."""

    def __init__(self, cls: type[Record], rows: list[tuple[Any, ...]]) -> None:
        self.cls, self.rows = cls, rows

    def __len__(self) -> int:
        return len(self.rows)

    def _make(self) -> Iterator[Any]:
        for row in self.rows:
            yield self.cls(*row)


class Packed(Kind):
    """One record."""

    as_is: ClassVar[bool] = False

    def __init__(self, cls: type[Record]) -> None:
        self.layout = RecordLayout(cls)

    def pack(self, value: Any) -> Parts:
        return self.layout.pack_one(value)

    def unpack(self, raw: Any) -> Any:
        records = self.layout.check(raw, 1)
        if not records:
            raise ProtocolError(f"no {self.layout.cls.__name__}")
        [record] = records
        object.__setattr__(record, "_parts", tuple(raw))
        return record


class PackedSequence(Kind):
    """Any number of records."""

    as_is: ClassVar[bool] = False

    def __init__(self, cls: type[Record], max_items: int) -> None:
        self.layout, self.max_items = RecordLayout(cls), max_items

    def pack(self, value: Sequence[Any]) -> list[Any]:
        if not value:
            return []
        if type(value) is Rows:
            return self.layout.pack(list(zip(*value.rows, strict=True)))
        if type(value) is Records:
            return value.parts
        return self.layout.pack(list(zip(*map(self.layout.get, value), strict=True)))

    def unpack(self, raw: Any) -> Sequence[Any]:
        return self.layout.check(raw, self.max_items) if raw != [] else ()


def _joined(parts: tuple[Any, ...]) -> Any:
    return b"".join(parts) if type(parts[0]) is bytes else [item for part in parts for item in part]
