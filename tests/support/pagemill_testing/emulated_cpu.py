"""CPU kernels for 64-bit ARM on another machine: a library that is called in an emulator, argument by argument.

Takes the place of what `load_library` gives, so that tests of the kernels run as they are. The library lives in a
process of its own (qemu's user mode, ``programs/emulated_calls.cpp``); what the arguments point to is sent there and,
where a function writes it, back. One thread computes: there is no OpenMP runtime.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pagemill_kernels.blocks import BLOCK_BYTES, BLOCK_KINDS, BLOCK_SIZE
from pagemill_kernels.cpu.build import BuildError
from pagemill_kernels.cpu.library import _FUNCTIONS, CACHE_DTYPES, DTYPES, Batch
from pagemill_kernels.cpu.narrow import NARROW_KINDS
from pagemill_kernels.interface import entry_elements

CALLER = Path(__file__).parents[2] / "kernels" / "programs" / "emulated_calls.cpp"
SYSROOT = Path("/usr/aarch64-linux-gnu")
HELP = "on Debian: apt-get install g++-aarch64-linux-gnu qemu-user"

_ITEMSIZE = {number: dtype.itemsize for dtype, number in DTYPES.items()}
_CACHE_DTYPES = {number: dtype for dtype, number in CACHE_DTYPES.items()}

Buffer = tuple[int, int, bool]
"""Address, bytes, whether a function writes it. Address 0 is a null pointer."""


def cross_compiler() -> list[str]:
    """The compiler for 64-bit ARM.

    Raises:
        BuildError: it is missing, or what runs its programs.
    """
    for program in ("aarch64-linux-gnu-g++", "qemu-aarch64"):
        if shutil.which(program) is None:
            raise BuildError(f"no {program} ({HELP})")
    return ["aarch64-linux-gnu-g++"]


class EmulatedLibrary:
    """A library of kernels for 64-bit ARM, with its functions as attributes.

    Args:
        library: compiled for 64-bit ARM.
        folder: for the program that calls it.
    """

    def __init__(self, library: Path, folder: Path) -> None:
        caller = folder / "emulated_calls"
        command = [*cross_compiler(), "-std=c++17", "-O2", str(CALLER), "-ldl", "-o", str(caller)]
        subprocess.run(command, check=True)
        self._process = subprocess.Popen(
            ["qemu-aarch64", "-L", str(SYSROOT), str(caller), str(library)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._sizes = _Sizes(self)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def __getattr__(self, name: str) -> Callable[..., int | None]:
        if name not in _FUNCTIONS:
            raise AttributeError(name)
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> int | None:
        result, types = _FUNCTIONS[name]
        if self._process.returncode is not None and name == "pm_workspace_free":
            return None  # it went with the process
        assert len(arguments) == len(types), name
        buffers: dict[int, tuple[int, bool]] = {}
        for address, size, is_written in self._sizes.of(name, arguments):
            known = buffers.get(address, (0, False))
            if address:
                buffers[address] = max(size, known[0]), is_written or known[1]
        index = {address: number for number, address in enumerate(buffers)}
        pointers, packed = b"", b""
        for value, kind in zip(arguments, types, strict=True):
            if isinstance(value, Batch):
                buffers[ctypes.addressof(value)] = ctypes.sizeof(value), False
                index[ctypes.addressof(value)] = len(index)
                packed += struct.pack("<iq", 2, index[ctypes.addressof(value)])
                for field in ("query_starts", "context_lens", "block_tables", "slots", "generated_from", "cache"):
                    where = getattr(Batch, field).offset
                    to = index.get(getattr(value, field), -1)
                    pointers += struct.pack("<iii", index[ctypes.addressof(value)], where, to)
            elif kind is ctypes.c_float:
                packed += struct.pack("<id", 1, value)
            elif value in index:
                packed += struct.pack("<iq", 2, index[value])
            else:
                packed += struct.pack("<iq", 0, value or 0)
        self._send(struct.pack("<i", len(name)) + name.encode())
        self._send(struct.pack("<i", len(buffers)))
        for address, (size, is_written) in buffers.items():
            self._send(struct.pack("<qi", size, is_written) + ctypes.string_at(address, size))
        self._send(struct.pack("<i", len(pointers) // 12) + pointers)
        self._send(struct.pack("<i", len(arguments)) + packed)
        assert self._process.stdin is not None
        self._process.stdin.flush()
        [answer] = struct.unpack("<q", self._receive(8))
        for address, (size, is_written) in buffers.items():
            if is_written:
                ctypes.memmove(address, self._receive(size), size)
        return None if result is None else int(np.int32(answer & 0xFFFFFFFF)) if result is ctypes.c_int32 else answer

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)

    def _receive(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) != size:
            raise RuntimeError(f"the emulated program ended with status {self._process.wait()}")
        return data


class _Sizes:
    """What the pointers among a function's arguments point to: one method a function, with its arguments."""

    def __init__(self, library: EmulatedLibrary) -> None:
        self._library = library

    def of(self, name: str, arguments: tuple[Any, ...]) -> Iterator[Buffer]:
        sizes: Callable[..., Iterator[Buffer]] | None = getattr(self, name, None)
        if sizes is None:
            assert not any(kind is not ctypes.c_int32 and kind is not ctypes.c_int64 for kind in _FUNCTIONS[name][1])
            return iter(())
        return sizes(*arguments)

    def pm_workspace_free(self, workspace: int) -> Iterator[Buffer]:
        yield from ()  # an address over there

    def _batch(self, batch: Batch) -> tuple[int, list[Buffer]]:
        """How many tokens, and what the batch points to."""
        starts = _numbers(batch.query_starts, batch.rows + 1)
        lengths = _numbers(batch.context_lens, batch.rows)
        tables = _numbers(batch.block_tables, batch.rows * batch.table_width).reshape(batch.rows, -1)
        tokens = int(starts[-1])
        slots = _numbers(batch.slots, tokens)
        used = [int(table[: -(-int(n) // batch.block_size)].max()) for table, n in zip(tables, lengths, strict=True)]
        blocks = 1 + max(*used, int(slots.max()) // batch.block_size)
        dtype = _CACHE_DTYPES[batch.cache_dtype]
        entry = (batch.head_dim + entry_elements(0, dtype)) * dtype.itemsize
        block_bytes = batch.layers * 2 * batch.block_size * batch.kv_heads * entry
        arrays = (batch.query_starts, starts), (batch.context_lens, lengths), (batch.block_tables, tables)
        buffers = [(address, array.nbytes, False) for address, array in (*arrays, (batch.slots, slots))]
        if batch.generated_from:
            buffers.append((batch.generated_from, lengths.nbytes, False))
        return tokens, [*buffers, (batch.cache, blocks * block_bytes, True)]

    def pm_rotate_and_write(
        self, batch: Batch, qkv: int, dtype: int, heads: int, cosines: int, sines: int, rotary_dim: int, layer: int
    ) -> Iterator[Buffer]:
        tokens, buffers = self._batch(batch)
        yield from buffers
        yield qkv, tokens * heads * batch.head_dim * _ITEMSIZE[dtype], True
        yield cosines, tokens * rotary_dim * _ITEMSIZE[dtype], False
        yield sines, tokens * rotary_dim * _ITEMSIZE[dtype], False

    def pm_attention(
        self, workspace: int, batch: Batch, query: int, query_stride: int, dtype: int, heads: int, *rest: Any
    ) -> Iterator[Buffer]:
        tokens, buffers = self._batch(batch)
        yield from buffers
        row = heads * batch.head_dim
        yield query, ((tokens - 1) * query_stride + row) * _ITEMSIZE[dtype], False
        yield rest[-1], tokens * row * _ITEMSIZE[dtype], True

    def pm_copy_blocks(
        self, source: int, destination: int, pairs: int, count: int, block_bytes: int, threads: int
    ) -> Iterator[Buffer]:
        if count:
            taken, put = _numbers(pairs, 2 * count).reshape(-1, 2).max(0) + 1
            yield source, int(taken) * block_bytes, False
            yield destination, int(put) * block_bytes, True
            yield pairs, count * 16, False

    def pm_rms_norm(
        self, x: int, weight: int, out: int, dtype: int, rows: int, size: int, eps: float, threads: int
    ) -> Iterator[Buffer]:
        yield x, rows * size * _ITEMSIZE[dtype], False
        yield weight, size * _ITEMSIZE[dtype], False
        yield out, rows * size * _ITEMSIZE[dtype], True

    def pm_norm_heads(
        self, qkv: int, weights: int, dtype: int, rows: int, all_heads: int, heads: int, size: int, *rest: Any
    ) -> Iterator[Buffer]:
        yield qkv, rows * all_heads * size * _ITEMSIZE[dtype], True
        yield weights, heads * size * _ITEMSIZE[dtype], False

    def pm_silu_mul(self, gate_up: int, out: int, dtype: int, rows: int, size: int, threads: int) -> Iterator[Buffer]:
        yield gate_up, rows * 2 * size * _ITEMSIZE[dtype], False
        yield out, rows * size * _ITEMSIZE[dtype], True

    pm_gelu_tanh_mul = pm_silu_mul

    def _columns(self, outputs: int, name: str = "pm_linear_columns") -> int:
        columns = getattr(self._library, name)()
        assert isinstance(columns, int)
        return -(-outputs // columns) * columns

    def pm_linear_pack(self, weight: int, outputs: int, inputs: int, packed: int, threads: int) -> Iterator[Buffer]:
        yield weight, outputs * inputs * 4, False
        yield packed, self._columns(outputs) * inputs * 4, True

    def pm_linear(
        self, x: int, x_stride: int, rows: int, outputs: int, inputs: int, packed: int, *rest: Any
    ) -> Iterator[Buffer]:
        bias, added, out, _ = rest
        yield packed, self._columns(outputs) * inputs * 4, False
        yield from _product(x, x_stride, rows, outputs, inputs, bias, added, out, outputs)

    def _int8(self, packed: int, scales: int, shifts: int, outputs: int, inputs: int, written: bool) -> list[Buffer]:
        size = self._library.pm_int8_packed_bytes(outputs, inputs)
        assert size is not None
        padded = self._columns(outputs)
        return [(packed, size, written), (scales, padded * 4, written), (shifts, padded * 4, written)]

    def pm_int8_pack(
        self, weight: int, outputs: int, inputs: int, packed: int, scales: int, shifts: int, threads: int
    ) -> Iterator[Buffer]:
        yield weight, outputs * inputs * 4, False
        yield from self._int8(packed, scales, shifts, outputs, inputs, True)

    def pm_int8_linear(
        self, x: int, x_stride: int, rows: int, outputs: int, inputs: int, packed: int, *rest: Any
    ) -> Iterator[Buffer]:
        scales, shifts, bias, added, out, workspace, _ = rest
        row_bytes = self._library.pm_int8_row_bytes(inputs)
        assert row_bytes is not None
        yield from self._int8(packed, scales, shifts, outputs, inputs, False)
        yield from _product(x, x_stride, rows, outputs, inputs, bias, added, out, outputs)
        yield workspace, rows * row_bytes, True

    def _blocks(self, kind: int, outputs: int, inputs: int) -> int:
        return outputs * inputs // BLOCK_SIZE * BLOCK_BYTES[BLOCK_KINDS[kind]]

    def pm_blocks_pack(
        self, kind: int, data: int, outputs: int, inputs: int, packed: int, threads: int
    ) -> Iterator[Buffer]:
        yield data, self._blocks(kind, outputs, inputs), False
        yield packed, self._blocks(kind, self._columns(outputs, "pm_blocks_columns"), inputs), True

    def pm_blocks_linear(
        self, x: int, x_stride: int, rows: int, outputs: int, inputs: int, kind: int, packed: int, *rest: Any
    ) -> Iterator[Buffer]:
        bias, added, out, stride, workspace, _ = rest
        row_bytes = self._library.pm_blocks_row_bytes(inputs)
        assert row_bytes is not None
        yield packed, self._blocks(kind, self._columns(outputs, "pm_blocks_columns"), inputs), False
        yield from _product(x, x_stride, rows, outputs, inputs, bias, added, out, stride)
        yield workspace, rows * row_bytes, True

    def pm_narrow_pack(
        self, kind: int, weight: int, data: int, outputs: int, inputs: int, packed: int, threads: int
    ) -> Iterator[Buffer]:
        yield weight, outputs * inputs * 4, False
        if data:
            yield data, self._blocks(kind - NARROW_KINDS.index(BLOCK_KINDS[0]), outputs, inputs), False
        yield packed, self._narrow(kind, outputs, inputs), True

    def pm_narrow_linear(
        self, x: int, x_stride: int, rows: int, outputs: int, inputs: int, kind: int, packed: int, *rest: Any
    ) -> Iterator[Buffer]:
        bias, added, out, _ = rest
        yield packed, self._narrow(kind, outputs, inputs), False
        yield from _product(x, x_stride, rows, outputs, inputs, bias, added, out, outputs)

    def _narrow(self, kind: int, outputs: int, inputs: int) -> int:
        size = self._library.pm_narrow_packed_bytes(kind, outputs, inputs)
        assert size is not None
        return size


def _product(
    x: int, x_stride: int, rows: int, outputs: int, inputs: int, bias: int, added: int, out: int, stride: int
) -> Iterator[Buffer]:
    if rows:
        yield x, ((rows - 1) * x_stride + inputs) * 4, False
        yield bias, outputs * 4, False
        yield added, ((rows - 1) * stride + outputs) * 4, False
        yield out, ((rows - 1) * stride + outputs) * 4, True


def _numbers(address: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.frombuffer(ctypes.string_at(address, count * 8), np.int64)
