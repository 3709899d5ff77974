"""What wire messages are made of: typed fields, each with a *kind* that checks and packs it.

A message is a frozen slotted dataclass whose field annotations carry a *kind*: what may stand there and how it
travels. Integer arrays travel as raw little-endian int32, never as lists. The bytes are made in ``codec``; nothing
here depends on the encoding, so that the scheduler core can build messages without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from pagemill_shared.errors import ProtocolError
from pagemill_shared.message import Message as Message

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Upper bound of one encoded message; the channel sets it as ZMQ_MAXMSGSIZE too."""

_WIRE_INT32 = np.dtype("<i4")
_WIRE_FLOAT32 = np.dtype("<f4")


class Kind:
    """How one field travels. ``pack`` gives a msgpack value, ``unpack`` checks one and gives it back.

    Attributes:
        as_is: ``pack`` changes nothing and need not be called.
    """

    as_is: ClassVar[bool] = True

    def pack(self, value: Any) -> Any:
        return value

    def unpack(self, raw: Any) -> Any:
        raise NotImplementedError


class Int(Kind):
    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def unpack(self, raw: Any) -> int:
        if type(raw) is not int:
            raise ProtocolError(f"expected an integer, got {type(raw).__name__}")
        if not self.low <= raw <= self.high:
            raise ProtocolError(f"{raw} is outside {self.low}..{self.high}")
        return raw


class Bool(Kind):
    def unpack(self, raw: Any) -> bool:
        if type(raw) is not bool:
            raise ProtocolError(f"expected a boolean, got {type(raw).__name__}")
        return raw


class Float(Kind):
    def __init__(self, low: float = -math.inf, high: float = math.inf) -> None:
        self.low, self.high = low, high

    def unpack(self, raw: Any) -> float:
        if type(raw) is not float and type(raw) is not int:
            raise ProtocolError(f"expected a float, got {type(raw).__name__}")
        if not self.low <= raw <= self.high:  # also refuses NaN
            raise ProtocolError(f"{raw} is outside {self.low}..{self.high}")
        return float(raw)


class Text(Kind):
    def __init__(self, max_length: int) -> None:
        self.max_length = max_length

    def unpack(self, raw: Any) -> str:
        if type(raw) is not str:
            raise ProtocolError(f"expected text, got {type(raw).__name__}")
        if len(raw) > self.max_length:
            raise ProtocolError(f"text of {len(raw)} characters is longer than {self.max_length}")
        return raw


class Binary(Kind):
    def __init__(self, max_length: int) -> None:
        self.max_length = max_length

    def unpack(self, raw: Any) -> bytes:
        if type(raw) is not bytes:
            raise ProtocolError(f"expected bytes, got {type(raw).__name__}")
        if len(raw) > self.max_length:
            raise ProtocolError(f"{len(raw)} bytes are more than {self.max_length}")
        return raw


class _PackedArray(Kind):
    """A C-contiguous array in one bin field; ``columns`` > 1 makes it two-dimensional."""

    wire: ClassVar[np.dtype[Any]]
    native: ClassVar[type]
    as_is: ClassVar[bool] = False

    def __init__(self, max_items: int, columns: int = 1, low: float | None = None) -> None:
        self.max_items, self.columns, self.low = max_items, columns, low
        self._dimensions = 1 if columns == 1 else 2
        self._row_bytes = 4 * columns
        self._swapped = self.wire != np.dtype(self.native)
        self._empty: npt.NDArray[Any] = np.zeros(0 if columns == 1 else (0, columns), self.native)
        self._empty.setflags(write=False)  # what arrives is read-only anyway

    def pack(self, value: Any) -> bytes:
        if (
            type(value) is np.ndarray
            and value.dtype is self.wire
            and value.ndim == self._dimensions
            and (self._dimensions == 1 or value.shape[1] == self.columns)
        ):
            return value.tobytes()  # in C order, however it lies
        array = np.ascontiguousarray(value, dtype=self.wire)
        if array.ndim != (1 if self.columns == 1 else 2) or (self.columns > 1 and array.shape[1] != self.columns):
            raise ValueError(f"array of shape {array.shape} does not have {self.columns} columns")
        return array.tobytes()

    def unpack(self, raw: Any) -> npt.NDArray[Any]:
        if type(raw) is not bytes:
            raise ProtocolError(f"expected a packed array, got {type(raw).__name__}")
        if not raw:  # most arrays of most messages
            return self._empty
        rows, rest = divmod(len(raw), self._row_bytes)
        if rest:
            raise ProtocolError(f"{len(raw)} bytes do not hold rows of {self.columns} items")
        if rows > self.max_items:
            raise ProtocolError(f"array of {rows} rows is longer than {self.max_items}")
        array: npt.NDArray[Any] = np.frombuffer(raw, self.wire)
        if self._swapped:  # on a big-endian machine
            array = array.astype(self.native)
        # For short arrays ``min`` takes five times as long. NaN counts as the least.
        if self.low is not None and not array.item(array.argmin()) >= self.low:
            raise ProtocolError(f"array item {array.min()} is below {self.low}")
        return array if self.columns == 1 else array.reshape(-1, self.columns)


