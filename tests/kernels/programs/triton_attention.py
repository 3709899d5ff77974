"""Paged attention in Triton against plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import CAPABILITY, DEVICE, IS_INTERPRETED, PROCESSORS, Case
from torch import Tensor
from triton.runtime.errors import OutOfResources

from pagemill_kernels.gpu import autotune, work
from pagemill_kernels.gpu import kernels as kernels_module
from pagemill_kernels.gpu.kernels import TritonKernels, TritonStep
from pagemill_kernels.gpu.timing import batch_for
from pagemill_kernels.gpu.tuning import Use, candidates
from pagemill_kernels.interface import AttentionBatch, AttentionSpec

MIXED = [(1, 1), (16, 1), (17, 1), (53, 1), (9, 9), (30, 3), (23, 23), (40, 1)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits ranges that are long for the interpreter."""
    monkeypatch.setattr(work, "MIN_DECODE_PART", 16)
    monkeypatch.setattr(work, "MIN_CHUNK_PART", 16)


@pytest.mark.parametrize("group", range(1, 9))
def test_query_heads_share_key_heads(group: int) -> None:
    Case(MIXED, group=group).check()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_sizes_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    Case([(1, 1), (35, 1), (9, 9), (30, 3)], kv_heads=1, head_dim=head_dim, dtype=dtype).check()


@pytest.mark.parametrize("window", [1, 3, 16, 17, 100])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
def test_window_and_soft_cap(window: int, soft_cap: float | None) -> None:
    Case(MIXED, kv_heads=1).check(AttentionSpec(0.3, window, soft_cap))


def test_reduction_is_built_with_the_first_launch_alone() -> None:
    case = Case([(20, 1)], kv_heads=1)
    spec = AttentionSpec(0.25)
    kernels = TritonKernels(PROCESSORS, CAPABILITY)
    most = []
    for _ in range(2):
        step = kernels.prepare(case.batch(), case.cache)
        kernels.rotate_and_write(case.qkv, None, case.cache, step, 1)
        kernels.attention(case.qkv[:, : case.num_heads], case.cache, step, 1, spec)
        most.append([launch.most_tokens for launch in step.launches[None, 2]])
    assert most == [[1], [0]]


@pytest.mark.parametrize("scale", [0.5, 50.0])
def test_soft_cap_alone(scale: float) -> None:
    Case(MIXED, kv_heads=1, dtype=torch.float32).check(AttentionSpec(scale, None, 2.0))


@pytest.mark.parametrize("rows", [[(1, 1)], [(16, 1)], [(17, 1)], [(5, 5)], [(16, 16)], [(33, 1), (33, 33)]])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_single_rows_and_part_filled_blocks(rows: list[tuple[int, int]], block_size: int) -> None:
    Case(rows, kv_heads=1, block_size=block_size).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.usefixtures("short_parts")
def test_split_key_ranges(dtype: torch.dtype, window: int | None) -> None:
    case = Case([(170, 1), (5, 1), (90, 1), (200, 4), (2, 2)], kv_heads=1, group=3, head_dim=64, dtype=dtype)
    step = case.check(AttentionSpec(0.125, window))
    decode, chunk = step.launches[window, 3]
    assert decode.most_tokens == 1
    assert chunk.most_tokens == 4
    assert int(decode.reductions[:, 1].max()) > 1
    assert int(chunk.reductions[:, 1].max()) > 1


@pytest.mark.usefixtures("short_parts")
def test_more_parts_than_are_reduced_at_once() -> None:
    case = Case([(600, 1)], kv_heads=1, dtype=torch.float32)
    step = case.check()
    assert int(step.launches[None, 2][0].reductions[0, 1]) > 32


@pytest.mark.usefixtures("short_parts")
def test_part_that_some_queries_of_a_tile_do_not_see() -> None:
    # The first query of the tile sees no key of the last part, the last one none of the first parts.
    Case([(64, 60)], kv_heads=1, group=1, dtype=torch.float32).check(AttentionSpec(0.25, 9))


