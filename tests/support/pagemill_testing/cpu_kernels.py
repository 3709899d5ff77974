"""Compiled kernels for tests, for each instruction set of this machine; compiled once and kept among pytest's files."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from pagemill_kernels.cpu.build import (
    BuildError,
    Isa,
    compile_library,
    find_compiler,
    prebuilt_name,
    usable_isas,
)
from pagemill_kernels.cpu.library import load_library


def isa_names() -> list[str]:
    """Instruction sets to test: all that this machine has."""
    return [isa.name for isa in usable_isas()] or ["none"]


def compiled(name: str, factory: pytest.TempPathFactory) -> Path:
    """The library for an instruction set; skips the test where it cannot be had."""
    found: Isa | None = next((isa for isa in usable_isas() if isa.name == name), None)
    if found is None:
        pytest.skip("no kernels for this machine's CPU")
    folder = factory.getbasetemp().parent / "pagemill-kernels"
    folder.mkdir(exist_ok=True)
    path = folder / prebuilt_name(found)
    try:
        with FileLock(folder / f"{name}.lock"):
            if not path.exists():
                compile_library(find_compiler(), found, path)
    except BuildError as error:
        if "no C++ compiler" in str(error):
            pytest.skip(str(error))
        raise
    return path


def loaded(name: str, factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load_library(compiled(name, factory))


def assert_rows_are_independent(product: Callable[[Tensor], Tensor], outlier: float) -> None:
    """An outlier in one row of [32, 576] leaves every other row of the product as it is, bit by bit."""
    x = torch.randn(32, 576)
    before = product(x)
    x[7, 100] = outlier
    after = product(x)
    others = [row for row in range(32) if row != 7]
    assert torch.equal(after[others], before[others])
    assert not torch.equal(after[7], before[7])
    assert after[7].isfinite().all() == (abs(outlier) < torch.inf)
