"""The compiled kernels against plain torch, for every instruction set that this machine has or emulates."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagemill_testing.cpu_kernels import library_params, opened
from torch import Tensor

from pagemill_kernels.cpu.kernels import CpuKernels
from pagemill_kernels.interface import LARGEST_NUMBER, AttentionBatch, AttentionSpec, Kernels
from pagemill_kernels.reference import TorchKernels, dequantised_entries, quantised_entries

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MIXED = [(1, 1), (4, 1), (17, 1), (600, 1), (70, 70), (90, 3), (7, 7), (130, 2), (2, 1)]


@pytest.fixture(scope="module", params=library_params())
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    with opened(request.param, tmp_path_factory) as library:
        yield library


@pytest.fixture
def kernels(library: ctypes.CDLL) -> CpuKernels:
    return CpuKernels(library, "test")


@dataclass
class Case:
    """Rows as (context length, query length), decode rows first, over a pool that is larger than they need."""

    rows: list[tuple[int, int]]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    block_size: int = 16
    layers: int = 2
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        blocks = [-(-context // self.block_size) for context, _ in self.rows]
        free = (torch.randperm(sum(blocks) + 5, generator=g) + 1).tolist()
        self.tables = [[free.pop() for _ in range(count)] for count in blocks]
        shape = (sum(blocks) + 6, self.layers, 2, self.block_size, self.kv_heads, self.head_dim)
        self.cache = torch.randn(shape, generator=g).to(self.dtype)
        total = sum(query for _, query in self.rows)
        heads = self.kv_heads * (self.group + 2)
        self.qkv = torch.randn(total, heads, self.head_dim, generator=g).to(self.dtype)

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.group

    def batch(self) -> AttentionBatch:
        width = max(len(table) for table in self.tables)
        slots = [
            table[position // self.block_size] * self.block_size + position % self.block_size
            for (context, query), table in zip(self.rows, self.tables, strict=True)
            for position in range(context - query, context)
        ]
        decodes = next((i for i, (_, query) in enumerate(self.rows) if query > 1), len(self.rows))
        return AttentionBatch(
            query_starts=torch.tensor(np.cumsum([0, *(query for _, query in self.rows)])),
            context_lens=torch.tensor([context for context, _ in self.rows]),
            # What lies beyond a row's blocks must not be looked at.
            block_tables=torch.tensor([table + [1 << 40] * (width - len(table)) for table in self.tables]),
            slot_mapping=torch.tensor(slots),
            num_decodes=decodes,
        )

    def rotary(self, width: int) -> tuple[Tensor, Tensor]:
        angles = torch.rand(self.qkv.shape[0], width // 2, generator=torch.Generator().manual_seed(self.seed)) * 6
        return (
            torch.cat((angles.cos(), angles.cos()), 1).unsqueeze(1).to(self.dtype),
            torch.cat((-angles.sin(), angles.sin()), 1).unsqueeze(1).to(self.dtype),
        )

    def run(
        self, kernels: Kernels, spec: AttentionSpec, rotary_dim: int = 0, layer: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attended, the cache and the rotated qkv afterwards."""
        cache, qkv = self.cache.clone(), self.qkv.clone()
        step = kernels.prepare(self.batch(), cache)
        kernels.rotate_and_write(qkv, self.rotary(rotary_dim) if rotary_dim else None, cache, step, layer)
        return kernels.attention(qkv[:, : self.num_heads], cache, step, layer, spec), cache, qkv

    def check(self, kernels: CpuKernels, spec: AttentionSpec | None = None, rotary_dim: int = 0) -> None:
        spec = spec or AttentionSpec(self.head_dim**-0.5)
        fast = self.run(kernels, spec, rotary_dim)
        assert kernels.calls == {"rotate_and_write": 1, "attention": 1}, "the compiled kernels did not run"
        kernels.calls.clear()
        for result, expected in zip(fast, self.run(TorchKernels(), spec, rotary_dim), strict=True):
            assert result.dtype == self.dtype
            torch.testing.assert_close(result, expected, atol=TOLERANCE[self.dtype], rtol=TOLERANCE[self.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("cuts", [[600, 601], [1, 2, 3], [40, 599, 600, 601, 602, 640], [*range(590, 650)]])
def test_a_token_has_the_same_bits_however_it_is_computed(
    kernels: CpuKernels, cuts: list[int], window: int | None, dtype: torch.dtype
) -> None:
    """A prompt of 601 tokens and 59 generated ones, all at once, as after a preemption, and in pieces: one by one at
    the end, as when they were generated; one token of the prompt left, as behind a hit in the prefix cache."""
    prompt, length = 601, 660
    case = Case([(length, length)], group=3, kv_heads=2, dtype=dtype)
    spec = AttentionSpec(case.head_dim**-0.5, window)
    cache = case.cache.clone()
    whole = case.batch()

    def attended(begin: int, end: int) -> Tensor:
        batch = AttentionBatch(
            torch.tensor([0, end - begin]),
            torch.tensor([end]),
            whole.block_tables,
            whole.slot_mapping[begin:end],
            int(end - begin == 1),
            generated_from=torch.tensor([prompt]),
        )
        step = kernels.prepare(batch, cache)
        qkv = case.qkv[begin:end].clone()
        kernels.rotate_and_write(qkv, None, cache, step, 1)
        return kernels.attention(qkv[:, : case.num_heads], cache, step, 1, spec)

    at_once = attended(0, length)
    ends = [*cuts, *range(cuts[-1] + 1, length + 1)]
    pieces = [attended(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    assert torch.equal(torch.cat(pieces), at_once)


@pytest.mark.parametrize("group", range(1, 9))
def test_query_heads_share_key_heads(kernels: CpuKernels, group: int) -> None:
    Case(MIXED, group=group).check(kernels)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_head_sizes_and_dtypes(kernels: CpuKernels, head_dim: int, dtype: torch.dtype) -> None:
    Case(MIXED, head_dim=head_dim, dtype=dtype).check(kernels, rotary_dim=head_dim)


@pytest.mark.parametrize("window", [1, 3, 16, 63, 64, 65, 100, 513, 5000])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_window_and_soft_cap(kernels: CpuKernels, window: int, soft_cap: float | None, dtype: torch.dtype) -> None:
    Case(MIXED, dtype=dtype).check(kernels, AttentionSpec(0.3, window, soft_cap))


def test_soft_cap_alone(kernels: CpuKernels) -> None:
    Case(MIXED).check(kernels, AttentionSpec(0.5, None, 20.0))


@pytest.mark.parametrize(
    "rows", [[(1, 1)], [(16, 1)], [(17, 1)], [(5, 5)], [(16, 16)], [(33, 1), (33, 33)], [(2, 2)], [(64, 64)]]
)
@pytest.mark.parametrize("block_size", [1, 5, 16, 128])
def test_single_rows_and_part_filled_blocks(kernels: CpuKernels, rows: list[tuple[int, int]], block_size: int) -> None:
    Case(rows, block_size=block_size).check(kernels)


@pytest.mark.parametrize("window", [None, 300, 700])
def test_contexts_of_several_ranges(kernels: CpuKernels, window: int | None) -> None:
    rows = [(511, 1), (512, 1), (513, 1), (1600, 1), (5000, 1), (4500, 150), (2048, 2048), (2049, 5)]
    Case(rows, kv_heads=1, group=3).check(kernels, AttentionSpec(0.125, window))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mix_of_rows(kernels: CpuKernels, data: st.DataObject) -> None:
    lengths = st.integers(1, 140)
    decodes = data.draw(st.lists(st.integers(1, 1200), max_size=6))
    chunks = data.draw(st.lists(st.tuples(st.integers(0, 140), lengths), max_size=3))
    rows = [(context, 1) for context in decodes] + [(past + count, count) for past, count in chunks]
    case = Case(
        rows or [(1, 1)],
        kv_heads=data.draw(st.integers(1, 3)),
        group=data.draw(st.integers(1, 9)),
        head_dim=data.draw(st.sampled_from([16, 48, 64])),
        block_size=data.draw(st.sampled_from([1, 2, 3, 8, 16])),
        dtype=data.draw(st.sampled_from(list(TOLERANCE))),
        seed=data.draw(st.integers(0, 99)),
    )
    spec = AttentionSpec(0.125, data.draw(st.none() | st.integers(1, 200)), data.draw(st.none() | st.just(5.0)))
    case.check(kernels, spec, rotary_dim=data.draw(st.sampled_from([0, 8, 16])))


@pytest.mark.parametrize("rows", [MIXED, [(3000, 1)], [(4500, 70)]])
def test_a_row_depends_neither_on_its_mates_nor_on_threads(kernels: CpuKernels, rows: list[tuple[int, int]]) -> None:
    spec = AttentionSpec(0.125)
    case = Case(rows, group=3)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = case.run(kernels, spec)[0]
        torch.set_num_threads(3)
        assert torch.equal(case.run(kernels, spec)[0], together)
    finally:
        torch.set_num_threads(threads)
    first = 0
    for row, (context, query) in enumerate(rows):
        alone = Case([(context, query)], group=3)
        alone.cache, alone.tables = case.cache, [case.tables[row]]
        alone.qkv = case.qkv[first : first + query]
        assert torch.equal(alone.run(kernels, spec)[0], together[first : first + query])
        first += query


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("window", [None, 3])
def test_slots_beyond_the_context_have_no_effect(kernels: CpuKernels, poison: float, window: int | None) -> None:
    case = Case(MIXED)
    spec = AttentionSpec(0.25, window)
    clean = case.run(kernels, spec)[0]
    used = torch.zeros(case.cache.shape[0], case.block_size, dtype=torch.bool)
    for (context, _), table in zip(case.rows, case.tables, strict=True):
        for position in range(context):
            used[table[position // 16], position % 16] = True
    case.cache.permute(0, 3, 1, 2, 4, 5)[~used] = poison
    torch.testing.assert_close(case.run(kernels, spec)[0], clean, atol=0, rtol=0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_faulty_row_harms_itself_alone(kernels: CpuKernels, poison: float) -> None:
    case = Case([(20, 1), (600, 1), (40, 40), (30, 30)])
    spec = AttentionSpec(0.25, None, 3.0)
    clean = case.run(kernels, spec)[0]
    faulty = [1, *range(2, 42)]
    case.cache[case.tables[1]] = poison
    case.qkv[2:42] = poison
    result = case.run(kernels, spec)[0]
    healthy = [i for i in range(72) if i not in faulty]
    assert torch.equal(result[healthy], clean[healthy])
    assert not result[faulty].isfinite().any()


def test_writing_touches_its_own_slots_alone(kernels: CpuKernels) -> None:
    case = Case([(6, 1), (9, 4)])
    _, after, _ = case.run(kernels, AttentionSpec(0.25), layer=0)
    before = case.cache.clone()
    for token, slot in enumerate(case.batch().slot_mapping.tolist()):
        key, value = case.qkv[token, case.num_heads :].view(2, case.kv_heads, case.head_dim)
        before[slot // 16, 0, 0, slot % 16] = key
        before[slot // 16, 0, 1, slot % 16] = value
    assert torch.equal(after, before)


def test_padding_rows_change_no_live_block(kernels: CpuKernels) -> None:
    case = Case([(6, 1), (1, 1), (1, 1)])
    case.tables[1] = case.tables[2] = [0]
    live_slot = int(case.batch().slot_mapping[0])
    _, after, _ = case.run(kernels, AttentionSpec(0.25))
    changed = (after[1:] != case.cache[1:]).flatten(3).any(-1).any(1)  # [block, 2, …] any slot of a block
    assert changed.any(1).nonzero().flatten().tolist() == [live_slot // 16 - 1]


@pytest.mark.parametrize("cache_dtype", list(TOLERANCE))
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_cache_of_another_dtype(kernels: CpuKernels, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    case = Case(MIXED, dtype=dtype)
    case.cache = case.cache.to(cache_dtype)
    fast, fast_cache, _ = case.run(kernels, AttentionSpec(0.125), rotary_dim=64)
    plain, plain_cache, _ = case.run(TorchKernels(), AttentionSpec(0.125), rotary_dim=64)
    tolerance = max(TOLERANCE[dtype], TOLERANCE[cache_dtype])
    torch.testing.assert_close(fast, plain, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(fast_cache, plain_cache, atol=tolerance, rtol=tolerance)
    assert kernels.calls == {"rotate_and_write": 1, "attention": 1}


EIGHT_BITS = pytest.mark.parametrize("cache_dtype", list(LARGEST_NUMBER))


@EIGHT_BITS
@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("group", "block_size", "window"), [(1, 16, None), (3, 5, 100), (5, 16, None)])
def test_a_cache_in_8_bits(
    kernels: CpuKernels,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
    group: int,
    block_size: int,
    window: int | None,
) -> None:
    case = Case(MIXED, dtype=dtype, head_dim=head_dim, group=group, block_size=block_size)
    case.cache = quantised_entries(case.cache, cache_dtype)
    case.qkv[0, -1] = 0
    spec = AttentionSpec(head_dim**-0.5, window)
    fast, fast_cache, _ = case.run(kernels, spec)
    plain, plain_cache, _ = case.run(TorchKernels(), spec)
    torch.testing.assert_close(fast, plain, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(fast_cache.view(torch.int8), plain_cache.view(torch.int8))  # scales included
    assert kernels.calls == {"rotate_and_write": 1, "attention": 1}


def test_floats_of_8_bits_are_rounded_to_the_nearest(kernels: CpuKernels) -> None:
    """Every number of the format, what lies half-way between neighbours, and what lies just beside that."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (numbers[1:] + numbers[:-1]) / 2
    wanted = torch.cat((numbers, between, between.nextafter(numbers[1:]), between.nextafter(numbers[:-1])))
    wanted = torch.cat((wanted, -wanted))
    case = Case([(16, 16)], kv_heads=3, head_dim=64, block_size=16)
    entries = case.qkv[:, case.num_heads :].flatten(0, 1)  # [96, 64], a view
    entries[:, 1:] = wanted.repeat(6)[: 96 * 63].view(96, 63)
    entries[:, 0] = 448  # a scale of 1
    case.qkv[:, case.num_heads :] = entries.view(16, 6, 64)
    case.cache = quantised_entries(case.cache, torch.float8_e4m3fn)
    _, fast, _ = case.run(kernels, AttentionSpec(0.125))
    _, plain, _ = case.run(TorchKernels(), AttentionSpec(0.125))
    assert torch.equal(fast.view(torch.int8), plain.view(torch.int8))
    keys = dequantised_entries(fast)[case.tables[0][0], 1, 0]
    assert torch.equal(keys, case.qkv[:, case.num_heads : case.num_heads + 3].to(torch.float8_e4m3fn).float())


@EIGHT_BITS
def test_8_bits_of_rotated_keys(kernels: CpuKernels, cache_dtype: torch.dtype) -> None:
    case = Case(MIXED)
    case.cache = quantised_entries(case.cache, cache_dtype)
    fast, fast_cache, _ = case.run(kernels, AttentionSpec(0.125), rotary_dim=64)
    plain, plain_cache, _ = case.run(TorchKernels(), AttentionSpec(0.125), rotary_dim=64)
    # Keys that are rounded differently in the last bit may end in the next number of 8 bits.
    scale = plain_cache.view(torch.int8)[..., -4:].contiguous().view(torch.float32).max()
    one = float(scale) * (1 if cache_dtype == torch.int8 else 32)
    torch.testing.assert_close(dequantised_entries(fast_cache), dequantised_entries(plain_cache), atol=one, rtol=0)
    torch.testing.assert_close(fast, plain, atol=one, rtol=0)


@EIGHT_BITS
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_8_bits_that_are_not_finite_harm_their_row_alone(
    kernels: CpuKernels, poison: float, cache_dtype: torch.dtype
) -> None:
    rows = [(21, 1), (600, 1), (40, 40)]
    case = Case(rows)
    # Bytes of unwritten slots: scales that are not numbers.
    table, context = case.tables[0], rows[0][0]
    written = quantised_entries(case.cache, cache_dtype)
    written.view(torch.int8)[table[-1], :, :, context % 16 :] = -1
    case.cache = written
    before, _, _ = case.run(kernels, AttentionSpec(0.125))
    assert before.isfinite().all()
    case.qkv[1, -1, 3] = poison  # a value of the second row
    after, _, _ = case.run(kernels, AttentionSpec(0.125))
    assert torch.equal(after[[0, *range(2, 42)]], before[[0, *range(2, 42)]])
    assert not after[1].isfinite().all()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_are_copied_whole(kernels: CpuKernels, dtype: torch.dtype, threads: int) -> None:
    case = Case([(640, 1)], dtype=dtype, layers=20)
    cache, before = case.cache.clone(), case.cache
    pairs = torch.tensor([[source, source + 20] for source in range(1, 20)])
    set_before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        moved = kernels.copy_blocks(cache, cache, pairs)
    finally:
        torch.set_num_threads(set_before)
    assert moved == 19 * before[0].numel() * dtype.itemsize
    for source, destination in pairs.tolist():
        assert torch.equal(cache[destination], before[source])
    untouched = [b for b in range(before.shape[0]) if b not in pairs[:, 1].tolist()]
    assert torch.equal(cache[untouched], before[untouched])
    host = torch.zeros(4, *cache.shape[1:], dtype=dtype)
    kernels.copy_blocks(cache, host, torch.tensor([[5, 0], [2, 3]]))
    assert torch.equal(host[[0, 3]], before[[5, 2]])
    assert kernels.copy_blocks(cache, host, torch.zeros(0, 2, dtype=torch.int64)) == 0
    assert kernels.calls == {"copy_blocks": 3}


def test_offsets_beyond_31_bits(kernels: CpuKernels, library: ctypes.CDLL) -> None:
    if not isinstance(library, ctypes.CDLL):
        pytest.skip("such a cache cannot be sent to an emulator")
    # Lazily backed: only the touched pages take memory.
    blocks, layers, block_size, kv_heads, head_dim = 17_000, 64, 16, 2, 64
    shape = (blocks, layers, 2, block_size, kv_heads, head_dim)
    cache = torch.from_numpy(np.zeros(shape, np.int16)).view(torch.bfloat16)
    assert cache.numel() > 2**32
    last = blocks - 1
    qkv = torch.randn(3, 6, head_dim).to(torch.bfloat16)
    batch = AttentionBatch(
        torch.tensor([0, 1, 3]),
        torch.tensor([1, 2]),
        torch.tensor([[last], [last - 1]]),
        torch.tensor([last * block_size, (last - 1) * block_size, (last - 1) * block_size + 1]),
        1,
    )
    step = kernels.prepare(batch, cache)
    kernels.rotate_and_write(qkv, None, cache, step, layers - 1)
    result = kernels.attention(qkv[:, :2], cache, step, layers - 1, AttentionSpec(0.125))
    assert torch.equal(cache[last, layers - 1, 0, 0], qkv[0, 2:4])
    torch.testing.assert_close(result[:2], qkv[:2, 4:].flatten(1))  # one key: its value
    kernels.copy_blocks(cache, cache, torch.tensor([[last, 1]]))
    assert torch.equal(cache[1], cache[last])
    assert sum(kernels.calls.values()) == 3


def test_chunks_equal_the_whole(kernels: CpuKernels) -> None:
    whole = Case([(150, 150)])
    spec = AttentionSpec(0.25)
    expected, _, _ = whole.run(kernels, spec)
    cache = torch.full_like(whole.cache, torch.nan)
    for bounds in ([0, 1, 150], [0, 16, 17, 32, 150], [0, 149, 150]):
        cache.fill_(torch.nan)
        for first, last in itertools.pairwise(bounds):
            batch = AttentionBatch(
                torch.tensor([0, last - first]),
                torch.tensor([last]),
                torch.tensor(whole.tables),
                torch.tensor([whole.tables[0][p // 16] * 16 + p % 16 for p in range(first, last)]),
                num_decodes=0,
            )
            step = kernels.prepare(batch, cache)
            part = whole.qkv[first:last].clone()
            kernels.rotate_and_write(part, None, cache, step, 1)
            result = kernels.attention(part[:, : whole.num_heads], cache, step, 1, spec)
            torch.testing.assert_close(result, expected[first:last], atol=1e-5, rtol=1e-5)


def test_plain_torch_serves_what_the_kernels_do_not(kernels: CpuKernels) -> None:
    spec = AttentionSpec(0.25)
    case = Case(MIXED, head_dim=18)
    for result, expected in zip(case.run(kernels, spec, 18), case.run(TorchKernels(), spec, 18), strict=True):
        assert torch.equal(result, expected)
    strided = torch.zeros(16, 1, 2, 16, 2, 64)[::2]
    kernels.copy_blocks(strided, torch.zeros(4, 1, 2, 16, 2, 64), torch.tensor([[0, 1]]))
    assert kernels.calls == {"rotate_and_write:torch": 1, "attention:torch": 1, "copy_blocks:torch": 1}
