"""Block copies in Triton: within the pool, and to and from a pool in host memory."""

from __future__ import annotations

import pytest
import torch
from paged_case import CAPABILITY, DEVICE, PROCESSORS, Case
from torch import Tensor

from pagemill_kernels.gpu.kernels import TritonKernels


def bits(pool: Tensor) -> Tensor:
    """NaN is not equal to itself, its bits are."""
    return pool.contiguous().view(torch.int32)


def host_pool(case: Case, blocks: int) -> Tensor:
    pool = torch.zeros(blocks, *case.cache.shape[1:], dtype=case.dtype)
    return pool.pin_memory() if DEVICE.type == "cuda" else pool


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 5), (256, 16), (2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_blocks_are_copied_whole(head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    case = Case([(8 * block_size, 1)], kv_heads=1, head_dim=head_dim, block_size=block_size, layers=3, dtype=dtype)
    before = bits(case.cache).clone()
    pairs = torch.tensor([[1, 9], [2, 10], [2, 11], [3, 12], [4, 13]])
    kernels = TritonKernels(PROCESSORS, CAPABILITY)
    moved = kernels.copy_blocks(case.cache, case.cache, pairs)
    assert moved == 5 * case.cache[0].numel() * dtype.itemsize
    after = bits(case.cache)
    for source, destination in pairs.tolist():
        assert torch.equal(after[destination], before[source])
    untouched = [b for b in range(before.shape[0]) if b not in pairs[:, 1].tolist()]
    assert torch.equal(after[untouched], before[untouched])
    assert kernels.calls == {"copy_blocks": 1}


def test_swap_out_and_in_gives_the_blocks_back() -> None:
    case = Case([(30, 1), (70, 1)], head_dim=64)
    before = bits(case.cache).clone()
    host = host_pool(case, 4)
    kernels = TritonKernels(PROCESSORS, CAPABILITY)
    kernels.copy_blocks(case.cache, host, torch.tensor([[5, 0], [2, 3]]))
    case.cache[[5, 2]] = torch.nan
    kernels.copy_blocks(host, case.cache, torch.tensor([[0, 7], [3, 2]]))
    after = bits(case.cache)
    assert torch.equal(after[7], before[5])
    assert torch.equal(after[2], before[2])


def test_nothing_to_copy() -> None:
    case = Case([(3, 1)])
    assert (
        TritonKernels(PROCESSORS, CAPABILITY).copy_blocks(case.cache, case.cache, torch.zeros(0, 2, dtype=torch.int64))
        == 0
    )


def test_host_pool_that_is_not_page_locked() -> None:
    case = Case([(30, 1)], head_dim=64)
    host = torch.zeros(4, *case.cache.shape[1:], dtype=case.dtype)
    kernels = TritonKernels(PROCESSORS, CAPABILITY)
    kernels.copy_blocks(case.cache, host, torch.tensor([[1, 2]]))
    assert torch.equal(bits(host[2]), bits(case.cache[1]).cpu())
    kernels.copy_blocks(host, case.cache, torch.tensor([[2, 3]]))
    assert torch.equal(bits(case.cache[3]), bits(case.cache[1]))
