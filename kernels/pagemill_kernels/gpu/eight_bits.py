# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Numbers of 8 bits in registers: int8, and e4m3 by integer arithmetic, so that GPUs without 8-bit floats have it, too.

A page (the keys or the values of a block in one layer) holds its numbers [block_size, KV, D] first, then all its scales
[KV, block_size] float32. So numbers are loaded 16 bytes at a time, and a head's scales lie side by side.
"""

import triton
import triton.language as tl


@triton.jit
def widened(numbers, nothing, NUMBERS: tl.constexpr, dtype: tl.constexpr):  # noqa: N803
    """Numbers, which come as int8, as floats of ``dtype``. ``nothing`` is 0.

    Where the compiler does not know that it is, numbers are widened as they were loaded, and then laid out for a matrix
    product. Else it is the other way round: good for keys, which lie as the product wants them; values would be read
    byte by byte.
    """
    if NUMBERS == "fp8":
        # Sign, exponent and mantissa at the places of float32's, whose bias is 120 more; subnormal numbers come along.
        moved = (numbers.to(tl.int32) << 20) & (nothing - 0x780FFFFF - 1)
        return (moved.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)
    # By the bits of 2^23 + 128 + x: conversions of integers take several times as long.
    biased = ((numbers.to(tl.int32) & 0xFF) ^ (nothing + 0x4B000080)).to(tl.float32, bitcast=True)
    return (biased - 8388736.0).to(dtype)


@triton.jit
def scale_of(peak, fault, NUMBERS: tl.constexpr):  # noqa: N803
    """The scale with which ``peak`` becomes the largest number, and its inverse. ``fault`` is 0, or NaN where an
    element is not finite: then the scale is not."""
    LARGEST: tl.constexpr = 448.0 if NUMBERS == "fp8" else 127.0  # noqa: N806
    scale = tl.div_rn(peak, tl.full(peak.shape, LARGEST, tl.float32)) + fault
    inverse = tl.div_rn(tl.full(peak.shape, 1.0, tl.float32), scale)
    return scale, tl.where(scale > 0.0, inverse, 0.0)


@triton.jit
def rounded(x, NUMBERS: tl.constexpr):  # noqa: N803
    """float32 to the nearest number, ties to even, as int8; the largest for what lies beyond."""
    if NUMBERS == "fp8":
        bounded = tl.minimum(tl.maximum(x, -448.0), 448.0)
        bits = bounded.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # At 2^-6 and above three bits of mantissa stay; below are multiples of 2^-9.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
        least = (tl.abs(bounded) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 15
        return (((bits >> 24) & 0x80) | tl.where(magnitude < 0x3C800000, least, normal)).to(tl.int8)
    bounded = tl.minimum(tl.maximum(x, -127.0), 127.0)
    return ((bounded + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)