def test_few_processors_split_less() -> None:
    rows = [(900, 1), (600, 1)]
    split, whole = (Case(rows, kv_heads=1).check(processors=n) for n in (132, 1))
    assert split.launches[None, 2][0].items.shape[0] > 2
    assert whole.launches[None, 2][0].items.shape[0] <= 4


def test_query_and_cache_of_different_precision() -> None:
    case = Case([(20, 1), (7, 7)], dtype=torch.float16)
    case.qkv = case.qkv.float()
    case.dtype = torch.float32
    case.check()


def test_chunk_with_one_token_and_chunks_longer_than_a_tile() -> None:
    Case([(40, 1), (150, 140), (9, 1), (300, 70)], kv_heads=1, group=4).check()


def test_empty_chunk_is_left_out() -> None:
    case = Case([(5, 1), (8, 3)])
    case.tables.append(case.tables[1])
    case.rows.append((8, 0))
    case.check()


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.usefixtures("short_parts")
def test_tables_that_stay_on_the_device_and_fixed_steps(window: int | None) -> None:
    """One fixed step is refilled with other rows, of which the last one is padding; what is launched stays the same."""
    case = Case([(170, 1), (5, 1), (90, 1), (33, 1)], kv_heads=1, group=3)
    spec, kernels = AttentionSpec(0.25, window), TritonKernels(8, CAPABILITY)
    tables, lines = resident_tables(case)
    slots = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    heads = case.num_heads

    def batch(rows: list[int]) -> AttentionBatch:
        """The case's rows, None of which may be the padding: the table of line 0 names the padding block."""
        contexts = torch.tensor([1 if row < 0 else case.rows[row][0] for row in rows])
        at = torch.tensor([0 if row < 0 else int(case.batch().slot_mapping[row]) for row in rows], dtype=torch.int32)
        slots.copy_(at)
        chosen = torch.tensor([0 if row < 0 else lines[row] for row in rows])
        return AttentionBatch(torch.arange(4), contexts, tables, slots, 3, chosen)

    def attend(step: TritonStep, rows: list[int]) -> Tensor:
        qkv = case.qkv[[max(0, row) for row in rows]]
        kernels.rotate_and_write(qkv, None, case.cache, step, 1)
        return kernels.attention(qkv[:, :heads], case.cache, step, 1, spec)

    expected = case.expected(spec)
    step = kernels.prepare_fixed(batch([-1, -1, -1]), case.cache)
    attend(step, [-1, -1, -1])
    [launch] = step.launches[window, 3]
    grid = launch.items.shape, launch.reductions.shape, launch.items.data_ptr()
    live = case.cache[1:].clone()
    for rows in ([0, 1, 2], [3, 1, -1], [2, 0, 3], [-1, -1, 3]):
        kernels.refill(step, batch(rows))
        result = attend(step, rows)
        assert step.launches[window, 3] == [launch]
        assert (launch.items.shape, launch.reductions.shape, launch.items.data_ptr()) == grid
        eager = attend(kernels.prepare(batch(rows), case.cache), rows)
        for place, row in enumerate(rows):
            if row >= 0:
                for computed in (result, eager):
                    assert_close(computed[place], expected[row])
    written = torch.zeros(case.cache.shape[0] * case.block_size, dtype=torch.bool)
    written[case.batch().slot_mapping] = True
    unwritten = ~written.view(-1, case.block_size)[1:]
    before, after = (t.permute(0, 3, 1, 2, 4, 5).cpu()[unwritten] for t in (live, case.cache[1:]))
    assert torch.equal(before.view(torch.int16), after.view(torch.int16))  # padding rows change no block but their own


def resident_tables(case: Case) -> tuple[Tensor, list[int]]:
    """Tables in a tensor with lines to spare, and the line of each row. Line 0 is of the padding block."""
    lines = [2 * row + 1 for row in range(len(case.rows))]
    width = max(len(table) for table in case.tables) + 3
    tables = torch.full((2 * len(lines) + 1, width), 2**30, dtype=torch.int32)
    tables[0] = 0
    for line, table in zip(lines, case.tables, strict=True):
        tables[line, : len(table)] = torch.tensor(table)
    return tables.to(DEVICE), lines


