"""Work items of fixed launches: as many for any lengths, and doing the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill_kernels.gpu.tiles import chunk_tile, decode_tile
from pagemill_kernels.gpu.work import Rows, Work, most_items, padded, plan_work


def plan(lengths: list[int], window: int | None = None, kv_heads: int = 8, processors: int = 132) -> Work:
    contexts, index = np.array(lengths), np.arange(len(lengths))
    rows = Rows(index, index, np.ones_like(index), contexts)
    tile = decode_tile(4, 128, 2, 90)
    return plan_work(
        rows, window=window, group=4, num_kv_heads=kv_heads, block_size=16, tile=tile, num_processors=processors
    )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 131_072) | st.integers(1, 600), min_size=1, max_size=40),
    st.none() | st.integers(1, 9000),
    st.sampled_from([1, 2, 7, 8, 64]),
    st.sampled_from([1, 46, 132, 148]),
)
def test_no_batch_has_more_items_than_its_number_of_rows_allows(
    lengths: list[int], window: int | None, kv_heads: int, processors: int
) -> None:
    work = plan(lengths, window, kv_heads, processors)
    fixed = padded(work, most_items(len(lengths), kv_heads, processors), len(lengths))
    assert fixed.items.shape[0] == fixed.num_partials == most_items(len(lengths), kv_heads, processors)
    assert fixed.reductions.shape[0] == len(lengths)
    assert work.num_partials <= fixed.num_partials
    assert fixed.items[: len(work.items)].tolist() == work.items.tolist()
    assert fixed.reductions[: len(work.reductions)].tolist() == work.reductions.tolist()
    _, _, count, _, begin, end, slot, _ = fixed.items[len(work.items) :].T
    assert not count.any()
    assert not (end - begin).any()
    assert (slot == -1).all()
    assert not fixed.reductions[len(work.reductions) :].any()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="64 items and 1 reductions do not fit"):
        padded(plan([65_536]), 63, 1)


def test_wide_heads_have_four_warps_where_eight_spill() -> None:
    assert [chunk_tile(4, 256, 2, capability).warps for capability in (80, 89, 90, 100, 103, 120)] == [8, 8, 8, 4, 4, 8]
    assert chunk_tile(100, 256, 2, 100).warps == 8
    assert chunk_tile(4, 128, 2, 100).warps == 8
