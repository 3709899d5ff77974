"""The Triton kernels under Triton's interpreter.

It has to be on before triton is imported, and changes what triton is for the whole process; so each program beside this
file, an ordinary file of tests, runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]


PROGRAM_NAMES = ["triton_attention", "triton_write", "triton_blocks", "triton_eight_bits"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", PROGRAM_NAMES)
def test_under_the_interpreter(program: str) -> None:
    run(program, "not full")


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_long_under_the_interpreter() -> None:
    run("triton_attention", "full")


def run(program: str, marks: str) -> None:
    command = [
        *(sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", "-m", marks),
        *("-o", f"pythonpath={PROGRAMS}", "-o", "filterwarnings=", "--timeout=3000"),
        str(PROGRAMS / f"{program}.py"),
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    sys.stdout.write(ended.stdout[-6000:] + ended.stderr[-2000:])
    assert ended.returncode == 0