def assert_close(computed: Tensor, expected: Tensor) -> None:
    difference = (computed.float().cpu() - expected).norm() / expected.norm()
    assert difference < 4e-3


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_mix_of_rows(data: st.DataObject) -> None:
    draw_case(data)


@pytest.mark.full
@settings(max_examples=400, deadline=None)
@given(st.data())
def test_many_mixes_of_rows(data: st.DataObject) -> None:
    draw_case(data)


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_heads(head_dim: int, group: int, dtype: torch.dtype) -> None:
    spec = AttentionSpec(head_dim**-0.5, 21, 5.0)
    Case(MIXED, group=group, head_dim=head_dim, dtype=dtype).check(spec)


@pytest.mark.parametrize("use", ["decode", "chunk"])
def test_all_candidates_of_tuning_compute_the_same(use: Use) -> None:
    """Over a pool that is smaller than what is timed, so that a GPU does not need seconds either."""
    kernels = TritonKernels(8, CAPABILITY)
    cache = torch.randn(4, 1, 2, 16, 1, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    key = kernels.tile_key(use, 2, cache)
    tiles = candidates(key, CAPABILITY)
    assert len(tiles) > 3
    before, results = cache.clone(), []
    for tile in tiles:
        try:
            results.append(kernels.attention_with(tile, key, cache, 2, torch.float16)())
        except OutOfResources:  # as tuning, which leaves it out: more shared memory than this GPU has
            assert tile != tiles[0]
        assert kernels.tile(use, 2, cache) == tile
    assert torch.equal(cache, before)  # whatever is in the pool stays
    values = cache[batch_for(key, cache).block_tables[-1], 0, 1].float().cpu().flatten(0, 1)
    for result in results:  # of the last query, which sees all; queries are zeros, so all values weigh the same
        assert_close(result[-1].view(2, 64), values.mean(0).expand(2, 64))


@pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU's own name and clock are tested by starting a worker")
def test_tuning_takes_the_fastest_and_the_next_start_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = torch.randn(2, 1, 2, 16, 1, 16, dtype=torch.float16)
    timed: list[Tensor] = []

    def timer(run: Callable[[], Tensor]) -> float:
        timed.append(run())
        return 1.0 if len(timed) == 3 else 2.0

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(kernels_module, "device_timer", lambda _: timer)
    monkeypatch.setattr(autotune, "SECONDS", math.inf)
    chosen, tiles = [], {}
    for _ in range(2):
        kernels = TritonKernels(8, CAPABILITY)
        for use in ("decode", "chunk"):
            tiles[use] = candidates(kernels.tile_key(use, 2, cache), CAPABILITY)
        kernels.tune(cache, 2, torch.float16, tmp_path, lambda _: None)
        chosen.append((kernels.tile("decode", 2, cache), kernels.tile("chunk", 2, cache)))
        assert len(timed) == len(tiles["decode"]) + len(tiles["chunk"])
    assert chosen == [(tiles["decode"][2], tiles["chunk"][0])] * 2


def draw_case(data: st.DataObject) -> None:
    lengths = st.integers(1, 80)
    decodes = data.draw(st.lists(lengths, max_size=4))
    chunks = data.draw(st.lists(st.tuples(lengths, lengths), max_size=2))
    rows = [(context, 1) for context in decodes] + [(past + count, count) for past, count in chunks]
    case = Case(
        rows or [(1, 1)],
        kv_heads=data.draw(st.integers(1, 2)),
        group=data.draw(st.integers(1, 5)),
        block_size=data.draw(st.sampled_from([1, 2, 3, 8, 16])),
        dtype=data.draw(st.sampled_from(DTYPES)),
        seed=data.draw(st.integers(0, 99)),
    )
    case.check(AttentionSpec(0.25, data.draw(st.none() | st.integers(1, 50))))
