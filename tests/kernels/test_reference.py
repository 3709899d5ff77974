"""The torch kernels against an oracle that goes token by token and head by head."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagemill_kernels import reference
from pagemill_kernels.interface import AttentionBatch, AttentionSpec
from pagemill_kernels.reference import TorchKernels
from pagemill_kernels.select import select_kernels

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Case:
    """Rows as (context length, query length), decode rows first, over a pool that is larger than they need."""

    rows: list[tuple[int, int]]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    block_size: int = 4
    layers: int = 3
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
            block_tables=torch.tensor([table + [0] * (width - len(table)) for table in self.tables]),
            slot_mapping=torch.tensor(slots),
            num_decodes=decodes,
        )

    def run(self, spec: AttentionSpec, layer: int = 1) -> Tensor:
        kernels = TorchKernels()
        step = kernels.prepare(self.batch(), self.cache)
        kernels.rotate_and_write(self.qkv, None, self.cache, step, layer)
        return kernels.attention(self.qkv[:, : self.num_heads], self.cache, step, layer, spec)

    def oracle(self, spec: AttentionSpec, layer: int = 1) -> Tensor:
        """Expects the keys to be written already."""
        outputs, token = [], 0
        for (context, query), table in zip(self.rows, self.tables, strict=True):
            for position in range(context - query, context):
                first = 0 if spec.window is None else max(0, position - spec.window + 1)
                heads = []
                for head in range(self.num_heads):
                    keys, values = (
                        torch.stack(
                            [
                                self.cache[
                                    table[p // self.block_size], layer, kind, p % self.block_size, head // self.group
                                ]
                                for p in range(first, position + 1)
                            ]
                        ).double()
                        for kind in (0, 1)
                    )
                    scores = keys @ self.qkv[token, head].double() * spec.scale
                    if spec.soft_cap is not None:
                        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
                    heads.append(scores.softmax(0) @ values)
                outputs.append(torch.cat(heads))
                token += 1
        return torch.stack(outputs)

    def check(self, spec: AttentionSpec | None = None) -> None:
        spec = spec or AttentionSpec(self.head_dim**-0.5)
        result = self.run(spec)
        assert result.dtype == self.dtype
        difference = (result.double() - self.oracle(spec)).abs().max()
        assert difference < TOLERANCE[self.dtype]


MIXED = [(1, 1), (4, 1), (5, 1), (23, 1), (9, 9), (10, 3), (7, 7), (2, 1)]


@pytest.mark.parametrize("group", range(1, 9))
def test_query_heads_share_key_heads(group: int) -> None:
    Case(MIXED, group=group).check()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_head_sizes_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    Case(MIXED, head_dim=head_dim, dtype=dtype).check()


@pytest.mark.parametrize("window", [1, 3, 4, 5, 16, 100])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_window_and_soft_cap(window: int, soft_cap: float | None, dtype: torch.dtype) -> None:
    Case(MIXED, dtype=dtype).check(AttentionSpec(0.3, window, soft_cap))


def test_soft_cap_alone() -> None:
    Case(MIXED).check(AttentionSpec(0.5, None, 2.0))


@pytest.mark.parametrize("rows", [[(1, 1)], [(16, 1)], [(17, 1)], [(5, 5)], [(16, 16)], [(33, 1), (33, 33)]])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_single_rows_and_part_filled_blocks(rows: list[tuple[int, int]], block_size: int) -> None:
    Case(rows, block_size=block_size).check()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_mix_of_rows(data: st.DataObject) -> None:
    lengths = st.integers(1, 40)
    decodes = data.draw(st.lists(lengths, max_size=6))
    chunks = data.draw(st.lists(st.tuples(lengths, lengths), max_size=3))
    rows = [(context, 1) for context in decodes] + [(past + count, count) for past, count in chunks]
    if not rows:
        rows = [(1, 1)]
    case = Case(
        rows,
        kv_heads=data.draw(st.integers(1, 3)),
        group=data.draw(st.integers(1, 4)),
        block_size=data.draw(st.sampled_from([1, 2, 3, 8, 16])),
        seed=data.draw(st.integers(0, 99)),
    )
    case.check(AttentionSpec(0.25, data.draw(st.none() | st.integers(1, 50))))


def test_rows_of_very_different_length_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "GROUP_COST_BLOCKS", 2)
    case = Case([(n, 1) for n in (3, 90, 2, 45, 88, 1, 40, 7)])
    batch = case.batch()
    groups = reference._group_by_length(batch, case.block_size, None, 1000)
    assert len(groups) > 2
    assert sorted(torch.cat(groups).tolist()) == list(range(8))
    case.check()


def test_groups_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(40, 1)] * 7)
    monkeypatch.setattr(reference, "GATHER_BYTES", 3 * 10 * 4 * 2 * 2 * 16 * 4)
    assert [group.numel() for group in reference._group_by_length(case.batch(), 4, None, 30)] == [3, 3, 1]
    case.check()


@pytest.mark.parametrize("window", [None, 5, 700])
def test_long_chunk_is_computed_in_tiles(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "QUERY_TILE", 32)
    largest = 0
    whole = reference._causal_mask

    def noted(queries: int, keys: int, *rest: object) -> Tensor:
        nonlocal largest
        largest = max(largest, queries * keys)
        return whole(queries, keys, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(reference, "_causal_mask", noted)
    Case([(150, 150), (100, 70)], kv_heads=1, group=2, block_size=16).check(AttentionSpec(0.25, window))
    assert 0 < largest <= 32 * 150


def test_mask_of_a_long_context_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MASK_ELEMENTS", 1024)
    Case([(200, 60)], kv_heads=1, group=1).check()


def test_fully_masked_leading_keys_do_no_harm() -> None:
    # More keys than the kernel of scaled_dot_product_attention takes at once lie before the window of the last query.
    case = Case([(1400, 900), (1300, 1)][::-1], kv_heads=1, group=1, block_size=16, layers=2)
    spec = AttentionSpec(0.25, 600)
    result = case.run(spec)
    assert torch.isfinite(result).all()


def test_chunks_equal_the_whole() -> None:
    whole = Case([(50, 50)])
    spec = AttentionSpec(0.25)
    expected = whole.run(spec)
    qkv, table = whole.qkv, whole.tables[0]
    for bounds in ([0, 1, 50], [0, 16, 17, 32, 50], [0, 49, 50]):
        chunked = Case([(50, 50)])
        chunked.cache.fill_(torch.nan)
        kernels = TorchKernels()
        for first, last in itertools.pairwise(bounds):
            batch = AttentionBatch(
                torch.tensor([0, last - first]),
                torch.tensor([last]),
                torch.tensor([table]),
                torch.tensor([table[p // 4] * 4 + p % 4 for p in range(first, last)]),
                num_decodes=1 if last - first == 1 else 0,
            )
            step = kernels.prepare(batch, chunked.cache)
            part = qkv[first:last].clone()
            kernels.rotate_and_write(part, None, chunked.cache, step, 1)
            result = kernels.attention(part[:, : whole.num_heads], chunked.cache, step, 1, spec)
            torch.testing.assert_close(result, expected[first:last], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("window", [None, 3])
def test_slots_beyond_the_context_have_no_effect(poison: float, window: int | None) -> None:
    case = Case(MIXED)
    spec = AttentionSpec(0.25, window)
    clean = case.run(spec)
    used = torch.zeros(case.cache.shape[0], case.block_size, dtype=torch.bool)
    for (context, _), table in zip(case.rows, case.tables, strict=True):
        for position in range(context):
            used[table[position // 4], position % 4] = True
    case.cache.permute(0, 3, 1, 2, 4, 5)[~used] = poison
    torch.testing.assert_close(case.run(spec), clean, atol=0, rtol=0)


def test_writing_touches_its_own_slots_alone() -> None:
    case = Case([(6, 1), (9, 4)])
    before = case.cache.clone()
    kernels = TorchKernels()
    batch = case.batch()
    kernels.rotate_and_write(case.qkv, None, case.cache, kernels.prepare(batch, case.cache), 2)
    for token, slot in enumerate(batch.slot_mapping.tolist()):
        key, value = case.qkv[token, case.num_heads :].view(2, case.kv_heads, case.head_dim)
        before[slot // 4, 2, 0, slot % 4] = key
        before[slot // 4, 2, 1, slot % 4] = value
    assert torch.equal(case.cache, before)


def test_padding_rows_change_no_live_block() -> None:
    case = Case([(6, 1), (1, 1), (1, 1)])
    case.tables[1] = case.tables[2] = [0]
    live = case.cache[1:].clone()
    live_slot = case.batch().slot_mapping[0]
    case.run(AttentionSpec(0.25))
    changed = (case.cache[1:] != live).flatten(3).any(-1).any(1)  # [block, 2, …] any slot of a block
    assert changed.any(1).nonzero().flatten().tolist() == [int(live_slot) // 4 - 1]


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotation(rotary_dim: int) -> None:
    case = Case([(3, 3), (8, 2)])
    angles = torch.rand(5, rotary_dim // 2)
    tables = (
        torch.cat((angles.cos(), angles.cos()), 1).unsqueeze(1),
        torch.cat((-angles.sin(), angles.sin()), 1).unsqueeze(1),
    )
    given_qkv = case.qkv.clone()
    kernels = TorchKernels()
    kernels.rotate_and_write(case.qkv, tables, case.cache, kernels.prepare(case.batch(), case.cache), 0)
    half = rotary_dim // 2
    for token in range(5):
        for head in range(case.num_heads + case.kv_heads):
            for pair in range(half):
                turned = torch.view_as_complex(
                    torch.stack((given_qkv[token, head, pair], given_qkv[token, head, pair + half]))
                ) * torch.polar(torch.tensor(1.0), angles[token, pair])
                assert math.isclose(case.qkv[token, head, pair], turned.real, abs_tol=1e-5)
                assert math.isclose(case.qkv[token, head, pair + half], turned.imag, abs_tol=1e-5)
    assert torch.equal(case.qkv[..., rotary_dim:], given_qkv[..., rotary_dim:])
    values = slice(case.num_heads + case.kv_heads, None)
    assert torch.equal(case.qkv[:, values], given_qkv[:, values])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_blocks_are_copied_whole(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(40, 1)], dtype=dtype)
    monkeypatch.setattr(reference, "COPY_BYTES", 3 * case.cache.stride(0) * dtype.itemsize)
    before = case.cache.clone()
    kernels = TorchKernels()
    pairs = torch.tensor([[1, 9], [2, 10], [2, 11], [3, 12], [4, 13]])
    moved = kernels.copy_blocks(case.cache, case.cache, pairs)
    assert moved == 5 * before[0].numel() * dtype.itemsize
    for source, destination in pairs.tolist():
        assert torch.equal(case.cache[destination], before[source])
    untouched = [b for b in range(before.shape[0]) if b not in pairs[:, 1].tolist()]
    assert torch.equal(case.cache[untouched], before[untouched])


def test_swap_out_and_in_gives_the_blocks_back() -> None:
    case = Case([(30, 1)])
    before = case.cache.clone()
    host = torch.zeros(4, *case.cache.shape[1:])
    kernels = TorchKernels()
    kernels.copy_blocks(case.cache, host, torch.tensor([[5, 0], [2, 3]]))
    case.cache[[5, 2]] = torch.nan
    kernels.copy_blocks(host, case.cache, torch.tensor([[0, 7], [3, 2]]))
    assert torch.equal(case.cache[7], before[5])
    assert torch.equal(case.cache[2], before[2])
    assert kernels.calls["copy_blocks"] == 2


def test_offsets_beyond_31_bits() -> None:
    # Lazily backed: only the touched pages take memory.
    blocks, layers, block_size, kv_heads, head_dim = 17_000, 64, 16, 2, 64
    shape = (blocks, layers, 2, block_size, kv_heads, head_dim)
    cache = torch.from_numpy(np.zeros(shape, np.int16)).view(torch.bfloat16)
    assert cache.numel() > 2**32
    last = blocks - 1
    qkv = torch.randn(1, 6, head_dim).to(torch.bfloat16)
    kernels = TorchKernels()
    batch = AttentionBatch(
        torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([[last]]), torch.tensor([last * block_size]), 1
    )
    step = kernels.prepare(batch, cache)
    kernels.rotate_and_write(qkv, None, cache, step, layers - 1)
    result = kernels.attention(qkv[:, :2], cache, step, layers - 1, AttentionSpec(0.125))
    assert torch.equal(cache[last, layers - 1, 0, 0], qkv[0, 2:4])
    torch.testing.assert_close(result, qkv[:, 4:].flatten(1))  # one key: its value
    kernels.copy_blocks(cache, cache, torch.tensor([[last, 1]]))
    assert torch.equal(cache[1], cache[last])


def test_selected_set_is_the_one_that_runs() -> None:
    kernels = select_kernels(torch.device("cpu"))
    case = Case([(3, 1)])
    step = kernels.prepare(case.batch(), case.cache)
    kernels.rotate_and_write(case.qkv, None, case.cache, step, 0)
    kernels.attention(case.qkv[:, : case.num_heads], case.cache, step, 0, AttentionSpec(0.25))
    assert kernels.name == "torch"
    assert kernels.calls == {"rotate_and_write": 1, "attention": 1}


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_8_bit_entries_are_close_and_stand_alone(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 64) * torch.tensor([1e-3, 1.0, 1e3]).view(1, 3, 1)
    x[0, 0] = 0
    entries = reference.quantised_entries(x, dtype)
    assert entries.shape == (5, 3, 68)
    assert entries.dtype == dtype
    largest = x.abs().amax(-1, keepdim=True)
    half_a_number = largest / 127 / 2
    if dtype != torch.int8:  # four significant bits, down to 2^-6 of what the largest element becomes 448 of
        half_a_number = (x.abs() / 16).clamp(min=largest / 448 * 2**-10)
    assert bool(((reference.dequantised_entries(entries) - x).abs() <= half_a_number * 1.001).all())
    for poison in (torch.nan, torch.inf):
        x[2, 1, 7] = poison
        after = reference.quantised_entries(x, dtype)
        others = torch.ones(5, 3, dtype=torch.bool)
        others[2, 1] = False
        assert torch.equal(after.view(torch.int8)[others], entries.view(torch.int8)[others])
        assert not reference.dequantised_entries(after)[2, 1].isfinite().any()
