"""The KV cache: the device pool, the host pool for swapped-out blocks, and what moves blocks between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagemill_kernels.interface import Kernels, entry_elements
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.schema import Int32Array
from pagemill_worker.models.config import CacheDescription


def block_bytes(description: CacheDescription, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, scales of 8-bit entries included."""
    d = description
    return d.num_layers * 2 * block_size * d.num_kv_heads * entry_elements(d.head_dim, dtype) * dtype.itemsize


class KVCache:
    """Both pools, each ``[blocks, num_layers, 2, block_size, num_kv_heads, entry]`` (see `pagemill_kernels.interface`).

    Attributes:
        pool: device blocks; index 0 is padding, so that there are num_blocks + 1.
        host_pool: host blocks, numbered from 0.
    """

    def __init__(
        self,
        description: CacheDescription,
        block_size: int,
        num_blocks: int,
        num_swap_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_blocks, self.num_swap_blocks = num_blocks, num_swap_blocks
        self.block_bytes = block_bytes(description, block_size, dtype)
        entry = entry_elements(description.head_dim, dtype)
        shape = (description.num_layers, 2, block_size, description.num_kv_heads, entry)
        self.pool = _allocate((num_blocks + 1, *shape), dtype, device, "--num-kv-blocks or --kv-cache-memory")
        self.host_pool = _allocate((num_swap_blocks, *shape), dtype, torch.device("cpu"), "--num-swap-blocks")
        if device.type == "cuda" and num_swap_blocks:
            self.host_pool = _pinned(self.host_pool)

    def swap_out(self, kernels: Kernels[Any], pairs: Int32Array) -> int:
        """Moves [K, 2] (device block, host block); returns bytes."""
        return kernels.copy_blocks(self.pool, self.host_pool, _pairs(pairs))

    def swap_in(self, kernels: Kernels[Any], pairs: Int32Array) -> int:
        """Moves [K, 2] (host block, device block); returns bytes."""
        return kernels.copy_blocks(self.host_pool, self.pool, _pairs(pairs))

    def copy(self, kernels: Kernels[Any], pairs: Int32Array) -> int:
        """Copies [K, 2] (source, destination) within the device pool; returns bytes."""
        return kernels.copy_blocks(self.pool, self.pool, _pairs(pairs))


def _pairs(pairs: Int32Array) -> Tensor:
    return torch.from_numpy(pairs.astype(np.int64))


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, settings: str) -> Tensor:
    """Zeros, which on the CPU take no memory before they are first written. ``settings`` are those that size it."""
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    try:
        if device.type == "cpu":
            return torch.from_numpy(np.zeros(shape, f"i{dtype.itemsize}")).view(dtype)
        return torch.zeros(shape, dtype=dtype, device=device)
    except (MemoryError, torch.OutOfMemoryError):
        raise ConfigurationError(
            f"a KV cache of {size / 2**30:.2f} GiB cannot be allocated on {device}; set {settings}"
        ) from None


def _pinned(pool: Tensor) -> Tensor:
    """The pool in page-locked memory, which the device copies from and to at full speed; as it is, where the system
    does not lock that much."""
    try:
        return torch.zeros(pool.shape, dtype=pool.dtype, pin_memory=True)
    except RuntimeError:
        return pool
