"""How much memory there is, and how large the KV cache becomes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pagemill_shared.errors import ConfigurationError

GIB = 2**30
CPU_SHARE, CPU_MOST = 0.25, 4 * GIB
"""Default on a CPU, whose memory other programs use, too."""
CUDA_SHARE = 0.9
SWAP_SHARE, SWAP_MOST = 0.25, 0.5
"""Default of the host pool: its share of the device blocks, at most this share of what is then free."""
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class PoolSize:
    """num_blocks, and in words how it was chosen."""

    num_blocks: int
    reason: str


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; on a CPU torch says so by a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def free_memory(device: torch.device, cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> int:
    """Bytes that can be allocated on ``device`` now: on the CPU the available memory within the limit of the control
    group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [_available(meminfo), _cgroup_v2(cgroup), _cgroup_v1(cgroup)]
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else GIB


def size_pool(
    *, num_blocks: int | None, memory_gib: float | None, block_bytes: int, free: int, device: torch.device
) -> PoolSize:
    """Device blocks by --num-kv-blocks, else by --kv-cache-memory, else by a share of the free memory.

    Args:
        block_bytes: bytes of one block over all layers.
        free: bytes free on the device, after the weights were loaded.

    Raises:
        ConfigurationError: that does not fit, or is not even one block.
    """
    if num_blocks is not None:
        wanted, reason = num_blocks * block_bytes, "--num-kv-blocks"
    elif memory_gib is not None:
        wanted, reason = int(memory_gib * GIB), "--kv-cache-memory"
    elif device.type == "cpu":
        wanted = min(int(free * CPU_SHARE), CPU_MOST)
        reason = f"{CPU_SHARE:.0%} of {free / GIB:.1f} GiB of free memory, at most {CPU_MOST // GIB} GiB"
    else:
        wanted, reason = int(free * CUDA_SHARE), f"{CUDA_SHARE:.0%} of {free / GIB:.1f} GiB of free memory"
    blocks = wanted // block_bytes
    # One more block than is usable: the padding block.
    if (blocks + 1) * block_bytes > free:
        raise ConfigurationError(
            f"a KV cache of {wanted / GIB:.2f} GiB ({reason}: {blocks} blocks of {block_bytes / 2**20:.2f} MiB) does "
            f"not fit into {free / GIB:.2f} GiB of free memory on {device}"
        )
    if blocks < 1:
        raise ConfigurationError(
            f"{wanted / GIB:.3f} GiB of KV cache ({reason}) do not hold one block of {block_bytes / 2**20:.2f} MiB"
        )
    return PoolSize(blocks, reason)


def size_swap(*, num_swap_blocks: int | None, num_blocks: int, block_bytes: int, free: int) -> PoolSize:
    """Host blocks by --num-swap-blocks, else a share of the device blocks.

    Args:
        num_blocks: device blocks.
        block_bytes: bytes of one block over all layers.
        free: bytes free on the host, beside the device pool where that is host memory, too.

    Raises:
        ConfigurationError: --num-swap-blocks does not fit.
    """
    if num_swap_blocks is None:
        blocks = max(0, min(int(num_blocks * SWAP_SHARE), int(free * SWAP_MOST) // block_bytes))
        return PoolSize(blocks, f"{SWAP_SHARE:.0%} of the device blocks, at most {SWAP_MOST:.0%} of free memory")
    wanted = num_swap_blocks * block_bytes
    if num_swap_blocks and wanted > free:
        raise ConfigurationError(
            f"swap space of {wanted / GIB:.2f} GiB (--num-swap-blocks {num_swap_blocks}, blocks of "
            f"{block_bytes / 2**20:.2f} MiB) does not fit into {max(0, free) / GIB:.2f} GiB of free host memory"
        )
    return PoolSize(num_swap_blocks, "--num-swap-blocks")


def _available(meminfo: Path) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroup_v2(cgroup: Path) -> int | None:
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((cgroup / "memory.current").read_text())
        return int(limit) - used + _cached(cgroup / "memory.stat", "inactive_file")
    except (OSError, ValueError):
        return None


def _cgroup_v1(cgroup: Path) -> int | None:
    try:
        limit = int((cgroup / "memory/memory.limit_in_bytes").read_text())
        used = int((cgroup / "memory/memory.usage_in_bytes").read_text())
        return limit - used + _cached(cgroup / "memory/memory.stat", "total_inactive_file")
    except (OSError, ValueError):
        return None


def _cached(stat: Path, name: str) -> int:
    """File pages that count as used but are given up at need."""
    for line in stat.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
