"""Names of full blocks: chained 128-bit digests of all tokens from the start; equal names mean equal contents."""

from __future__ import annotations

from hashlib import blake2b

from pagemill_shared.schema import Int32Array

DIGEST_BYTES = 16


def root_digest(cache_salt: str) -> bytes:
    """The parent of a sequence's first block. Requests of different salts never share a name."""
    return blake2b(cache_salt.encode(), digest_size=DIGEST_BYTES, person=b"pagemill-salt").digest()


def extend_digests(digests: list[bytes], root: bytes, tokens: Int32Array, block_size: int, count: int) -> None:
    """Append to ``digests``, in place, so that it names at least the first ``count`` blocks of ``tokens``."""
    known = len(digests)
    if known >= count:
        return
    parent = digests[-1] if digests else root
    data = tokens[known * block_size : count * block_size].tobytes()
    width = 4 * block_size
    for start in range(0, len(data), width):
        parent = blake2b(parent + data[start : start + width], digest_size=DIGEST_BYTES).digest()
        digests.append(parent)
