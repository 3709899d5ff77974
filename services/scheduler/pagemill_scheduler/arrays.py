"""What numpy does slowly for a handful of items, done faster."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagemill_shared.schema import Int32Array


def joined(arrays: Sequence[Int32Array]) -> Int32Array:
    """The items of one-dimensional int32 arrays behind each other; read-only. ``np.concatenate`` takes three times as
    long for a few short ones."""
    return np.frombuffer(b"".join([array.tobytes() for array in arrays]), np.int32)
