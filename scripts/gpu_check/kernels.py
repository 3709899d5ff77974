"""Bandwidth and arithmetic rate of each kernel, beside torch's attention over contiguous keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from gpu_check.table import Row
from gpu_check.timing import milliseconds
from pagemill_kernels.gpu.kernels import TritonKernels, TritonStep
from pagemill_kernels.interface import AttentionBatch, AttentionSpec, entry_elements

KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE = 8, 4, 128, 16
HEADS = KV_HEADS * GROUP
LAYERS = 2
"""Launches take turns between layers, so that none finds its keys in the L2 cache."""
DECODES = ((64, 1024), (256, 512), (64, 4096), (16, 8192), (1, 65_536), (1, 4096))
EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
EIGHT_BIT_DECODE = (64, 4096)
CHUNKS = ((2048, 2048), (512, 8192), (16, 32_768))
AIM_TOKENS = 64 * 1024
SPEC = AttentionSpec(HEAD_DIM**-0.5)


def decode_bytes(batch: int, context: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Keys and values in a cache of ``dtype``, read once; queries and results, next to nothing."""
    entry = entry_elements(HEAD_DIM, dtype) * dtype.itemsize
    return batch * context * KV_HEADS * entry * 2 + 2 * batch * HEADS * HEAD_DIM * 2


def chunk_operations(tokens: int, context: int) -> int:
    """Multiplications and additions of a causal chunk that is the last of its context."""
    seen = tokens * (context - tokens) + tokens * (tokens + 1) // 2
    return 4 * HEADS * HEAD_DIM * seen


