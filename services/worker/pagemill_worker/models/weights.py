"""Weights of a prepared model, read from its safetensors files by memory mapping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagemill_kernels.blocks import BLOCK_KINDS, BlockKind, BlockMatrix, BlockPart
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.manifest import BLOCKS_NAME

SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def weights_bytes(folder: Path, dtype: torch.dtype, is_narrow: bool = False) -> int:
    """Bytes that the weights in ``folder`` take as ``dtype``.

    Args:
        is_narrow: matrices that are stored in 16 bits stay so, except embeddings.

    Raises:
        ConfigurationError: a file is not readable.
    """
    size = 0
    for path in sorted(folder.glob("*.safetensors")):
        file = _open(path)
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_slice(name)
            shape = tensor.get_shape()
            stays = is_narrow and len(shape) == 2 and tensor.get_dtype() in ("BF16", "F16")
            is_matrix = stays and not name.endswith("embed_tokens.weight")
            size += math.prod(shape) * (2 if is_matrix else dtype.itemsize)
    return size


class Weights:
    """Tensors by name. Every tensor is checked against the shape that the configuration calls for.

    Attributes:
        has_blocks: whether there are blocks of a GGUF file.

    Raises:
        ConfigurationError: no weights are there.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = folder
        self._dtype, self._device = dtype, device
        self._files: dict[str, Any] = {}
        self._read_names: set[str] = set()
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ConfigurationError(f"{folder} holds no *.safetensors file")
        for path in paths:
            file = _open(path)
            names: list[str] = list(file.keys())
            for name in names:
                self._files[name] = file
        self._blocks: Any = None
        self._kinds: dict[str, BlockKind] = {}
        self.has_blocks = (folder / BLOCKS_NAME).is_file()
        if self.has_blocks:
            self._blocks = _open(folder / BLOCKS_NAME)
            self._kinds = {name: kind for name, kind in self._blocks.metadata().items() if kind in BLOCK_KINDS}

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor ``name`` in the chosen dtype and on the chosen device: a copy, so that no file stays mapped.

        Raises:
            ConfigurationError: it is missing, or of another shape or an unsupported dtype.
        """
        return self._read(name, shape).to(self._device, self._dtype, copy=True)

    def fuse(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        """Tensors of equal trailing shape, one below the other, so that one matrix product serves them all."""
        parts = [self._read(name, shape) for name, shape in zip(names, shapes, strict=True)]
        rows = sum(part.shape[0] for part in parts)
        fused = torch.empty((rows, *parts[0].shape[1:]), dtype=self._dtype, device=self._device)
        first = 0
        for part in parts:
            fused[first : first + part.shape[0]] = part
            first += part.shape[0]
        return fused

    def blocks(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> BlockMatrix | None:
        """What `fuse` returns, as blocks; None where not all of these matrices have them.

        Raises:
            ConfigurationError: one is of another shape.
        """
        if not all(name in self._kinds for name in names):
            return None
        parts = []
        for name, shape in zip(names, shapes, strict=True):
            part = BlockPart(self._kinds[name], self._blocks.get_tensor(name))
            self._check_shape(name, (part.outputs, part.inputs), shape)
            self._read_names.add(name)
            parts.append(part)
        return BlockMatrix(tuple(parts))

    def refuse_unread(self, harmless: Sequence[str]) -> None:
        """Raises ConfigurationError where a tensor was not asked for: the model has a part that would be left out.

        Args:
            harmless: endings of names that may be left.
        """
        unread = sorted(self._files.keys() - self._read_names)
        for name in unread:
            if not name.endswith(tuple(harmless)):
                raise ConfigurationError(
                    f"{self._folder}: the weights hold {name}, which this architecture does not know"
                )

    def _read(self, name: str, shape: Sequence[int]) -> Tensor:
        file = self._files.get(name)
        if file is None:
            raise ConfigurationError(f"{self._folder}: the weights lack the tensor {name}")
        self._read_names.add(name)
        tensor: Tensor = file.get_tensor(name)
        self._check_shape(name, tensor.shape, shape)
        if tensor.dtype not in SUPPORTED_DTYPES:
            raise ConfigurationError(
                f"{self._folder}: tensor {name} is {str(tensor.dtype).removeprefix('torch.')}; "
                "supported are float32, float16, bfloat16"
            )
        return tensor

    def _check_shape(self, name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
        if tuple(found) != tuple(wanted):
            raise ConfigurationError(
                f"{self._folder}: tensor {name} has shape {tuple(found)}, config.json calls for {tuple(wanted)}"
            )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{path} is not readable: {error}") from None
