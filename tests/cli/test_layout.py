"""Top-level folders are called `shared` and `kernels`: were the root on sys.path, they would answer to foreign imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagemill.serve import stages
from pagemill.supervisor import Part
from pagemill_shared.settings import ServeSettings

ROOT = Path(__file__).parents[2]


def test_the_repository_root_is_not_importable_here() -> None:
    assert ROOT not in [Path(entry or ".").resolve() for entry in sys.path]


@pytest.mark.parametrize("part", [part for stage in stages(ServeSettings(), Path("/tmp")) for part in stage])
def test_the_repository_root_is_not_importable_in_a_process_of_the_server(part: Part) -> None:
    python, *flags = part.command[: part.command.index("-m")]
    code = "import sys; print('\\n'.join(sys.path))"
    done = subprocess.run([python, *flags, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "" not in done.stdout.splitlines()[:-1]
    assert str(ROOT) not in done.stdout.splitlines()
