"""Whether the Triton kernels can run here, and the set for a device. Imports triton only when it is asked."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from pagemill_kernels.interface import Kernels

OLDEST = (8, 0)
"""Compute capability from which on bfloat16 and asynchronous copies to shared memory are there."""


class UnsupportedError(Exception):
    """The kernels cannot run on this device; the message says why."""


def load_gpu_kernels(device: torch.device) -> Kernels[Any]:
    """The Triton kernels for a CUDA device.

    Raises:
        UnsupportedError: the GPU is too old or no NVIDIA one, or triton is missing.
    """
    capability = torch.cuda.get_device_capability(device)
    reason = why_not(torch.cuda.get_device_name(device), capability, is_nvidia=torch.version.cuda is not None)
    if reason:
        raise UnsupportedError(reason)
    from pagemill_kernels.gpu.kernels import TritonKernels

    return TritonKernels.on(device)


def why_not(name: str, capability: tuple[int, int], is_nvidia: bool) -> str | None:
    """What keeps the kernels from running on the GPU ``name``, or None."""
    if not is_nvidia:
        return f"the Triton kernels are built and tested for NVIDIA GPUs, and this is {name}"
    if capability < OLDEST:
        return f"{name} has compute capability {capability[0]}.{capability[1]}, and the Triton kernels need 8.0"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    return None
