"""The bases of wire messages and of the dataclasses nested in them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np


class Message:
    """Base of wire messages and of the dataclasses nested in them: equality that understands arrays."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


class Record(Message):
    """A message that is packed as a whole. One that came from the wire keeps its parts, to be sent on as they are."""

    __slots__ = ("_parts",)
