"""Memory that the system gives when it is first written, asked for before it is needed.

On virtual machines whose host takes unused memory back the first write to a page costs fifty times as much as on
others, and the KV cache is written for the first time while requests wait.
"""

from __future__ import annotations

import ctypes
import sys
import threading

from torch import Tensor

SHARE = 0.125
"""Of a pool: what the first requests need. The rest takes no memory before it is used."""
STEP = 16 << 20
_PAGE = 4096
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14 and later, which changes nothing that is there."""


def touch_beside(pool: Tensor) -> threading.Thread:
    """Asks for the first part of a host pool from a thread of its own, which ends by itself; the pool may be in use."""
    thread = threading.Thread(target=touch, args=(pool, int(pool.nbytes * SHARE)), name="first touch", daemon=True)
    thread.start()
    return thread


def touch(pool: Tensor, size: int) -> int:
    """Asks for whole pages among the first ``size`` bytes, and returns how many bytes the system gave: fewer, or none,
    where it does not know how, or has no more. They will then be given when they are written, as ever."""
    if sys.platform != "linux":
        return 0
    begin = -(-pool.data_ptr() // _PAGE) * _PAGE
    end = (pool.data_ptr() + min(size, pool.nbytes)) // _PAGE * _PAGE
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    at = begin
    while at < end:
        length = min(STEP, end - at)
        if advise(at, length, _POPULATE_WRITE):
            break
        at += length
    return at - begin if end > begin else 0
