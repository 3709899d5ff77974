"""The kernels in plain torch: the specification of every other set, and what runs where no faster one does.

Decode rows are gathered in groups of similar length, whole groups at a time, so that no Python runs per row and layer;
indices and masks are made once per iteration and serve all layers. Prefill chunks run one after another, in tiles of
queries, so that no score or mask tensor grows with the square of the prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional

from pagemill_kernels.interface import (
    LARGEST_NUMBER,
    PADDING_BLOCK,
    SCALE_BYTES,
    AttentionBatch,
    AttentionSpec,
    ResidentKernels,
)

GATHER_BYTES = 8 * 1024 * 1024
"""Most bytes of keys and values that a group of decode rows gathers at once: small enough for a last-level cache."""
GROUP_COST_BLOCKS = 32
"""What another group costs in Python and launches, as padded blocks that could be gathered in that time."""
QUERY_TILE = 256
"""Most queries of a prefill chunk that attend at once."""
MASK_ELEMENTS = 1 << 21
"""Most elements of one tile's mask; with long contexts tiles become smaller."""
COPY_BYTES = 4 * 1024 * 1024
"""Bytes of blocks in flight while copying, so that the intermediate stays in cache."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows that are computed together, padded to the longest of them.

    Attributes:
        tokens: [B] int64 query tokens (= rows), or None when they are all decode rows in order.
        size: B.
        length: L, padded key length, a multiple of the block size.
        gather: [2 * B * W] int64 rows of layer 0 in the cache seen as [num_blocks * num_layers * 2, …]; first all keys,
            then all values.
        unwritten: [K] int64 rows of the gathered tensor seen as [2 * B * L, …] that lie beyond the context.
        mask: [B, 1, 1, L], 0 or -inf, added to the scores.
    """

    tokens: Tensor | None
    size: int
    length: int
    gather: Tensor
    unwritten: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """One prefill chunk: queries ``first:first + count``, the last of ``context`` tokens.

    Attributes:
        gather: [2 * W] int64, as in DecodeGroup, beginning with the block that holds token ``skipped``.
        skipped: leading tokens that no query of the chunk sees, a multiple of the block size.
    """

    first: int
    count: int
    context: int
    skipped: int
    gather: Tensor


@dataclass(slots=True)
class TorchStep:
    """What TorchKernels prepares for an iteration.

    Attributes:
        write_rows: [T, 2] int64 rows of layer 0 for keys and values in the cache seen as rows of one slot each; None
            where they are to be had from the batch's slots only when they are used.
        plans: decode groups and chunks by window; layers with equal windows share them.
    """

    batch: AttentionBatch
    write_rows: Tensor | None
    plans: dict[int | None, tuple[list[DecodeGroup], list[Chunk]]] = field(default_factory=dict)


