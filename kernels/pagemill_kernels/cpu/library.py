"""Loads a compiled library and declares its functions."""

from __future__ import annotations

import ctypes
import re
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
CACHE_DTYPES = {**DTYPES, torch.int8: 3, torch.float8_e4m3fn: 4}


class Batch(Structure):
    """``Batch`` of source/batch.h."""

    _fields_ = (
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("slots", c_void_p),
        ("generated_from", c_void_p),
        ("cache", c_void_p),
        ("rows", c_int64),
        ("table_width", c_int64),
        ("layers", c_int64),
        ("block_size", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("cache_dtype", c_int32),
        ("threads", c_int32),
    )


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "pm_set_runtime": (None, [c_void_p, c_void_p]),
    "pm_lanes": (c_int32, []),
    "pm_workspace_new": (c_void_p, []),
    "pm_workspace_free": (None, [c_void_p]),
    "pm_rotate_and_write": (
        None,
        [POINTER(Batch), c_void_p, c_int32, c_int64, c_void_p, c_void_p, c_int64, c_int64],
    ),
    "pm_attention": (
        None,
        [
            *(c_void_p, POINTER(Batch), c_void_p, c_int64, c_int32, c_int64, c_int64),
            *(c_float, c_int64, c_float, c_void_p),
        ],
    ),
    "pm_rms_norm": (None, [c_void_p, c_void_p, c_void_p, c_int32, c_int64, c_int64, c_float, c_int32]),
    "pm_norm_heads": (None, [c_void_p, c_void_p, c_int32, *[c_int64] * 4, c_float, c_int32]),
    "pm_silu_mul": (None, [c_void_p, c_void_p, c_int32, c_int64, c_int64, c_int32]),
    "pm_gelu_tanh_mul": (None, [c_void_p, c_void_p, c_int32, c_int64, c_int64, c_int32]),
    "pm_linear_columns": (c_int64, []),
    "pm_linear_pack": (None, [c_void_p, c_int64, c_int64, c_void_p, c_int32]),
    "pm_linear": (None, [c_void_p, *[c_int64] * 4, *[c_void_p] * 4, c_int32]),
    "pm_int8_packed_bytes": (c_int64, [c_int64, c_int64]),
    "pm_int8_row_bytes": (c_int64, [c_int64]),
    "pm_int8_pack": (None, [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int32]),
    "pm_int8_linear": (None, [c_void_p, *[c_int64] * 4, *[c_void_p] * 7, c_int32]),
    "pm_blocks_columns": (c_int64, []),
    "pm_blocks_row_bytes": (c_int64, [c_int64]),
    "pm_blocks_pack": (None, [c_int32, c_void_p, c_int64, c_int64, c_void_p, c_int32]),
    "pm_blocks_linear": (
        None,
        [c_void_p, *[c_int64] * 4, c_int32, *[c_void_p] * 4, c_int64, c_void_p, c_int32],
    ),
    "pm_narrow_packed_bytes": (c_int64, [c_int32, c_int64, c_int64]),
    "pm_narrow_pack": (c_int32, [c_int32, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int32]),
    "pm_narrow_linear": (None, [c_void_p, *[c_int64] * 4, c_int32, *[c_void_p] * 4, c_int32]),
    "pm_copy_blocks": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int32]),
}


def load_library(path: Path) -> ctypes.CDLL:
    """The library with its functions declared, working on torch's threads.

    Raises:
        OSError, AttributeError: it is not such a library.
    """
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.pm_set_runtime(*_openmp())
    return library


def _openmp(maps: Path = Path("/proc/self/maps")) -> tuple[int | None, int | None]:
    """Addresses of GOMP_parallel and omp_get_thread_num in the OpenMP runtime that torch has loaded, which LLVM's and
    Intel's have as well; None twice where there is none, and one thread then does all."""
    try:
        text = maps.read_text(errors="replace")
    except OSError:
        return None, None
    paths = set(re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)\b\S*\.so\S*)", text))
    for path in sorted(paths, key=lambda path: ("torch" not in path, path)):
        try:
            runtime = ctypes.CDLL(path)
            return _address(runtime.GOMP_parallel), _address(runtime.omp_get_thread_num)
        except (OSError, AttributeError):
            continue
    return None, None


def _address(function: Any) -> int | None:
    return ctypes.cast(function, c_void_p).value
