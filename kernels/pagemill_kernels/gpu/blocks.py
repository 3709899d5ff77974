# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Copies whole blocks: within a pool (copy-on-write), and to and from page-locked host memory (swap).

One launch for all pairs. The GPU reads and writes host memory through its own address space: nothing is staged.
"""

import triton
import triton.language as tl


@triton.jit
def copy_blocks(
    source,
    destination,
    pairs,
    words,
    pieces,
    PIECE: tl.constexpr,  # noqa: N803
):
    """source, destination: pools seen as [blocks, words] int32; pairs [K, 2] int32; pieces = ceil(words / PIECE)."""
    pair = pairs + (tl.program_id(0) // pieces) * 2
    taken = tl.load(pair).to(tl.int64)
    put = tl.load(pair + 1).to(tl.int64)
    word = (tl.program_id(0) % pieces) * PIECE + tl.arange(0, PIECE)
    is_word = word < words
    tl.store(destination + put * words + word, tl.load(source + taken * words + word, mask=is_word), mask=is_word)