class TorchKernels(ResidentKernels[TorchStep]):
    """Plain torch, on any device and in any floating dtype."""

    name = "torch"

    def __init__(self) -> None:
        super().__init__()
        self._workspace = torch.empty(0)

    def serves_cache(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
        return cache_dtype in (torch.float32, torch.float16, torch.bfloat16, *LARGEST_NUMBER)

    def prepare(self, batch: AttentionBatch, cache: Tensor) -> TorchStep:
        rows = _write_rows(batch.slot_mapping, cache).to(cache.device)
        return TorchStep(batch if batch.lines is None else _read_back(batch), rows)

    def prepare_fixed(self, batch: AttentionBatch, cache: Tensor) -> TorchStep:
        return TorchStep(_read_back(batch), None)

    def refill(self, step: TorchStep, batch: AttentionBatch) -> None:
        step.batch = _read_back(batch)
        step.plans.clear()

    # ------------------------------------------------------------ write

    def rotate_and_write(
        self,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        cache: Tensor,
        step: TorchStep,
        layer: int,
    ) -> None:
        self.calls["rotate_and_write"] += 1
        num_blocks, num_layers, _, block_size, num_kv_heads, entry = cache.shape
        if rotary is not None:
            cosines, sines = rotary
            width = cosines.shape[-1]
            pair = qkv[:, :-num_kv_heads, :width]
            swapped = torch.roll(pair, width // 2, -1)
            pair.mul_(cosines).addcmul_(swapped, sines)
        slots = _movable(cache).view(num_blocks * num_layers * 2 * block_size, num_kv_heads, entry)
        first = step.write_rows
        if first is None:
            first = _write_rows(step.batch.slot_mapping, cache)
        rows = first + layer * 2 * block_size
        new = qkv[:, -2 * num_kv_heads :].view(-1, 2, num_kv_heads, qkv.shape[2])
        if cache.dtype in LARGEST_NUMBER:
            new = _movable(quantised_entries(new, cache.dtype))
        slots.index_put_((rows,), new if new.dtype == slots.dtype else new.to(slots.dtype))

    # ------------------------------------------------------------ attention

    def attention(self, query: Tensor, cache: Tensor, step: TorchStep, layer: int, spec: AttentionSpec) -> Tensor:
        self.calls["attention"] += 1
        if spec.window not in step.plans:
            step.plans[spec.window] = self._plan(step.batch, cache, spec.window)
        groups, chunks = step.plans[spec.window]
        total, num_heads, head_dim = query.shape
        out = query.new_empty(total, num_heads, head_dim)
        for group in groups:
            rows = query[: group.size] if group.tokens is None else query.index_select(0, group.tokens)
            keys, values = self._gather(cache, group.gather, layer, group.size, group.length, group.unwritten)
            # One query per row: the heads of a group take the place of the query length.
            result = _attend(_by_kv_head(rows, keys), keys, values, group.mask, spec).flatten(1, 2)
            if group.tokens is None:
                out[: group.size] = result
            else:
                out.index_copy_(0, group.tokens, result)
        for chunk in chunks:
            self._attend_chunk(query, out, cache, chunk, layer, spec)
        return out.flatten(1)

    def _attend_chunk(
        self, query: Tensor, out: Tensor, cache: Tensor, chunk: Chunk, layer: int, spec: AttentionSpec
    ) -> None:
        width = chunk.gather.numel() // 2 * cache.shape[3]
        keys, values = self._gather(cache, chunk.gather, layer, 1, width, None)
        past = chunk.context - chunk.count  # tokens before the chunk
        tile = max(16, min(QUERY_TILE, MASK_ELEMENTS // chunk.context))
        for begin in range(0, chunk.count, tile):
            end = min(begin + tile, chunk.count)
            low = 0 if spec.window is None else max(0, past + begin - spec.window + 1)
            high = past + end
            part = query[chunk.first + begin : chunk.first + end]
            # [G, KV, n, D]: query heads that share keys are the batch, so that keys need no repeating.
            part = _by_kv_head(part, keys).permute(2, 1, 0, 3)
            seen = slice(low - chunk.skipped, high - chunk.skipped)
            shape = (part.shape[0], -1, -1, -1)
            mask = _causal_mask(end - begin, high - low, spec.window, query)
            result = _attend(part, keys[:, :, seen].expand(shape), values[:, :, seen].expand(shape), mask, spec)
            out[chunk.first + begin : chunk.first + end] = result.permute(2, 1, 0, 3).flatten(1, 2)

    def _gather(
        self, cache: Tensor, rows: Tensor, layer: int, size: int, length: int, unwritten: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values, each [size, KV, length, D] (views of one workspace that the next gather overwrites)."""
        num_blocks, num_layers, _, block_size, num_kv_heads, entry = cache.shape
        row = block_size * num_kv_heads * entry
        needed = rows.numel() * row
        pool = _movable(cache)
        if self._workspace.numel() < needed or self._workspace.dtype != pool.dtype:
            self._workspace = torch.empty(needed, dtype=pool.dtype, device=cache.device)
        out = self._workspace[:needed].view(-1, row)
        torch.index_select(pool.view(num_blocks * num_layers * 2, row), 0, rows + 2 * layer, out=out)
        if unwritten is not None and unwritten.numel():
            # A masked score is not enough: NaN left by a faulty sequence would get through, as 0 * NaN.
            out.view(-1, num_kv_heads * entry).index_fill_(0, unwritten, 0)
        entries = out.view(2, size, length, num_kv_heads, entry).transpose(2, 3)
        keys, values = dequantised_entries(entries.view(cache.dtype)) if cache.dtype in LARGEST_NUMBER else entries
        return keys, values

    def _plan(self, batch: AttentionBatch, cache: Tensor, window: int | None) -> tuple[list[DecodeGroup], list[Chunk]]:
        num_layers, block_size = cache.shape[1], cache.shape[3]
        block_bytes = 2 * cache.stride(2) * cache.element_size()
        groups = [
            _decode_group(batch, rows, cache, window)
            for rows in _group_by_length(batch, block_size, window, max(1, GATHER_BYTES // block_bytes))
        ]
        chunks = []
        starts = batch.query_starts.tolist()
        contexts = batch.context_lens.tolist()
        for row in range(batch.num_decodes, len(contexts)):
            count, context = starts[row + 1] - starts[row], contexts[row]
            if count == 0:
                continue
            seen_from = 0 if window is None else max(0, context - count - window + 1)
            first_block = seen_from // block_size
            blocks = batch.block_tables[row, first_block : -(-context // block_size)]
            base = blocks * (num_layers * 2)
            gather = torch.cat((base, base + 1)).to(cache.device)
            chunks.append(Chunk(starts[row], count, context, first_block * block_size, gather))
        return groups, chunks

    # ------------------------------------------------------------ blocks

    def copy_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> int:
        self.calls["copy_blocks"] += 1
        count = pairs.shape[0]
        block_bytes = source.stride(0) * source.element_size()
        per_slab = max(1, COPY_BYTES // block_bytes)
        taken, put = pairs[:, 0].to(source.device), pairs[:, 1].to(destination.device)
        flat_source, flat_destination = (
            _movable(source).flatten(1),
            _movable(destination).view(destination.shape[0], -1),
        )
        for begin in range(0, count, per_slab):
            slab = flat_source.index_select(0, taken[begin : begin + per_slab])
            flat_destination.index_copy_(0, put[begin : begin + per_slab], slab.to(destination.device))
        return count * block_bytes


def _read_back(batch: AttentionBatch) -> AttentionBatch:
    """The batch with the tables of its rows on the host: this set plans there."""
    assert batch.lines is not None
    tables = batch.block_tables[batch.lines.to(batch.block_tables.device)]
    return replace(batch, block_tables=tables.cpu().to(torch.int64))


def _write_rows(slots: Tensor, cache: Tensor) -> Tensor:
    """As in TorchStep, on the device of ``slots``."""
    _, num_layers, _, block_size, _, _ = cache.shape
    key_rows = slots.to(torch.int64) // block_size * (num_layers * 2 * block_size) + slots % block_size
    return torch.stack((key_rows, key_rows + block_size), 1)


def _movable(pool: Tensor) -> Tensor:
    """``pool``, or its bytes where torch does not move elements of its dtype about."""
    return pool.view(torch.int8) if pool.dtype in LARGEST_NUMBER else pool


def quantised_entries(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., head_dim + SCALE_BYTES] ``dtype`` of [..., head_dim]: entries of a cache in 8 bits. Numbers are rounded to
    the nearest, ties to even. A key or value that is not finite gets a scale that is not."""
    x, most = x.float(), LARGEST_NUMBER[dtype]
    scale = x.abs().amax(-1, keepdim=True) / most
    inverse = torch.where(scale > 0, 1 / scale, 0)
    numbers = (x * inverse).nan_to_num_().clamp_(-most, most)
    if dtype == torch.int8:
        numbers.round_()
    scale = scale + (x * 0).sum(-1, keepdim=True)
    return torch.cat((_movable(numbers.to(dtype)), scale.contiguous().view(torch.int8)), -1).view(dtype)


def dequantised_entries(entries: Tensor) -> Tensor:
    """[..., head_dim] float32 of [..., head_dim + SCALE_BYTES] entries in 8 bits."""
    scale = _movable(entries)[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return entries[..., :-SCALE_BYTES].float() * scale


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, spec: AttentionSpec) -> Tensor:
    """[B, H, Q, D] queries over [B, H, L, D] keys; returns [B, H, Q, D]."""
    if keys.dtype != query.dtype:
        keys, values = keys.to(query.dtype), values.to(query.dtype)
    if spec.soft_cap is None:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=spec.scale)
    scores = (query.float() @ keys.float().transpose(-1, -2)) * spec.scale
    scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap + mask
    return (scores.softmax(-1) @ values.float()).to(query.dtype)


def _by_kv_head(query: Tensor, keys: Tensor) -> Tensor:
    """[n, KV, G, D] of [n, KV * G, D] queries."""
    return query.view(query.shape[0], keys.shape[1], -1, query.shape[2])


def _causal_mask(queries: int, keys: int, window: int | None, like: Tensor) -> Tensor:
    """[queries, keys], 0 or -inf, where the last query stands at the last key."""
    distance = torch.arange(keys - queries, keys, device=like.device).unsqueeze(1) - torch.arange(
        keys, device=like.device
    )
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(queries, keys, dtype=like.dtype, device=like.device).masked_fill_(hidden, -math.inf)


def _first_blocks(batch: AttentionBatch, block_size: int, window: int | None) -> Tensor:
    """[num_decodes] first block that each decode row looks at."""
    lengths = batch.context_lens[: batch.num_decodes]
    if window is None:
        return torch.zeros_like(lengths)
    return (lengths - window).clamp_(min=0) // block_size


def _group_by_length(batch: AttentionBatch, block_size: int, window: int | None, most_blocks: int) -> list[Tensor]:
    """Decode rows in groups of similar length: splits where the padding saved is worth another group."""
    if batch.num_decodes == 0:
        return []
    blocks = -(-batch.context_lens[: batch.num_decodes] // block_size) - _first_blocks(batch, block_size, window)
    most = int(blocks.max())
    waste = batch.num_decodes * most - int(blocks.sum())
    if waste <= GROUP_COST_BLOCKS and batch.num_decodes * most <= most_blocks:
        return [torch.arange(batch.num_decodes)]
    order = torch.argsort(blocks, descending=True, stable=True)
    sizes = blocks[order].tolist()
    groups, begin, waste = [], 0, 0
    for index, size in enumerate(sizes):
        waste += sizes[begin] - size
        if waste > GROUP_COST_BLOCKS or (index + 1 - begin) * sizes[begin] > max(most_blocks, sizes[begin]):
            groups.append(order[begin:index])
            begin, waste = index, 0
    groups.append(order[begin:])
    return groups


def _decode_group(batch: AttentionBatch, rows: Tensor, cache: Tensor, window: int | None) -> DecodeGroup:
    num_layers, block_size = cache.shape[1], cache.shape[3]
    lengths = batch.context_lens[rows]
    first = _first_blocks(batch, block_size, window)[rows]
    used = -(-lengths // block_size) - first
    width = int(used.max())
    column = torch.arange(width)
    tables = batch.block_tables[rows]
    padded = column >= used.unsqueeze(1)
    blocks = tables.gather(1, (first.unsqueeze(1) + column).clamp_(max=tables.shape[1] - 1))
    blocks = blocks.masked_fill(padded, PADDING_BLOCK).flatten() * (num_layers * 2)

    size, length = rows.numel(), width * block_size
    position = first.unsqueeze(1) * block_size + torch.arange(length)  # [B, L] token index of each gathered slot
    hidden = position >= lengths.unsqueeze(1)
    unwritten = hidden.flatten().nonzero().squeeze(1)
    if window is not None:
        hidden = hidden | (position < (lengths - window).unsqueeze(1))
    mask = torch.zeros(size, length).masked_fill_(hidden, -math.inf).view(size, 1, 1, length)
    in_order = size == batch.num_decodes and bool((rows == torch.arange(size)).all())
    device = cache.device
    return DecodeGroup(
        tokens=None if in_order else rows.to(device),
        size=size,
        length=length,
        gather=torch.cat((blocks, blocks + 1)).to(device),
        unwritten=torch.cat((unwritten, unwritten + size * length)).to(device),
        mask=mask.to(device),
    )
