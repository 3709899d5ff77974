"""A GGUF file's metadata and tensor table, read strictly, and its tensors as float32 rows.

The ``gguf`` package knows the quantised block formats and dequantises them. Its reader, though, takes one Python object
per vocabulary entry (seconds for one file) and trusts every length in the file, so a damaged one can make it loop for
ever; hence the header is read here, with each length checked against the file's size.

Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pagemill_shared.errors import ConfigurationError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4  # of a ggml tensor
_MAX_NESTING = 4  # of arrays in arrays
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_CHUNK_ELEMENTS = 1 << 20  # per dequantised chunk: 4 MiB of float32, which stays in the processor's cache


class _DamagedError(Exception):
    """What is wrong with the file, without its name."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file; nothing is read before `rows`."""

    path: Path
    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """In the order of numpy and torch (the file stores it reversed); the last dimension is the quantised one."""
    data: npt.NDArray[np.uint8]
    """uint8, [rows, bytes of one row], a view into the mapped file. A row is the last dimension; of a vector that is
    not quantised in blocks, it is one element."""

    def stored_rows(self, order: npt.NDArray[np.intp] | None = None) -> Iterator[npt.NDArray[np.uint8]]:
        """The tensor's rows as they are in the file, in the chunks and the order of `rows`."""
        step = max(1, _CHUNK_ELEMENTS * len(self.data) // math.prod(self.shape))
        for start in range(0, len(self.data), step):
            yield self.data[start : start + step] if order is None else self.data[order[start : start + step]]

    def rows(self, order: npt.NDArray[np.intp] | None = None) -> Iterator[npt.NDArray[np.float32]]:
        """The tensor's rows as float32 chunks [rows, elements], a few MiB each.

        Args:
            order: the file's row number of each row that is wanted, where it is not 0, 1, 2, …

        Raises:
            ConfigurationError: a value is infinite or not a number.
        """
        for stored in self.stored_rows(order):
            with np.errstate(all="ignore"):  # damaged scales overflow, which is looked for below
                # A copy where it is a view of the file: its offset need not be a multiple of the item size.
                chunk = dequantize(np.array(stored), self.kind)
            if not np.isfinite(chunk).all():
                raise ConfigurationError(
                    f"{self.path} is damaged: tensor {self.name!r} holds values that are not finite"
                )
            yield chunk


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: dict[str, Any]
    """Numbers, booleans, strings, and lists of them, by key."""
    tensors: dict[str, GgufTensor]


def open_gguf(path: Path) -> GgufFile:
    """Reads the header of ``path`` and maps its tensors.

    Raises:
        ConfigurationError: the file is unreadable, truncated, damaged, or holds what cannot be dequantised.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ConfigurationError(f"{path} is not a GGUF file: it is empty") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return _read(path, mapped)
    except _DamagedError as error:
        raise ConfigurationError(f"{path} {error}") from None


def _read(path: Path, mapped: mmap.mmap) -> GgufFile:
    cursor = _Cursor(mapped)
    if mapped[: len(_MAGIC)] != _MAGIC:
        raise _DamagedError("is not a GGUF file: it does not begin with `GGUF`")
    cursor.skip(len(_MAGIC))
    version = cursor.integer("<I")
    if version not in _VERSIONS:
        if version & 0xFFFF == 0:
            raise _DamagedError("is a big-endian GGUF file, which is not supported")
        raise _DamagedError(f"has GGUF version {version}; supported are {' and '.join(map(str, _VERSIONS))}")
    tensor_count, entry_count = cursor.integer("<Q"), cursor.integer("<Q")

    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = cursor.string()
        if key in metadata:
            raise _DamagedError(f"is damaged: it has the key {key!r} twice")
        metadata[key] = cursor.value(cursor.integer("<I"))

    headers = [_tensor_header(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _DamagedError(f"is damaged: its alignment is {alignment!r}, not a power of two")
    data_start = math.ceil(cursor.offset / alignment) * alignment
    tensors = [_map_tensor(path, mapped, data_start, *header) for header in headers]
    for kind in {tensor.kind: tensor for tensor in tensors}.values():
        _check_dequantises(kind)
    by_name = {tensor.name: tensor for tensor in tensors}
    if len(by_name) != len(tensors):
        raise _DamagedError("is damaged: it has two tensors of one name")
    return GgufFile(path, metadata, by_name)


class _Cursor:
    """Reads forward through the header and never past the end of the file."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self.offset = 0

    def skip(self, count: int) -> int:
        start = self.offset
        if count > len(self._mapped) - start:
            raise _DamagedError(
                f"is truncated or damaged: its header goes on beyond the end of the file at {start} bytes"
            )
        self.offset += count
        return start

    def integer(self, form: str) -> int:
        value: int = struct.unpack_from(form, self._mapped, self.skip(struct.calcsize(form)))[0]
        return value

    def string(self) -> str:
        length = self.integer("<Q")
        start = self.skip(length)
        try:
            return self._mapped[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise _DamagedError(f"is damaged: the text at {start} bytes is not UTF-8") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(depth)
        return self._scalars(kind, 1)[0]

    def _array(self, depth: int) -> list[Any]:
        if depth == _MAX_NESTING:
            raise _DamagedError(f"is damaged: its metadata nests arrays more than {_MAX_NESTING} deep")
        kind, count = self.integer("<I"), self.integer("<Q")
        if kind in (_STRING, _ARRAY):
            return [self.value(kind, depth + 1) for _ in range(count)]
        return self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise _DamagedError(f"is damaged: unknown value type {kind} at {self.offset} bytes")
        start = self.skip(dtype.itemsize * count)
        values: list[Any] = np.frombuffer(self._mapped[start : self.offset], dtype).tolist()
        return values


def _tensor_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dimensions = cursor.integer("<I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise _DamagedError(f"is damaged: tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.integer("<Q") for _ in range(dimensions))[::-1]
    return name, shape, cursor.integer("<I"), cursor.integer("<Q")


def _map_tensor(
    path: Path, mapped: mmap.mmap, data_start: int, name: str, shape: tuple[int, ...], kind: int, at: int
) -> GgufTensor:
    try:
        quantization = GGMLQuantizationType(kind)
    except ValueError:
        raise _DamagedError(f"stores tensor {name!r} in the unknown format {kind}") from None
    block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
    if 0 in shape or shape[-1] % block_elements:
        raise _DamagedError(
            f"is damaged: tensor {name!r} of shape {list(shape)} cannot be stored as {quantization.name}"
        )
    row_count, row_bytes = math.prod(shape[:-1]), shape[-1] // block_elements * block_bytes
    if len(shape) == 1 and block_elements == 1:
        row_count, row_bytes = shape[0], block_bytes
    start, size = data_start + at, row_count * row_bytes
    if start + size > len(mapped):
        raise _DamagedError(f"is truncated: tensor {name!r} ends at {start + size} bytes, the file at {len(mapped)}")
    data = np.frombuffer(mapped, np.uint8, size, offset=start).reshape(row_count, row_bytes)
    return GgufTensor(path, name, quantization, shape, data)


def _check_dequantises(tensor: GgufTensor) -> None:
    """Tries one row, so that a format without a decoder is refused before anything is written."""
    try:
        with np.errstate(all="ignore"):
            dequantize(np.array(tensor.data[:1]), tensor.kind)
    except NotImplementedError:
        raise _DamagedError(
            f"stores tensor {tensor.name!r} as {tensor.kind.name}, which cannot be dequantised"
        ) from None
