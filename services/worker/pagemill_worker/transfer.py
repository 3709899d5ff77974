"""Arrays between the host and the device, many in one transfer: up out of page-locked memory, which nobody waits for,
and down, which is the one place where an iteration waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes at a multiple of which each array begins."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Part:
    """Where one array lies in what is transferred."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, packed: Tensor) -> Tensor:
        """The array, as a view of the [bytes] uint8 that were transferred."""
        end = self.begin + self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))
        return packed[self.begin : end].view(self.dtype).view(self.shape)


def upload(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """``arrays`` on ``device``, in order with its current stream. On the CPU they share memory with the arrays; else
    they are views of one tensor, and torch keeps the page-locked copy until the transfer is over."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed, parts = pack(arrays, pin_memory=device.type == "cuda")
    arrived = packed.to(device, non_blocking=True)
    return [part.of(arrived) for part in parts]


def pack(arrays: Sequence[Array], *, pin_memory: bool) -> tuple[Tensor, list[Part]]:
    """``arrays`` behind each other as [bytes] uint8 on the host, and where each lies."""
    parts, size = [], 0
    for array in arrays:
        parts.append(Part(size, torch.from_numpy(array[:0]).dtype, array.shape))
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory)
    target = packed.numpy()
    for array, part in zip(arrays, parts, strict=True):
        target[part.begin : part.begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed, parts


def download(tensors: Sequence[Tensor]) -> list[Array]:
    """``tensors``, which lie on one device, on the host. Waits until the device has made them."""
    if tensors[0].device.type == "cpu" or len(tensors) == 1:
        return [tensor.cpu().numpy() for tensor in tensors]
    return unpack(join(tensors).cpu(), tensors)


def join(tensors: Sequence[Tensor]) -> Tensor:
    """``tensors`` behind each other as [bytes] uint8, those of large elements first."""
    return torch.cat([tensors[i].reshape(-1).view(torch.uint8) for i in _order(tensors)])


def unpack(joined: Tensor, like: Sequence[Tensor]) -> list[Array]:
    """What `join` made of tensors of the dtypes and shapes of ``like``, which has arrived on the host."""
    arrays: dict[int, Array] = {}
    begin = 0
    for i in _order(like):
        part = Part(begin, like[i].dtype, tuple(like[i].shape))
        arrays[i] = part.of(joined).numpy()
        begin += like[i].dtype.itemsize * like[i].numel()
    return [arrays[i] for i in range(len(like))]


def _order(tensors: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda i: -tensors[i].dtype.itemsize)