def even_batch(rows: int, context: int, tokens: int) -> AttentionBatch:
    """Rows of equal length, their blocks in random order, as after hours of serving."""
    width = -(-context // BLOCK_SIZE)
    tables = (torch.randperm(rows * width, generator=torch.Generator().manual_seed(0)) + 1).view(rows, width)
    positions = torch.arange(context - tokens, context)
    slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionBatch(
        query_starts=torch.arange(rows + 1) * tokens,
        context_lens=torch.full((rows,), context),
        block_tables=tables,
        slot_mapping=slots.flatten(),
        num_decodes=rows if tokens == 1 else 0,
    )


def measure(device: torch.device, bandwidth: float, quick: bool) -> Iterator[Row]:
    """Args: bandwidth: bytes per second of a copy, the floor of what is bound by memory."""
    kernels = TritonKernels.on(device)
    for batch, context in DECODES[:2] if quick else DECODES:
        yield from _decode(kernels, device, bandwidth, batch, context)
    for name, dtype in EIGHT_BITS.items():
        yield _decode_8_bits(kernels, device, bandwidth, name, dtype)
    for tokens, context in CHUNKS[:1] if quick else CHUNKS:
        yield from _chunk(kernels, device, tokens, context)
    yield from _write_and_copy(kernels, device, bandwidth)


def _cache(device: torch.device, blocks: int) -> torch.Tensor:
    shape = (blocks + 1, LAYERS, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()


def _decode(kernels: TritonKernels, device: torch.device, bandwidth: float, batch: int, context: int) -> Iterator[Row]:
    rows = even_batch(batch, context, 1)
    cache = _cache(device, rows.block_tables.numel())
    query = torch.randn(batch, HEADS, HEAD_DIM, device=device).bfloat16()
    step = kernels.prepare(rows, cache)
    seconds = milliseconds(partial(_attend, kernels, query, cache, step)) / 1e3
    size, case = decode_bytes(batch, context), f"{batch} x {context}"
    aim = 0.75 if batch * context >= AIM_TOKENS else None
    yield Row("decode attention, paged", case, size / seconds / 1e9, "GB/s", size / seconds / bandwidth, aim)
    del cache
    shape = (LAYERS, 2, batch, KV_HEADS, context, HEAD_DIM)
    flat = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
    one = query.unsqueeze(2)
    seconds = (
        milliseconds(
            lambda n: functional.scaled_dot_product_attention(
                one, flat[n % LAYERS, 0], flat[n % LAYERS, 1], enable_gqa=True
            )
        )
        / 1e3
    )
    yield Row("decode attention, torch, contiguous", case, size / seconds / 1e9, "GB/s", size / seconds / bandwidth)


def _decode_8_bits(
    kernels: TritonKernels, device: torch.device, bandwidth: float, name: str, dtype: torch.dtype
) -> Row:
    batch, context = EIGHT_BIT_DECODE
    rows = even_batch(batch, context, 1)
    shape = (rows.block_tables.numel() + 1, LAYERS, 2, BLOCK_SIZE, KV_HEADS, entry_elements(HEAD_DIM, dtype))
    # Bytes that are finite scales as well as numbers.
    cache = torch.empty(shape, dtype=torch.int8, device=device).random_(0, 60).view(dtype)
    query = torch.randn(batch, HEADS, HEAD_DIM, device=device).bfloat16()
    step = kernels.prepare(rows, cache)
    seconds = milliseconds(partial(_attend, kernels, query, cache, step)) / 1e3
    size = decode_bytes(batch, context, dtype)
    check, case = f"decode attention, paged, {name} cache", f"{batch} x {context}"
    return Row(check, case, size / seconds / 1e9, "GB/s", size / seconds / bandwidth)


def _attend(kernels: TritonKernels, query: Tensor, cache: Tensor, step: TritonStep, number: int) -> None:
    kernels.attention(query, cache, step, number % LAYERS, SPEC)


def _chunk(kernels: TritonKernels, device: torch.device, tokens: int, context: int) -> Iterator[Row]:
    rows = even_batch(1, context, tokens)
    cache = _cache(device, rows.block_tables.numel())
    query = torch.randn(tokens, HEADS, HEAD_DIM, device=device).bfloat16()
    step = kernels.prepare(rows, cache)
    work, case = chunk_operations(tokens, context), f"{tokens} of {context}"
    seconds = milliseconds(partial(_attend, kernels, query, cache, step)) / 1e3
    yield Row("prefill attention, paged", case, work / seconds / 1e12, "TFLOP/s")
    if tokens != context:
        return  # torch's causal mask would end at another corner
    flat = torch.randn(2, 1, KV_HEADS, context, HEAD_DIM, device=device).bfloat16()
    several = query.transpose(0, 1).unsqueeze(0)
    seconds = (
        milliseconds(lambda _: functional.scaled_dot_product_attention(several, *flat, is_causal=True, enable_gqa=True))
        / 1e3
    )
    yield Row("prefill attention, torch, contiguous", case, work / seconds / 1e12, "TFLOP/s")


def _seconds(run: Callable[[], object]) -> float:
    return milliseconds(lambda _: run(), 10) / 1e3


def _write_and_copy(kernels: TritonKernels, device: torch.device, bandwidth: float) -> Iterator[Row]:
    tokens = 8192
    rows = even_batch(1, tokens, tokens)
    cache = _cache(device, 2 * rows.block_tables.numel())
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, device=device).bfloat16()
    turns = torch.rand(2, tokens, 1, HEAD_DIM, device=device).bfloat16()
    step = kernels.prepare(rows, cache)
    seconds = milliseconds(lambda n: kernels.rotate_and_write(qkv, (turns[0], turns[1]), cache, step, n % LAYERS)) / 1e3
    # All is read once; queries and keys are written in place, keys and values into the cache.
    size = (2 * HEADS + 5 * KV_HEADS) * tokens * HEAD_DIM * 2
    yield Row("rotary and cache write", f"{tokens} tokens", size / seconds / 1e9, "GB/s", size / seconds / bandwidth)

    block = torch.arange(1, 513)
    pairs = torch.stack((block, block + 512), 1)
    moved = kernels.copy_blocks(cache, cache, pairs)
    seconds = milliseconds(lambda _: kernels.copy_blocks(cache, cache, pairs)) / 1e3
    yield Row("block copies", "512 blocks", 2 * moved / seconds / 1e9, "GB/s", 2 * moved / seconds / bandwidth)
    host = torch.zeros(512, *cache.shape[1:], dtype=cache.dtype, pin_memory=True)
    outward = torch.stack((block, block - 1), 1)
    for name, run in (
        ("swap out", partial(kernels.copy_blocks, cache, host, outward)),
        ("swap in", partial(kernels.copy_blocks, host, cache, outward.flip(1))),
    ):
        moved = run()
        seconds = _seconds(run)
        yield Row(name, "512 blocks, one launch", moved / seconds / 1e9, "GB/s")
    flat = cache[1:513]
    seconds = milliseconds(lambda _: host.copy_(flat, non_blocking=True), 10) / 1e3
    yield Row("copy engine to the host", "as one piece", moved / seconds / 1e9, "GB/s")
