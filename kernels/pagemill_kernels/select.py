"""Which set of kernels runs on a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pagemill_kernels.cpu.build import BuildError
from pagemill_kernels.cpu.load import load_cpu_kernels
from pagemill_kernels.gpu.load import UnsupportedError, load_gpu_kernels
from pagemill_kernels.interface import Kernels
from pagemill_kernels.reference import TorchKernels


def _say_nothing(_: str) -> None:
    pass


def select_kernels(
    device: torch.device,
    cache_dir: Path | None = None,
    report: Callable[[str], None] = _say_nothing,
    prebuilt: Path | None = None,
) -> Kernels[Any]:
    """The fastest set that works on ``device``; plain torch works on all.

    Args:
        cache_dir: where kernels that are compiled on first use are kept; None to compile none.
        report: told in one line of what takes long, and why plain torch runs where faster kernels were to be had.
        prebuilt: where CPU kernels lie that were compiled ahead of time.
    """
    if device.type == "cpu":
        try:
            return load_cpu_kernels(prebuilt, cache_dir, report)
        except BuildError as error:
            report(f"warning: plain torch runs in place of faster kernels: {error}")
    if device.type == "cuda":
        try:
            return load_gpu_kernels(device)
        except UnsupportedError as error:
            report(f"warning: plain torch runs in place of faster kernels: {error}")
    return TorchKernels()
