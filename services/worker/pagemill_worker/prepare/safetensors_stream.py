"""Safetensors files piece by piece: written without holding a tensor whole, and their headers read strictly.

The ``safetensors`` package writes only what is in memory as a whole; the format is eight bytes of header length, a JSON
header, and the tensors' bytes one after the other (https://huggingface.co/docs/safetensors, format).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagemill_shared.errors import ConfigurationError

_FLOAT32: np.dtype[Any] = np.dtype("<f4")
_CODES: dict[np.dtype[Any], str] = {_FLOAT32: "F32", np.dtype(np.uint8): "U8"}
_ALIGNMENT = 8
_MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation


@dataclass(frozen=True, slots=True)
class StreamedTensor:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    chunks: Iterable[npt.NDArray[Any]]
    """Consecutive pieces of it, in row-major order."""
    dtype: np.dtype[Any] = _FLOAT32
    """float32 or uint8."""

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def encode(tensors: list[StreamedTensor], metadata: Mapping[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """The file's bytes, in pieces as small as the tensors' chunks."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        code = _CODES[tensor.dtype]
        header[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    yield struct.pack("<Q", len(encoded)) + encoded
    for tensor in tensors:
        written = 0
        for chunk in tensor.chunks:
            piece = np.ascontiguousarray(chunk, dtype=tensor.dtype).reshape(-1).view(np.uint8).data
            written += len(piece)
            yield piece
        if written != tensor.nbytes:  # the offsets of all that follows would be wrong
            raise AssertionError(f"{tensor.name}: {written} bytes for shape {tensor.shape}")


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape by tensor name.

    Raises:
        ConfigurationError: the file is not safetensors, or is shorter than its header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise ConfigurationError(f"{path} is truncated or is not a safetensors file")
            header = json.loads(file.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in tensors.items()}
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigurationError(f"{path} is damaged: its header is not that of a safetensors file") from None
    if 8 + length + end != size:
        raise ConfigurationError(f"{path} is truncated: it has {size} bytes, its header says {8 + length + end}")
    return shapes
