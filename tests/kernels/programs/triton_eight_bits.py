"""Caches in 8 bits in Triton against plain torch: what is written, what is attended to, blocks that move."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from paged_case import CAPABILITY, DEVICE, PROCESSORS, Case, by_entry, by_page
from torch import Tensor

from pagemill_kernels.gpu import work
from pagemill_kernels.gpu.eight_bits import widened
from pagemill_kernels.gpu.kernels import NUMBERS, TritonKernels
from pagemill_kernels.interface import AttentionSpec
from pagemill_kernels.reference import TorchKernels, dequantised_entries, quantised_entries

CACHE_DTYPES = pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def bits(cache: Tensor) -> Tensor:
    """NaN is not equal to itself, its bits are."""
    return cache.cpu().view(torch.int8)


# ---------------------------------------------------------------- write


def written(case: Case, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """The cache by entries, as the kernel leaves it and as plain torch does."""
    expected, qkv, plain, batch = by_entry(case.cache), case.qkv.cpu().clone(), TorchKernels(), case.batch()
    rotary = None
    if rotary_dim:
        generator = torch.Generator().manual_seed(1)
        angles = torch.rand(qkv.shape[0], 1, rotary_dim // 2, generator=generator) * 6
        cosines, sines = torch.cat((angles.cos(), angles.cos()), 2), torch.cat((-angles.sin(), angles.sin()), 2)
        rotary = cosines.to(case.dtype), sines.to(case.dtype)
    plain.rotate_and_write(qkv, rotary, expected, plain.prepare(batch, expected), 1)
    kernels = TritonKernels(PROCESSORS, CAPABILITY)
    on_device = rotary and (rotary[0].to(DEVICE), rotary[1].to(DEVICE))
    kernels.rotate_and_write(case.qkv, on_device, case.cache, kernels.prepare(batch, case.cache), 1)
    return by_entry(case.cache), expected


@CACHE_DTYPES
@DTYPES
@pytest.mark.parametrize(("head_dim", "block_size"), [(16, 5), (80, 16), (128, 1)])
def test_numbers_and_scales(cache_dtype: torch.dtype, dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    case = Case([(6, 1), (20, 9)], 3, head_dim=head_dim, block_size=block_size, dtype=dtype, cache_dtype=cache_dtype)
    case.qkv[1, -1] = 0
    case.qkv[2, -1] *= 2e-4
    result, expected = written(case, 0)
    assert torch.equal(bits(result), bits(expected))


@CACHE_DTYPES
@pytest.mark.parametrize("rotary_dim", [20, 80])
def test_rotated_keys(cache_dtype: torch.dtype, rotary_dim: int) -> None:
    case = Case([(6, 1), (20, 9)], 3, head_dim=80, cache_dtype=cache_dtype)
    result, expected = (dequantised_entries(entries) for entries in written(case, rotary_dim))
    # Plain torch rounds within the rotation, which may end in the next number of 8 bits.
    one = float(case.qkv.abs().max()) * (1 / 127 if cache_dtype == torch.int8 else 1 / 16)
    torch.testing.assert_close(result, expected, atol=one, rtol=0, equal_nan=True)
    assert float((result - expected).nan_to_num().norm() / expected.nan_to_num().norm()) < 3e-3


def test_floats_are_rounded_to_the_nearest() -> None:
    """Every number of the format, what lies half-way between neighbours, and what lies just beside that."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = ((numbers[1:] + numbers[:-1]) / 2).half()
    above, below = (between.nextafter(numbers[side].half()) for side in (slice(1, None), slice(None, -1)))
    wanted = torch.cat((numbers.half(), between, above, below))
    case = Case([(16, 16)], 1, head_dim=64, cache_dtype=torch.float8_e4m3fn)
    for sign in (1, -1):
        case.qkv[:, -2:, 1:] = sign * wanted.repeat(4)[: 32 * 63].view(16, 2, 63).to(DEVICE)
        case.qkv[:, -2:, 0] = 448  # a scale of 1
        result, expected = written(case, 0)
        assert torch.equal(bits(result), bits(expected))


# ---------------------------------------------------------------- attention


