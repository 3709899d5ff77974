"""Each import contract of pyproject.toml holds, and breaks when an import is added that it forbids."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = [contract["id"] for contract in PYPROJECT["tool"]["importlinter"]["contracts"]]
PACKAGES = [Path(path) for path in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]

FORBIDDEN = {
    "shared": [("pagemill_shared/codec.py", "import pagemill_worker.app")],
    "services": [("pagemill_gateway/app.py", "import pagemill_scheduler.core")],
    "kernels": [("pagemill_kernels/reference.py", "import pagemill_shared.messages")],
    "only-worker": [("pagemill_gateway/app.py", "import pagemill_kernels.reference")],
    "no-command-line": [("pagemill_worker/app.py", "import pagemill.openmp")],
    "no-torch": [
        ("pagemill_shared/codec.py", "import torch"),
        ("pagemill_gateway/app.py", "def late():\n    import triton.language"),
        ("pagemill_scheduler/core.py", "from torch import nn"),
    ],
    "command-line": [("pagemill/main.py", "from pagemill_worker import app")],
    "pure": [
        ("pagemill_scheduler/core.py", "import time"),
        ("pagemill_scheduler/pool.py", "def late():\n    from random import random"),
        ("pagemill_scheduler/core.py", "import pagemill_shared.channel"),  # which reaches zmq
    ],
    "pure-no-shell": [("pagemill_scheduler/core.py", "import pagemill_scheduler.shell")],
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages, beside the configuration."""
    folder = tmp_path_factory.mktemp("sources")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def lint(sources: Path, *contracts: str) -> tuple[int, str]:
    """Exit status and output of import-linter for some contracts, over the copy."""
    command = "from importlinter.cli import lint_imports_command as c; c()"
    chosen = [word for contract in contracts for word in ("--contract", contract)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", command, "--no-cache", *chosen],
        cwd=sources,
        env={**os.environ, "PYTHONPATH": str(sources)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_each_contract_has_an_example() -> None:
    assert set(FORBIDDEN) == set(CONTRACTS)


@pytest.mark.parametrize(
    ("contract", "file", "line"), [(key, *example) for key, examples in FORBIDDEN.items() for example in examples]
)
def test_a_contract_breaks_with_an_import_that_it_forbids(sources: Path, contract: str, file: str, line: str) -> None:
    target = sources / file
    before = target.read_text(encoding="utf-8")
    target.write_text(f"{before}\n{line}\n", encoding="utf-8")
    try:
        status, output = lint(sources, contract)
    finally:
        target.write_text(before, encoding="utf-8")
    assert status == 1, output
    assert "0 kept, 1 broken" in output


def test_the_contracts_hold_in_the_copy(sources: Path) -> None:
    status, output = lint(sources, *CONTRACTS)
    assert status == 0, output
    assert f"{len(CONTRACTS)} kept, 0 broken" in output
