"""Every Triton kernel compiles to machine code for real GPUs, without one, and spills no register.

Builds run in a process of their own: triton must not be in interpreter mode there, and neither it nor its caches belong
into the test process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "programs" / "gpu_builds.py"
SHARED_MEMORY = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that a program may take. The builds for 8.0 also run on 8.6 and 8.9, which have the least."""
ALLOWED_STACK = 0 if version("triton").startswith("3.9") else 8
"""Bytes a thread. The ptxas of triton before 3.9 keeps one 8-byte value of some variants on the stack, to stay at 64,
96 or 128 registers. Local memory is never used."""
EVERYTHING = ("64,80,128,256:bf16,fp32", "96,128:fp16", "64,128:bf16,fp32:3,24,71")
"""Head sizes, dtypes and query heads per key head (4 where not said). What is left out differs in nothing that changes
a build: heads of 96 are laid out as those of 80 are, float16 as bfloat16 is, and groups up to 16, from 17 to 32, and
beyond take one tile each, whose registers a power of two only saves (3, 24 and 71 are none)."""
KERNELS = {"attend", "reduce_parts", "rotate_and_write", "copy_blocks"}


def check(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-P", "-W", "ignore", str(PROGRAM), *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    builds = [json.loads(line) for line in run.stdout.splitlines()]
    sys.stdout.writelines(_line(build) for build in builds)
    assert {build["kernel"] for build in builds} == KERNELS
    spilled = [build for build in builds if build["stack"] > allowed_stack(build) or build["local"]]
    assert not spilled
    large = [build for build in builds if build["shared"] > SHARED_MEMORY[build["target"]]]
    assert not large
    return builds


def allowed_stack(build: dict[str, Any]) -> float:
    """float32 with more than 32 query heads to a key head is too wide for the registers, whatever the tile."""
    is_too_wide = build["kernel"] == "attend" and build["dtype"] == "fp32" and build["group"] > 32
    return float("inf") if is_too_wide else ALLOWED_STACK


def _line(build: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in build.items() if value not in (None, "")) + "\n"


@pytest.mark.timeout(600)
def test_sm_90(tmp_path: Path) -> None:
    builds = check(tmp_path, "90:64,80,128,256")
    assert {(b["dtype"], b["head_dim"]) for b in builds if b["kernel"] == "attend"} == {
        (dtype, head_dim) for dtype in ("bf16", "fp32") for head_dim in (64, 80, 128, 256)
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["80", "100"])
def test_other_targets(target: str, tmp_path: Path) -> None:
    assert {b["head_dim"] for b in check(tmp_path, f"{target}:128,256:bf16") if b["kernel"] == "attend"} == {128, 256}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("build", ["80:128:int8::plain", "90:128:fp8::plain", "100:128:fp8::plain"])
def test_caches_in_8_bits(build: str, tmp_path: Path) -> None:
    attend = [b for b in check(tmp_path, build) if b["kernel"] == "attend"]
    assert {(b["dtype"], b["numbers"]) for b in attend} == {("bf16", build.split(":")[2])}


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", ["80", "90", "100"])
def test_everything(target: str, tmp_path: Path) -> None:
    check(tmp_path, *(f"{target}:{each}" for each in EVERYTHING))


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", ["80", "90", "100"])
def test_every_cache_in_8_bits(target: str, tmp_path: Path) -> None:
    check(tmp_path, f"{target}::int8,fp8")