@triton.jit
def widen(numbers, out, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """[256] int8 numbers."""
    at = tl.arange(0, 256)
    tl.store(out + at, widened(tl.load(numbers + at), tl.program_id(0), NUMBERS, out.dtype.element_ty))


@CACHE_DTYPES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_number_is_widened_exactly(cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    numbers = torch.arange(-128, 128, dtype=torch.int8)
    out = torch.zeros(256, dtype=dtype, device=DEVICE)
    widen[(1,)](numbers.to(DEVICE), out, NUMBERS=NUMBERS[cache_dtype])
    expected = numbers.view(cache_dtype).float()
    known = expected.isfinite()  # e4m3 has a NaN of either sign, which is never written
    assert torch.equal(out.cpu().float()[known], expected[known])


@CACHE_DTYPES
@DTYPES
@pytest.mark.parametrize(("head_dim", "group", "block_size"), [(16, 1, 5), (64, 3, 16), (80, 4, 16), (128, 8, 1)])
def test_attention(cache_dtype: torch.dtype, dtype: torch.dtype, head_dim: int, group: int, block_size: int) -> None:
    rows = [(1, 1), (53, 1), (9, 9), (30, 3)]
    Case(rows, group=group, head_dim=head_dim, block_size=block_size, dtype=dtype, cache_dtype=cache_dtype).check()


@CACHE_DTYPES
def test_split_ranges_with_window_and_soft_cap(cache_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "MIN_DECODE_PART", 16)
    monkeypatch.setattr(work, "MIN_CHUNK_PART", 16)
    case = Case([(170, 1), (5, 1), (200, 4)], group=3, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    step = case.check(AttentionSpec(0.3, 150, 2.0))
    assert int(step.launches[150, 3][0].reductions[:, 1].max()) > 1


@CACHE_DTYPES
@pytest.mark.parametrize("size", [1e-3, 1e4])
def test_values_that_half_precision_hardly_holds(cache_dtype: torch.dtype, size: float) -> None:
    """Weights of 1 / 300 times scales of 1e-5 would be lost in half precision; a value of 0 has a scale of 0."""
    case = Case([(300, 1), (40, 40)], kv_heads=1, cache_dtype=cache_dtype)
    entries = by_entry(case.cache)
    values = dequantised_entries(entries[:, :, 1]) * size
    values[:, :, 3] = 0
    entries.view(torch.int8)[:, :, 1] = bits(quantised_entries(values, cache_dtype))
    case.cache = by_page(entries).to(DEVICE)
    case.qkv[:, -1] *= size
    case.check(AttentionSpec(0.01))


@CACHE_DTYPES
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_harms_its_row_alone(cache_dtype: torch.dtype, poison: float) -> None:
    clean, case = (Case([(20, 1), (33, 1)], cache_dtype=cache_dtype) for _ in range(2))
    case.qkv[1, -1, 3] = poison
    (expected, _), (result, _) = clean.run(AttentionSpec(0.25)), case.run(AttentionSpec(0.25))
    assert torch.equal(result[0], expected[0])
    assert not torch.isfinite(result[1]).all()


# ---------------------------------------------------------------- blocks


@CACHE_DTYPES
def test_a_block_moves_with_its_scales_in_one_transfer(cache_dtype: torch.dtype) -> None:
    case = Case([(30, 1)], head_dim=80, block_size=5, cache_dtype=cache_dtype)
    before = bits(case.cache).clone()
    host = torch.zeros(3, *case.cache.shape[1:], dtype=cache_dtype, pin_memory=DEVICE.type == "cuda")
    kernels = TritonKernels(PROCESSORS, CAPABILITY)
    assert kernels.copy_blocks(case.cache, host, torch.tensor([[4, 1]])) == before[0].numel()
    assert torch.equal(bits(host[1]), before[4])
    kernels.copy_blocks(host, case.cache, torch.tensor([[1, 2]]))
    kernels.copy_blocks(case.cache, case.cache, torch.tensor([[3, 1]]))
    assert torch.equal(bits(case.cache[[1, 2]]), before[[3, 4]])
    assert kernels.calls == {"copy_blocks": 3}


def test_which_caches_are_served() -> None:
    kernels = TritonKernels(PROCESSORS, CAPABILITY)
    for cache_dtype in (torch.int8, torch.float8_e4m3fn):
        assert kernels.serves_cache(torch.bfloat16, cache_dtype)
        assert kernels.serves_cache(torch.float16, cache_dtype)
        assert not kernels.serves_cache(torch.float32, cache_dtype)
    assert kernels.serves_cache(torch.float32, torch.float32)
    assert not kernels.serves_cache(torch.bfloat16, torch.float16)
    cache = torch.zeros((2, 1, 2, 16, 1, 18 + 4), dtype=torch.int8, device=DEVICE)
    with pytest.raises(ValueError, match="a multiple of 4 elements, not 18"):
        kernels.prepare(Case([(1, 1)]).batch(), cache)
