"""The test programs of the Triton kernels, on the GPU in place of the interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from gpu_check.table import Row

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "kernels" / "programs"
PROGRAM_NAMES = ("triton_attention", "triton_write", "triton_blocks", "triton_eight_bits")
SECONDS = 150


def measure(quick: bool) -> Iterator[Row]:
    for program in PROGRAM_NAMES[1:] if quick else PROGRAM_NAMES:
        passed, said = run(program, dict(os.environ))
        yield Row("correctness", program, passed, "tests passed" if passed is not None else "", note=said)


def run(program: str, environment: dict[str, str]) -> tuple[float | None, str]:
    """How many tests passed, or None and what pytest said last where one failed."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full"]
    command += ["-o", f"pythonpath={PROGRAMS}", "-o", "filterwarnings=", "--timeout=120"]
    if find_spec("xdist"):  # most of the time goes into compiling
        command += ["--numprocesses", str(min(8, os.cpu_count() or 1))]
    command.append(str(PROGRAMS / f"{program}.py"))
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return None, f"not done in {SECONDS} s"
    last = ended.stdout.strip().splitlines()[-1] if ended.stdout.strip() else ended.stderr.strip()[-200:]
    passed = re.search(r"(\d+) passed", last)
    if ended.returncode or not passed:
        print(ended.stdout[-4000:], ended.stderr[-2000:], sep="\n")
        return None, last
    return float(passed[1]), ""
