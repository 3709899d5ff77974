"""Short arrays behind each other."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagemill_scheduler.arrays import joined

INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(st.tuples(st.lists(INT32, max_size=5), st.sampled_from([1, -1, 2])), min_size=1, max_size=4))
def test_it_is_what_concatenate_gives(parts: list[tuple[list[int], int]]) -> None:
    arrays = [np.array(items, np.int32)[::step] for items, step in parts]
    result = joined(arrays)
    assert result.dtype == np.int32
    assert result.tolist() == np.concatenate(arrays).tolist()
