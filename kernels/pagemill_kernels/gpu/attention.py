# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Paged attention: one kernel for decode rows and prefill chunks, and one that puts split key ranges together.

A program takes one work item (see ``work``) and one key/value head. Its query rows are the heads of the group of all
its tokens, so that one matrix product serves them all and every key is loaded once for the group. Softmax is kept
online (running maximum and sum, base 2) in float32. Keys and values are read where they lie, through the block table.
"""

import triton
import triton.language as tl

from pagemill_kernels.gpu.eight_bits import widened


# Built once for all layers, widths of block tables, and places of the tables in what was uploaded.
@triton.jit(do_not_specialize=["layer", "table_stride"], do_not_specialize_on_alignment=["tables"])
def attend(
    query,
    cache,
    scales,
    tables,
    items,
    out,
    partial,
    partial_lse,
    layer,
    block_stride,
    table_stride,
    query_stride,
    head_stride,
    scale,
    soft_cap,
    window,
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    NUM_KV_HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
    HAS_WINDOW: tl.constexpr,  # noqa: N803
    HAS_SOFT_CAP: tl.constexpr,  # noqa: N803
    NUMBERS: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
):
    """query [T, H, D], cache [blocks, L, 2, BLOCK_SIZE, KV, D], tables [R, W] int32, items [N, 8] int32,
    out [T, H * D], partial [P, KV, ROWS, D] float32 and partial_lse [P, KV, ROWS] float32, base 2.

    NUMBERS is "floats", or "int8" or "fp8" for a cache in 8 bits, given twice: as int8, and as float32 for its scales.
    """
    LOG2E: tl.constexpr = 1.4426950408889634  # noqa: N806
    PAGE: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM  # noqa: N806
    PAGE_STRIDE: tl.constexpr = PAGE if NUMBERS == "floats" else PAGE + BLOCK_SIZE * NUM_KV_HEADS * 4  # noqa: N806
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    item = items + (tl.program_id(0) // NUM_KV_HEADS) * 8
    row = tl.load(item)
    first = tl.load(item + 1)
    count = tl.load(item + 2)
    start = tl.load(item + 3)
    key_begin = tl.load(item + 4)
    key_end = tl.load(item + 5)
    slot = tl.load(item + 6)

    lane = tl.arange(0, ROWS)
    token = lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    position = start + token
    dims = tl.arange(0, DIM)
    is_dim = (dims < HEAD_DIM)[None, :]
    is_row = (token < count)[:, None]
    where_query = (first + token).to(tl.int64) * query_stride + head * head_stride
    q = tl.load(query + where_query[:, None] + dims[None, :], mask=is_row & is_dim, other=0.0)

    table = tables + row.to(tl.int64) * table_stride
    # Numbers beyond 32 bits: a block's offset in the pool. Within a block 32 bits do.
    keys_of_layer = cache + layer * (2 * PAGE_STRIDE) + kv_head * HEAD_DIM
    scales_of_layer = scales + layer * (PAGE_STRIDE // 2) + (PAGE // 4 + kv_head * BLOCK_SIZE)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    most = tl.full([], 0.0, tl.float32)  # largest scale of a value so far, which `acc` is in units of
    nothing = tl.minimum(count, 0)  # 0, and the compiler does not know it
    ahead = key_begin + tl.arange(0, KEYS)
    block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < key_end, other=0).to(tl.int64)
    for begin in range(key_begin, key_end, KEYS):
        key = begin + tl.arange(0, KEYS)
        # Beyond the context may lie anything, NaN included: it is not even loaded.
        is_key = key < key_end
        where_key = block * block_stride + (key % BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
        pointers = keys_of_layer + where_key[:, None] + dims[None, :]
        loaded = is_key[:, None] & is_dim if DIM != HEAD_DIM else is_key[:, None]
        where_scale = scales_of_layer + block * (block_stride // 4) + key % BLOCK_SIZE
        # The next round's blocks now: loads of keys that wait for a load of this round would not be pipelined.
        ahead = key + KEYS
        block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < key_end, other=0).to(tl.int64)
        k = tl.load(pointers, mask=loaded, other=0)
        if NUMBERS == "floats":
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        else:
            wide = widened(k, 0, NUMBERS, q.dtype)
            scores = tl.dot(q, tl.trans(wide), input_precision=PRECISION)
            scores = scores * tl.load(where_scale, mask=is_key, other=0.0)[None, :]
        if HAS_SOFT_CAP:
            # tanh(x) = 1 - 2 / (e^2x + 1), which neither overflows nor needs a library.
            grown = tl.exp2(scores * (2.0 * LOG2E * scale / soft_cap))
            scores = (soft_cap * LOG2E) * (1.0 - 2.0 / (grown + 1.0))
        else:
            scores = scores * (scale * LOG2E)
        seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen no key yet: any finite reference makes its weights 0 instead of NaN.
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(top - reference)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(pointers + PAGE_STRIDE, mask=loaded, other=0)
        if NUMBERS == "floats":
            v = v.to(q.dtype)
        else:
            # Weights take the scales over, in units of the largest: half precision would lose small ones otherwise.
            scale_v = tl.load(where_scale + PAGE_STRIDE // 4, mask=is_key, other=0.0)
            larger = tl.maximum(most, tl.max(scale_v, 0))
            inverse = tl.where(larger > 1e-37, 1.0 / larger, 0.0)  # not infinite
            weights = weights * (scale_v * inverse)[None, :]
            shrink = shrink * (most * inverse)
            most = larger
            v = widened(v, nothing, NUMBERS, q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = higher

    divisor = tl.where(total == 0.0, 1.0, total)
    result = acc / divisor[:, None]
    if NUMBERS != "floats":
        result = result * most
    if slot < 0:
        where_out = (first + token).to(tl.int64) * (NUM_KV_HEADS * GROUP * HEAD_DIM) + head * HEAD_DIM
        tl.store(out + where_out[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=is_row & is_dim)
    else:
        where_part = (slot.to(tl.int64) * NUM_KV_HEADS + kv_head) * ROWS + lane
        tl.store(partial + where_part[:, None] * HEAD_DIM + dims[None, :], result, mask=is_row & is_dim)
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(divisor))
        tl.store(partial_lse + where_part, lse, mask=token < count)


@triton.jit(do_not_specialize=["most_tokens"])
def reduce_parts(
    reductions,
    partial,
    partial_lse,
    out,
    most_tokens,
    NUM_KV_HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
):
    """Weighs the partial results of one token and head by their sums. One program each; arguments as `attend`'s."""
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP  # noqa: N806
    head = tl.program_id(0) % NUM_HEADS
    rest = tl.program_id(0) // NUM_HEADS
    token = rest % most_tokens
    reduction = reductions + (rest // most_tokens) * 4
    slot = tl.load(reduction).to(tl.int64)
    parts = tl.load(reduction + 1)
    first = tl.load(reduction + 2)
    if token >= tl.load(reduction + 3):
        return
    dims = tl.arange(0, DIM)
    is_dim = dims < HEAD_DIM
    part = tl.arange(0, PARTS)
    at = (slot * NUM_KV_HEADS + head // GROUP) * ROWS + token * GROUP + head % GROUP
    top = tl.full([PARTS], float("-inf"), tl.float32)
    for begin in range(0, parts, PARTS):
        where = at + (begin + part) * (NUM_KV_HEADS * ROWS)
        top = tl.maximum(top, tl.load(partial_lse + where, mask=begin + part < parts, other=float("-inf")))
    highest = tl.max(top, 0)
    weight = tl.zeros([PARTS], tl.float32)
    acc = tl.zeros([DIM], tl.float32)
    for begin in range(0, parts, PARTS):
        is_part = begin + part < parts
        where = at + (begin + part) * (NUM_KV_HEADS * ROWS)
        share = tl.exp2(tl.load(partial_lse + where, mask=is_part, other=float("-inf")) - highest)
        loaded = is_part[:, None] & is_dim[None, :]
        values = tl.load(partial + where[:, None] * HEAD_DIM + dims[None, :], mask=loaded, other=0.0)
        weight += share
        acc += tl.sum(share[:, None] * values, 0)
    result = acc / tl.sum(weight, 0)
    where_out = (first + token).to(tl.int64) * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    tl.store(out + where_out + dims, result.to(out.dtype.element_ty), mask=is_dim)
