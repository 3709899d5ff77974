"""Hypothesis strategies for wire messages, built from the kinds of their fields."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from pagemill_shared import records, schema
from pagemill_shared.messages import WIRE
from pagemill_shared.schema import Kind, Layout, Message, layout_of


def values(kind: Kind) -> st.SearchStrategy[Any]:
    """Values that ``kind`` must carry unharmed; few items, but the ends of every range."""
    match kind:
        case schema.Bool():
            return st.booleans()
        case schema.Int(low=low, high=high):
            return st.integers(low, high) | st.sampled_from([low, high])
        case schema.Float(low=low, high=high):
            return st.floats(low, high, allow_nan=False)
        case schema.Text(max_length=max_length):
            return st.text(max_size=min(max_length, 8)) | st.just("ü" * max_length)
        case schema.Binary(max_length=max_length):
            return st.binary(max_size=min(max_length, 32))
        case schema.Int32s(low=low):
            return _arrays(st.integers(-(2**31) if low is None else int(low), 2**31 - 1), np.dtype(np.int32), kind)
        case schema.Float32s(low=low):
            numbers = st.floats(low, width=32, allow_nan=low is None)
            return _arrays(numbers, np.dtype(np.float32), kind)
        case schema.Optional(inner=inner):
            return st.none() | values(inner)
        case schema.Tuple(inner=inner):
            return st.lists(values(inner), max_size=3).map(tuple)
        case schema.Nested(cls=cls, layout=layout):
            return _fields(layout).map(lambda items: cls(*items))
        case records.Packed(layout=records.RecordLayout(cls=cls)):
            return _fields(layout_of(cls)).map(lambda items: cls(*items))
        case records.PackedSequence(layout=records.RecordLayout(cls=cls)):
            return st.lists(_fields(layout_of(cls)).map(lambda items: cls(*items)), max_size=3).map(tuple)
    raise TypeError(f"no strategy for {type(kind).__name__}")


def messages(*types: type[Message]) -> st.SearchStrategy[Message]:
    """Any message, or any of the given types."""
    return st.one_of([_message(cls) for cls in types or WIRE.types()])


def _message(cls: type[Message]) -> st.SearchStrategy[Message]:
    _, layout = WIRE.by_type[cls]
    return _fields(layout).map(lambda items: cls(*items))


def _fields(layout: Layout) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(*(values(kind) for _, kind in layout.fields))


def _arrays(items: st.SearchStrategy[Any], dtype: np.dtype[Any], kind: Any) -> st.SearchStrategy[Any]:
    if kind.columns == 1:
        return st.lists(items, max_size=5).map(lambda rows: np.array(rows, dtype))
    rows = st.lists(st.tuples(*[items] * kind.columns), max_size=5)
    return rows.map(lambda rows: np.array(rows, dtype).reshape(-1, kind.columns))
