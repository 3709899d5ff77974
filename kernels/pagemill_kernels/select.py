"""Which set of kernels runs on a device."""

from __future__ import annotations

from typing import Any

import torch

from pagemill_kernels.interface import Kernels
from pagemill_kernels.reference import TorchKernels


def select_kernels(device: torch.device) -> Kernels[Any]:
    """The fastest set that works on ``device``; plain torch works on all."""
    return TorchKernels()
