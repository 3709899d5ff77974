"""Compiled kernels for tests, for each instruction set of this machine; compiled once in a run.

Elsewhere than on 64-bit ARM, its instruction sets run in an emulator, in the long tests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from pagemill_kernels.cpu.build import (
    BuildError,
    compile_library,
    find_compiler,
    isas,
    prebuilt_name,
    usable_isas,
)
from pagemill_kernels.cpu.library import load_library
from pagemill_testing.emulated_cpu import EmulatedLibrary, cross_compiler
from pagemill_testing.run_files import run_folder


def isa_names() -> list[str]:
    """Instruction sets to test: all that this machine has."""
    return [isa.name for isa in usable_isas()] or ["none"]


def library_params() -> list[Any]:
    """Instruction sets for the fixture `library`: those of this machine, and emulated ones for the long tests."""
    emulated = [isa.name for isa in isas("aarch64") if isa.name not in isa_names()]
    marks = [pytest.mark.full, pytest.mark.timeout(1200)]
    return [*isa_names(), *(pytest.param(name, marks=marks) for name in emulated)]


def compiled(name: str, factory: pytest.TempPathFactory) -> Path:
    """The library for an instruction set; skips the test where it cannot be had."""
    found = next((isa for isa in (*usable_isas(), *isas("aarch64")) if isa.name == name), None)
    if found is None:
        pytest.skip("no kernels for this machine's CPU")
    folder = run_folder(factory) / "pagemill-kernels"
    folder.mkdir(exist_ok=True)
    path = folder / prebuilt_name(found)
    try:
        with FileLock(folder / f"{name}.lock"):
            if not path.exists():
                compile_library(find_compiler() if found in usable_isas() else cross_compiler(), found, path)
    except BuildError as error:
        if str(error).startswith("no "):
            pytest.skip(str(error))
        raise
    return path


def loaded(name: str, factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library for an instruction set of this machine."""
    return load_library(compiled(name, factory))


@contextmanager
def opened(name: str, factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL | EmulatedLibrary]:
    """The same for any of `library_params`."""
    if name in isa_names():
        yield loaded(name, factory)
        return
    library = EmulatedLibrary(compiled(name, factory), factory.mktemp("emulated"))
    try:
        yield library
    finally:
        library.close()


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
