"""How large the pieces are that a kernel works on: from the head size, the width of the cache's numbers and the GPU.

The sizes keep every variant free of register spills on the targets that are built in the tests, and within the shared
memory of the smallest of them (99 KiB a block, compute capability 8.6 and 8.9). One is left that spills: float32 with
more than 32 query heads to a key head, which no tile size helps.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_DOT = 16
"""Fewest rows of a matrix product on tensor cores."""


LARGEST_DECODE_ROWS = 32
"""Groups beyond it, which few models have, take the tiles of chunks for decode rows, too."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One shape of the attention kernel.

    Attributes:
        rows: query rows, each one query head of one token; a tile holds ``rows // group`` tokens.
        keys: keys per round of the loop.
        warps, stages: of Triton: warps of a program, and rounds whose loads are in flight.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def decode_tile(group: int, head_dim: int, itemsize: int, capability: int) -> Tile:
    """For rows of one token: the query heads of one key/value head, and as many keys as keep memory busy.

    Args:
        group: query heads that share a key/value head.
        itemsize: bytes of one element of the cache.
        capability: compute capability of the device, 90 for 9.0.
    """
    rows = max(MIN_DOT, power_of_two(group))
    if rows > LARGEST_DECODE_ROWS:
        return chunk_tile(group, head_dim, itemsize, capability)
    if itemsize == 4:
        if rows > MIN_DOT:
            return chunk_tile(group, head_dim, itemsize, capability)
        return Tile(rows, 16, 4, 2 if capability < 90 else 3)
    # One round is 32 KiB of keys and values, or less; three stages keep two rounds in flight.
    return Tile(rows, 8192 // max(power_of_two(head_dim), 64), 4, 3)


def chunk_tile(group: int, head_dim: int, itemsize: int, capability: int) -> Tile:
    """For prefill chunks: enough rows that a key, once loaded, is used often. float32, which tensor cores do not
    multiply exactly, is for comparisons; it gets what the registers hold."""
    if itemsize == 4:
        rows = max(32, power_of_two(group))
        return Tile(rows, 16, 8 if rows == 32 else 16, 2)
    if head_dim <= 128:
        # Before 9.0 every warp widens all keys of 8 bits for itself, in its registers.
        keys = 32 if itemsize == 1 and capability < 90 and head_dim > 64 else 64
        return Tile(max(128, power_of_two(group)), keys, 8, 2)
    rows = max(64, power_of_two(group))
    # With 8 warps triton 3.7 builds for 10.0 at 128 registers and leaves three values on the stack; four warps may have
    # twice as many. Elsewhere four have too few.
    return Tile(rows, 32, 4 if rows == 64 and 100 <= capability < 120 else 8, 2)


def most_registers(itemsize: int, capability: int) -> int | None:
    """What ptxas is told that a thread of the attention kernel may have at most; None: nothing.

    Left to itself it aims at an occupancy and leaves a few values on the stack for it: in builds for 10.0, and in those
    of float32 before 9.0. For decode tiles shared memory does not allow that occupancy anyway; chunk tiles of 64
    dimensions lose it, and whether the stack would cost more nobody has measured. From 9.0 to 10.0 its choice needs
    no stack.
    """
    return 255 if capability >= 100 or (itemsize == 4 and capability < 90) else None
