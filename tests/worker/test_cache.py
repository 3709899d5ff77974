from __future__ import annotations

import numpy as np
import pytest
import torch

from pagemill_kernels.reference import TorchKernels, quantised_entries
from pagemill_shared.errors import ConfigurationError
from pagemill_worker.cache import KVCache, block_bytes
from pagemill_worker.models.config import CacheDescription

CPU = torch.device("cpu")
DESCRIPTION = CacheDescription(num_layers=3, num_kv_heads=2, head_dim=8)


def test_one_block_is_contiguous_and_block_0_is_extra() -> None:
    cache = KVCache(DESCRIPTION, 4, 10, 5, torch.bfloat16, CPU)
    assert cache.pool.shape == (11, 3, 2, 4, 2, 8)
    assert cache.host_pool.shape == (5, 3, 2, 4, 2, 8)
    assert cache.pool.dtype == cache.host_pool.dtype == torch.bfloat16
    assert cache.pool[3].is_contiguous()
    assert cache.block_bytes == block_bytes(DESCRIPTION, 4, torch.bfloat16) == cache.pool[3].numel() * 2
    assert not cache.pool.any()


def test_a_pool_takes_no_memory_before_it_is_written() -> None:
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1])
    cache = KVCache(DESCRIPTION, 16, 300_000, 0, torch.float32, CPU)
    assert cache.pool.numel() * 4 > 1.8e9
    with open("/proc/self/statm") as file:
        assert int(file.read().split()[1]) - before < 25_000  # pages of 4 KiB


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_blocks_in_8_bits_hold_their_scales(dtype: torch.dtype) -> None:
    cache = KVCache(DESCRIPTION, 4, 6, 3, dtype, CPU)
    assert cache.pool.shape == (7, 3, 2, 4, 2, 12)
    assert cache.block_bytes == block_bytes(DESCRIPTION, 4, dtype) == cache.pool[3].nbytes
    entries = quantised_entries(torch.randn(7, 3, 2, 4, 2, 8), dtype)
    cache.pool.copy_(entries)
    cache.swap_out(TorchKernels(), np.array([[2, 1]], np.int32))
    assert torch.equal(cache.host_pool[1].view(torch.int8), entries[2].view(torch.int8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_blocks_move_between_the_pools(dtype: torch.dtype) -> None:
    cache = KVCache(DESCRIPTION, 4, 6, 3, dtype, CPU)
    cache.pool.copy_(torch.randn(cache.pool.shape))
    before, kernels = cache.pool.clone(), TorchKernels()
    assert cache.swap_out(kernels, np.array([[2, 1], [5, 0]], np.int32)) == 2 * cache.block_bytes
    assert torch.equal(cache.host_pool[[1, 0]], before[[2, 5]])
    cache.swap_in(kernels, np.array([[1, 6]], np.int32))
    cache.copy(kernels, np.array([[6, 1], [3, 2]], np.int32))
    assert torch.equal(cache.pool[[6, 1, 2]], before[[2, 2, 3]])


def test_what_cannot_be_allocated_is_refused_with_its_size() -> None:
    with pytest.raises(ConfigurationError, match=r"\d+\.\d+ GiB cannot be allocated on cpu; set --num-kv-blocks"):
        KVCache(DESCRIPTION, 16, 2**42, 0, torch.float32, CPU)
