# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Rotary embedding and cache write in one pass over queries, keys and values.

Read once and written once: queries and keys in place, keys and values into their slots. A program takes one token and a
few heads, all dimensions; halves of the rotated part are loaded apart, so that a pair stands in one thread.
"""

import triton
import triton.language as tl

from pagemill_kernels.gpu.eight_bits import rounded, scale_of


@triton.jit(do_not_specialize=["layer"])
def rotate_and_write(
    qkv,
    cosines,
    sines,
    slots,
    cache,
    scales,
    layer,
    block_stride,
    token_stride,
    head_stride,
    first_head,
    NUM_HEADS: tl.constexpr,  # noqa: N803
    NUM_KV_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    ROTARY_DIM: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    REST: tl.constexpr,  # noqa: N803
    NUMBERS: tl.constexpr,  # noqa: N803
):
    """qkv [T, NUM_HEADS + 2 * KV, D], cosines and sines [T, ROTARY_DIM], slots [T] int32; cache, scales and NUMBERS
    as in `attend`.

    HALF and REST are powers of two that hold ROTARY_DIM / 2 and HEAD_DIM - ROTARY_DIM; ROTARY_DIM may be 0.
    """
    token = tl.program_id(0).to(tl.int64)
    head = first_head + tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < NUM_HEADS + 2 * NUM_KV_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    is_cached = is_head & (head >= NUM_HEADS)
    slot = tl.load(slots + token)
    block = (slot // BLOCK_SIZE).to(tl.int64)
    source = qkv + token * token_stride + head * head_stride
    kv_head = tl.where(is_value, head - NUM_HEADS - NUM_KV_HEADS, head - NUM_HEADS)
    kind = layer * 2 + is_value.to(tl.int32)
    PAGE: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM  # noqa: N806
    PAGE_STRIDE: tl.constexpr = PAGE if NUMBERS == "floats" else PAGE + BLOCK_SIZE * NUM_KV_HEADS * 4  # noqa: N806
    within = kind * PAGE_STRIDE + slot % BLOCK_SIZE * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    target = cache + block * block_stride + within
    peak = tl.zeros([HEADS], tl.float32)
    fault = tl.zeros([HEADS], tl.float32)

    if ROTARY_DIM > 0:
        pair = tl.arange(0, HALF)
        is_pair = pair < ROTARY_DIM // 2
        turns = token * ROTARY_DIM + pair
        is_loaded = is_head[:, None] & is_pair[None, :]
        low = source[:, None] + pair[None, :]
        high = low + ROTARY_DIM // 2
        x = tl.load(low, mask=is_loaded, other=0.0).to(tl.float32)
        y = tl.load(high, mask=is_loaded, other=0.0).to(tl.float32)
        cos_low = tl.load(cosines + turns, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        sin_low = tl.load(sines + turns, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        cos_high = tl.load(cosines + turns + ROTARY_DIM // 2, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        sin_high = tl.load(sines + turns + ROTARY_DIM // 2, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        turned_x = tl.where(is_value[:, None], x, x * cos_low + y * sin_low)
        turned_y = tl.where(is_value[:, None], y, y * cos_high + x * sin_high)
        is_turned = is_loaded & (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
        tl.store(low, turned_x.to(qkv.dtype.element_ty), mask=is_turned)
        tl.store(high, turned_y.to(qkv.dtype.element_ty), mask=is_turned)
        is_written = is_pair[None, :] & is_cached[:, None]
        # As the query's precision has it, whatever the cache's: keys are the same whether read from here or there.
        kept_x = turned_x.to(qkv.dtype.element_ty)
        kept_y = turned_y.to(qkv.dtype.element_ty)
        if NUMBERS == "floats":
            tl.store(target[:, None] + pair[None, :], kept_x.to(cache.dtype.element_ty), mask=is_written)
            upper = target[:, None] + pair[None, :] + ROTARY_DIM // 2
            tl.store(upper, kept_y.to(cache.dtype.element_ty), mask=is_written)
        else:
            wide_x, wide_y = kept_x.to(tl.float32), kept_y.to(tl.float32)
            peak = tl.max(tl.maximum(tl.abs(wide_x), tl.abs(wide_y)), 1)
            fault = tl.sum(wide_x * 0.0 + wide_y * 0.0, 1)
    if HEAD_DIM > ROTARY_DIM:
        rest = ROTARY_DIM + tl.arange(0, REST)
        is_copied = (rest < HEAD_DIM)[None, :] & is_cached[:, None]
        z = tl.load(source[:, None] + rest[None, :], mask=is_copied, other=0.0)
        if NUMBERS == "floats":
            tl.store(target[:, None] + rest[None, :], z.to(cache.dtype.element_ty), mask=is_copied)
        else:
            wide_z = z.to(tl.float32)
            peak = tl.maximum(peak, tl.max(tl.abs(wide_z), 1))
            fault += tl.sum(wide_z * 0.0, 1)
    if NUMBERS != "floats":
        scale, inverse = scale_of(peak, fault, NUMBERS)
        if ROTARY_DIM > 0:
            tl.store(target[:, None] + pair[None, :], rounded(wide_x * inverse[:, None], NUMBERS), mask=is_written)
            upper = target[:, None] + pair[None, :] + ROTARY_DIM // 2
            tl.store(upper, rounded(wide_y * inverse[:, None], NUMBERS), mask=is_written)
        if HEAD_DIM > ROTARY_DIM:
            tl.store(target[:, None] + rest[None, :], rounded(wide_z * inverse[:, None], NUMBERS), mask=is_copied)
        of_page = kind * (PAGE_STRIDE // 4) + PAGE // 4 + kv_head * BLOCK_SIZE + slot % BLOCK_SIZE
        tl.store(scales + block * (block_stride // 4) + of_page, scale, mask=is_cached)