class Int32s(_PackedArray):
    wire: ClassVar[np.dtype[Any]] = _WIRE_INT32
    native: ClassVar[type] = np.int32


class Float32s(_PackedArray):
    wire: ClassVar[np.dtype[Any]] = _WIRE_FLOAT32
    native: ClassVar[type] = np.float32


class Optional(Kind):
    as_is: ClassVar[bool] = False

    def __init__(self, inner: Kind) -> None:
        self.inner = inner

    def pack(self, value: Any) -> Any:
        return None if value is None else self.inner.pack(value)

    def unpack(self, raw: Any) -> Any:
        return None if raw is None else self.inner.unpack(raw)


class Tuple(Kind):
    as_is: ClassVar[bool] = False

    def __init__(self, inner: Kind, max_items: int) -> None:
        self.inner, self.max_items = inner, max_items

    def pack(self, value: Any) -> list[Any]:
        return [self.inner.pack(item) for item in value]

    def unpack(self, raw: Any) -> tuple[Any, ...]:
        if type(raw) is not list:
            raise ProtocolError(f"expected a list, got {type(raw).__name__}")
        if len(raw) > self.max_items:
            raise ProtocolError(f"list of {len(raw)} items is longer than {self.max_items}")
        return tuple(self.inner.unpack(item) for item in raw)


class Nested(Kind):
    """Another dataclass, in place, as an array without tag and version.

    Args:
        usual: the value that stands there most often, which is packed only once.
    """

    as_is: ClassVar[bool] = False

    def __init__(self, cls: type, usual: Any = None) -> None:
        self.cls = cls
        self.layout = layout_of(cls)
        self._usual = usual
        self._packed = [] if usual is None else self.layout.pack(usual)

    def pack(self, value: Any) -> list[Any]:
        return self._packed if value is self._usual else self.layout.pack(value)

    def unpack(self, raw: Any) -> Any:
        if type(raw) is not list:
            raise ProtocolError(f"expected a {self.cls.__name__}, got {type(raw).__name__}")
        return self.cls(*unpack_fields(self.cls, self.layout, raw))


def getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """As attrgetter, but with a tuple for one name and for none, too."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


class Layout:
    """The fields of a dataclass and their kinds, in order."""

    def __init__(self, fields: list[tuple[str, Kind]]) -> None:
        self.fields = tuple(fields)
        names = [name for name, _ in fields]
        # One call for all fields, then one for each that needs packing: this is on the path of every iteration.
        self._get = getter(names)
        self.unpackers = tuple(kind.unpack for _, kind in fields)
        self._packers = tuple((i, kind.pack) for i, (_, kind) in enumerate(fields) if not kind.as_is)

    def pack(self, value: Any) -> list[Any]:
        packed = list(self._get(value))
        for i, pack in self._packers:
            packed[i] = pack(packed[i])
        return packed


def layout_of(cls: type) -> Layout:
    """The fields of ``cls`` and their kinds, in order. A field without a kind is a programming error."""
    if not is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass")
    hints = get_type_hints(cls, include_extras=True)
    layout = []
    for field in fields(cls):
        hint = hints[field.name]
        kinds = (
            [extra for extra in get_args(hint)[1:] if isinstance(extra, Kind)] if get_origin(hint) is Annotated else []
        )
        if len(kinds) != 1:
            raise TypeError(f"{cls.__name__}.{field.name} needs exactly one kind")
        layout.append((field.name, kinds[0]))
    return Layout(layout)


def unpack_fields(cls: type, layout: Layout, raw: list[Any]) -> list[Any]:
    if len(raw) != len(layout.fields):
        raise ProtocolError(f"{cls.__name__} has {len(layout.fields)} fields, got {len(raw)}")
    try:
        return [unpack(item) for unpack, item in zip(layout.unpackers, raw, strict=True)]
    except ProtocolError:
        raise _blamed(cls, layout, raw) from None


def _blamed(cls: type, layout: Layout, raw: list[Any]) -> ProtocolError:
    """The error of the first field that is wrong, with its name. Only looked for once it is known that there is one."""
    for (name, kind), item in zip(layout.fields, raw, strict=True):
        try:
            kind.unpack(item)
        except ProtocolError as error:
            return ProtocolError(f"{cls.__name__}.{name}: {error.reason}")
    raise AssertionError(f"{cls.__name__}: no field is wrong")


M = TypeVar("M", bound=Message)


class Registry:
    """The set of messages that one protocol version knows, by tag."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.by_tag: dict[int, tuple[type[Message], Layout]] = {}
        self.by_type: dict[type[Message], tuple[int, Layout]] = {}

    def add(self, tag: int) -> Callable[[type[M]], type[M]]:
        """Class decorator that registers a dataclass under ``tag``."""

        def register(cls: type[M]) -> type[M]:
            if tag in self.by_tag:
                raise TypeError(f"tag {tag} is taken by {self.by_tag[tag][0].__name__}")
            layout = layout_of(cls)
            self.by_tag[tag] = (cls, layout)
            self.by_type[cls] = (tag, layout)
            return cls

        return register

    def types(self) -> tuple[type[Message], ...]:
        return tuple(self.by_type)
