"""Rotary embedding and cache write in Triton against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged_case import CAPABILITY, DEVICE, PROCESSORS, WORST, Case, exactly
from torch import Tensor

from pagemill_kernels.gpu.kernels import TritonKernels
from pagemill_kernels.interface import AttentionBatch, AttentionSpec
from pagemill_kernels.reference import TorchKernels


def turns(tokens: int, rotary_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.rand(tokens, rotary_dim // 2, generator=torch.Generator().manual_seed(1)) * 6
    cosines = torch.cat((angles.cos(), angles.cos()), 1).unsqueeze(1)
    sines = torch.cat((-angles.sin(), angles.sin()), 1).unsqueeze(1)
    return cosines.to(DEVICE, dtype), sines.to(DEVICE, dtype)


def check(case: Case, rotary: tuple[Tensor, Tensor] | None, layer: int) -> None:
    """Queries, keys, cache: all that is written, and that nothing else is."""
    expected_cache, expected = exactly(case.cache), exactly(case.qkv)
    plain, batch = TorchKernels(), case.batch()
    exact = None if rotary is None else (exactly(rotary[0]), exactly(rotary[1]))
    plain.rotate_and_write(expected, exact, expected_cache, plain.prepare(batch, expected_cache), layer)
    kernels = TritonKernels(PROCESSORS, CAPABILITY)
    kernels.rotate_and_write(case.qkv, rotary, case.cache, kernels.prepare(batch, case.cache), layer)
    for result, wanted in ((case.qkv, expected), (case.cache, expected_cache)):
        bound = WORST[case.dtype]
        torch.testing.assert_close(result.float().cpu(), wanted, atol=bound, rtol=bound, equal_nan=True)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", list(WORST))
def test_head_sizes_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    case = Case([(6, 1), (1, 1), (20, 5)], group=3, head_dim=head_dim, dtype=dtype)
    check(case, turns(7, head_dim, dtype), layer=1)


@pytest.mark.parametrize("group", range(1, 9))
def test_heads(group: int) -> None:
    check(Case([(6, 1), (20, 2)], kv_heads=3, group=group), turns(3, 16, torch.float16), layer=0)


@pytest.mark.parametrize("rotary_dim", [2, 8, 20, 40])
def test_part_of_a_head_is_turned(rotary_dim: int) -> None:
    check(Case([(6, 1), (20, 2)], head_dim=80), turns(3, rotary_dim, torch.float16), layer=1)


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_without_rotation(block_size: int) -> None:
    case = Case([(6, 1), (20, 9)], block_size=block_size)
    before = case.qkv.clone()
    check(case, None, layer=1)
    assert torch.equal(case.qkv, before)


def test_cache_of_another_precision() -> None:
    case = Case([(6, 1), (20, 2)], dtype=torch.bfloat16)
    case.qkv = case.qkv.float()
    check(case, turns(3, 16, torch.float32), layer=1)


def test_rows_of_a_wider_tensor() -> None:
    case = Case([(6, 1), (20, 2)])
    wide = torch.full((3, 2 * case.qkv.shape[1], 16), 7.0, dtype=case.dtype, device=DEVICE)
    wide[:, : case.qkv.shape[1]] = case.qkv
    case.qkv = wide[:, : case.qkv.shape[1]]
    check(case, turns(3, 16, case.dtype), layer=1)
    assert bool((wide[:, case.qkv.shape[1] :] == 7).all())


def test_padding_rows_change_no_live_block() -> None:
    case = Case([(6, 1), (1, 1), (1, 1)])
    case.tables[1] = case.tables[2] = [0]
    live, slot = case.cache[1:].clone(), int(case.batch().slot_mapping[0])
    result, _ = case.run(AttentionSpec(0.25))
    changed = (case.cache[1:].view(torch.int16) != live.view(torch.int16)).flatten(4).any(-1)
    assert sorted({(b + 1, s) for b, _, _, s in changed.nonzero().tolist()}) == [(slot // 16, slot % 16)]
    assert bool(torch.isfinite(result).all())


def test_offsets_beyond_31_bits() -> None:
    # On the CPU lazily backed: only the touched pages take memory.
    shape = (17_000, 64, 2, 16, 2, 64)
    if DEVICE.type == "cpu":
        cache = torch.from_numpy(np.zeros(shape, np.int16)).view(torch.bfloat16)
    else:
        cache = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
    assert cache.numel() > 2**32
    last = shape[0] - 1
    qkv = torch.randn(1, 6, 64).to(DEVICE, torch.bfloat16)
    kernels = TritonKernels(PROCESSORS, CAPABILITY)
    batch = AttentionBatch(
        torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([[last]]), torch.tensor([last * 16]), num_decodes=1
    )
    step = kernels.prepare(batch, cache)
    kernels.rotate_and_write(qkv, None, cache, step, 63)
    result = kernels.attention(qkv[:, :2], cache, step, 63, AttentionSpec(0.125))
    assert torch.equal(cache[last, 63, 0, 0], qkv[0, 2:4])
    assert torch.equal(result, qkv[:, 4:].flatten(1))  # one key: its value
    kernels.copy_blocks(cache, cache, torch.tensor([[last, 1]]))
    assert torch.equal(cache[1], cache[last])


def test_more_slots_than_are_counted_in_31_bits() -> None:
    cache = torch.empty((2**28, 1, 2, 16, 1, 1), dtype=torch.float16, device="meta")
    with pytest.raises(ValueError, match="more than 2\\^31 slots"):
        TritonKernels(PROCESSORS, CAPABILITY).prepare(Case([(1, 1)]).batch(), cache)
