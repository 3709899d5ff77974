from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.memory import CPU_MOST, GIB, free_memory, size_pool, size_swap

CPU = torch.device("cpu")
MIB = 2**20


def pool(**changes: Any) -> tuple[int, str]:
    fields: dict[str, Any] = {
        "num_blocks": None,
        "memory_gib": None,
        "block_bytes": MIB,
        "free": 8 * GIB,
        "device": CPU,
    }
    size = size_pool(**(fields | changes))
    return size.num_blocks, size.reason


def test_explicit_sizes_win() -> None:
    assert pool(num_blocks=7, memory_gib=1.0) == (7, "--num-kv-blocks")
    assert pool(memory_gib=1.5) == (1536, "--kv-cache-memory")


def test_a_share_of_free_memory_by_default() -> None:
    assert pool() == (2048, "25% of 8.0 GiB of free memory, at most 4 GiB")
    assert pool(free=100 * GIB)[0] == CPU_MOST // MIB
    assert pool(device=torch.device("cuda"), free=10 * GIB) == (9216, "90% of 10.0 GiB of free memory")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 8192}, r"8\.00 GiB \(--num-kv-blocks: 8192 blocks of 1\.00 MiB\) does not fit into 8\.00 GiB"),
        ({"memory_gib": 9.0}, r"9\.00 GiB \(--kv-cache-memory: .* does not fit into 8\.00 GiB of free memory on cpu"),
        ({"memory_gib": 0.0001}, r"do not hold one block of 1\.00 MiB"),
        ({"free": MIB}, "do not hold one block|does not fit"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_sizes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        pool(**changes)


@pytest.mark.parametrize(
    ("wanted", "free", "blocks"),
    [
        (None, GIB, 25),
        (None, 40 * MIB, 20),  # half of what is free
        (None, 0, 0),
        (None, -MIB, 0),  # the device pool may be all there is
        (0, 0, 0),
        (0, -MIB, 0),
        (1024, GIB, 1024),
    ],
)
def test_swap_space(wanted: int | None, free: int, blocks: int) -> None:
    assert size_swap(num_swap_blocks=wanted, num_blocks=100, block_bytes=MIB, free=free).num_blocks == blocks


def test_swap_space_that_does_not_fit_is_refused_with_the_sizes() -> None:
    message = r"swap space of 1\.00 GiB \(--num-swap-blocks 1025, blocks of 1\.00 MiB\) does not fit into 1\.00 GiB"
    with pytest.raises(ConfigurationError, match=message):
        size_swap(num_swap_blocks=1025, num_blocks=100, block_bytes=MIB, free=GIB)


def test_free_memory_respects_the_control_group(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n")
    assert free_memory(CPU, tmp_path, meminfo) == 8_000_000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(CPU, tmp_path, meminfo) == 8_000_000 * 1024
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")
    assert free_memory(CPU, tmp_path, meminfo) == 2 * GIB  # file pages are given up at need
    for name in ("memory.max", "memory.current", "memory.stat"):
        (tmp_path / name).unlink()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (tmp_path / "memory/memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory/memory.stat").write_text("total_inactive_file 0\n")
    assert free_memory(CPU, tmp_path, meminfo) == 0


def test_free_memory_of_this_machine_is_known() -> None:
    assert free_memory(CPU) > 0


def test_an_unknown_system_is_taken_to_be_small(tmp_path: Path) -> None:
    assert free_memory(CPU, tmp_path, tmp_path / "none") == GIB
