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


@pytest.mark.parametrize("program", ["triton_attention", "triton_write", "triton_blocks"])
def test_under_the_interpreter(program: str) -> None:
    command = [
        *(sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5"),
        *("-o", f"pythonpath={PROGRAMS}", "-o", "filterwarnings=", "--timeout=110"),
        str(PROGRAMS / f"{program}.py"),
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(run.stdout[-6000:], run.stderr[-2000:], sep="\n")
    assert run.returncode == 0
