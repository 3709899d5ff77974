"""The Triton kernels as a `Kernels`: launches, and the arrays of one iteration on the device.

Nothing here waits for the device: the arrays of an iteration go up from page-locked memory, in order with the launches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import triton
from torch import Tensor

from pagemill_kernels.gpu import attention, blocks, write
from pagemill_kernels.gpu.autotune import tuned_tiles
from pagemill_kernels.gpu.tile_table import TileTable, made_with
from pagemill_kernels.gpu.tiles import Tile, most_registers, power_of_two
from pagemill_kernels.gpu.timing import batch_for, device_timer
from pagemill_kernels.gpu.tuning import TileKey, Use, fixed_tile
from pagemill_kernels.gpu.work import NO_REDUCTION, Packed, Rows, Work, most_items, padded, plan_work
from pagemill_kernels.interface import AttentionBatch, AttentionSpec, ResidentKernels, entry_elements
from pagemill_kernels.reference import TorchKernels

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NUMBERS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
"""How the kernels call the numbers of caches in 8 bits; those of the others are "floats"."""
WRITE_ELEMENTS = 1024
"""Elements of queries, keys and values that one program of the write kernel takes."""
COPY_WORDS = 4096
"""4-byte words of a block that one program copies."""
REDUCED_AT_ONCE = 16
"""Partial results that one round of a reduction loads."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of the attention kernel and, where ranges were split, of its reduction.

    Attributes:
        uploaded: both of the next, as they came up.
        items, reductions: on the device; see `Work`.
        partial, partial_lse: [P, KV, rows, D] and [P, KV, rows] float32; all layers use them one after another.
    """

    tile: Tile
    uploaded: Tensor
    items: Tensor
    reductions: Tensor
    most_tokens: int
    partial: Tensor
    partial_lse: Tensor


@dataclass(slots=True)
class TritonStep:
    """What TritonKernels prepares for an iteration.

    Attributes:
        slots: [T] int32 on the device.
        tables: [R, W] int32 on the device, or [S, W] where the batch has lines.
        numbers, scales: the cache for the kernels, and for its scales where it has 8 bits: as int8 and as float32.
        cache: of a fixed step, whose launches have room for every batch of as many decode rows; else None.
        launches: by window and query heads per key/value head; layers that have both in common share them.
    """

    batch: AttentionBatch
    slots: Tensor
    tables: Tensor
    numbers: Tensor
    scales: Tensor
    cache: Tensor | None = None
    launches: dict[tuple[int | None, int], list[Launch]] = field(default_factory=dict)


class TritonKernels(ResidentKernels[TritonStep]):
    """Triton, on NVIDIA GPUs of compute capability 8.0 and above; float16, bfloat16 and float32, the former two with
    caches in 8 bits as well, whose scales stand behind the numbers of a page (see `eight_bits`).

    Args:
        num_processors: streaming multiprocessors of the device, which the number of split key ranges depends on.
        capability: its compute capability, 90 for 9.0, which the shape of a tile may depend on.
    """

    name = "triton"

    def __init__(self, num_processors: int, capability: int) -> None:
        super().__init__()
        self._num_processors = num_processors
        self._capability = capability
        self._staged = TorchKernels()
        self._reduced: set[tuple[Tile, int, torch.dtype]] = set()
        self._tiles: dict[TileKey, Tile] = {}
        """What was chosen by timing; elsewhere the fixed tiles."""
        self._is_interpreted = bool(triton.knobs.runtime.interpret)

    @classmethod
    def on(cls, device: torch.device) -> TritonKernels:
        """The kernels for a CUDA device."""
        major, minor = torch.cuda.get_device_capability(device)
        return cls(torch.cuda.get_device_properties(device).multi_processor_count, 10 * major + minor)

    def serves_cache(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
        return dtype in DTYPES and (cache_dtype == dtype or (cache_dtype in NUMBERS and dtype != torch.float32))

    def prepare(self, batch: AttentionBatch, cache: Tensor) -> TritonStep:
        if cache.dtype in NUMBERS and cache.shape[5] % 4:
            raise ValueError(f"a cache in 8 bits needs heads of a multiple of 4 elements, not {_head_dim(cache)}")
        numbers, scales = (
            (cache, cache) if cache.dtype in DTYPES else (cache.view(torch.int8), cache.view(torch.float32))
        )
        if cache.shape[0] * cache.shape[3] >= 2**31:
            raise ValueError(f"a cache of {cache.shape[0]} blocks of {cache.shape[3]} slots has more than 2^31 slots")
        if batch.lines is not None:
            return TritonStep(batch, batch.slot_mapping, batch.block_tables, numbers, scales)
        tokens, (rows, width) = batch.slot_mapping.numel(), batch.block_tables.shape
        both = torch.cat((batch.slot_mapping, batch.block_tables.reshape(-1))).to(torch.int32)
        uploaded = _upload(both, cache.device)
        return TritonStep(batch, uploaded[:tokens], uploaded[tokens:].view(rows, width), numbers, scales)

    def prepare_fixed(self, batch: AttentionBatch, cache: Tensor) -> TritonStep:
        step = self.prepare(batch, cache)
        step.cache = cache
        return step

    def refill(self, step: TritonStep, batch: AttentionBatch) -> None:
        assert step.cache is not None
        step.batch = batch
        for (window, group), launches in step.launches.items():
            [launch] = launches
            work = self._padded_work(batch, launch.tile, step.cache, window, group)
            launch.uploaded.copy_(_pinned(torch.from_numpy(_joined(work)), launch.uploaded.device), non_blocking=True)

    # ------------------------------------------------------------ write

    def rotate_and_write(
        self, qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, cache: Tensor, step: TritonStep, layer: int
    ) -> None:
        self.calls["rotate_and_write"] += 1
        _, _, _, block_size, num_kv_heads, _ = cache.shape
        tokens, all_heads, head_dim = qkv.shape
        num_heads = all_heads - 2 * num_kv_heads
        rotary_dim = 0 if rotary is None else rotary[0].shape[-1]
        cosines, sines = (qkv, qkv) if rotary is None else (t.contiguous() for t in rotary)
        heads = max(1, WRITE_ELEMENTS // power_of_two(head_dim))
        first = num_heads if rotary is None else 0  # without rotation queries stay as they are
        if not tokens:
            return
        write.rotate_and_write[(tokens, -(-(all_heads - first) // heads))](
            qkv,
            cosines,
            sines,
            step.slots,
            step.numbers,
            step.scales,
            layer,
            cache.stride(0),
            qkv.stride(0),
            qkv.stride(1),
            first,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            ROTARY_DIM=rotary_dim,
            BLOCK_SIZE=block_size,
            HEADS=heads,
            HALF=power_of_two(max(1, rotary_dim // 2)),
            REST=power_of_two(max(1, head_dim - rotary_dim)),
            NUMBERS=NUMBERS.get(cache.dtype, "floats"),
            num_warps=4,
        )

    # ------------------------------------------------------------ attention

    def attention(self, query: Tensor, cache: Tensor, step: TritonStep, layer: int, spec: AttentionSpec) -> Tensor:
        self.calls["attention"] += 1
        _, _, _, block_size, num_kv_heads, _ = cache.shape
        tokens, num_heads, head_dim = query.shape
        group = num_heads // num_kv_heads
        key = (spec.window, group)
        if key not in step.launches:
            plan = self._plan_fixed if step.cache is not None else self._plan
            step.launches[key] = plan(step.batch, cache, spec.window, group)
        out = query.new_empty(tokens, num_heads * head_dim)
        for launch in step.launches[key]:
            attention.attend[(launch.items.shape[0] * num_kv_heads,)](
                query,
                step.numbers,
                step.scales,
                step.tables,
                launch.items,
                out,
                launch.partial,
                launch.partial_lse,
                layer,
                cache.stride(0),
                step.tables.stride(0),
                query.stride(0),
                query.stride(1),
                spec.scale,
                spec.soft_cap or 1.0,
                spec.window or 0,
                BLOCK_SIZE=block_size,
                NUM_KV_HEADS=num_kv_heads,
                GROUP=group,
                HEAD_DIM=head_dim,
                DIM=power_of_two(max(16, head_dim)),
                ROWS=launch.tile.rows,
                KEYS=launch.tile.keys,
                HAS_WINDOW=spec.window is not None,
                HAS_SOFT_CAP=spec.soft_cap is not None,
                NUMBERS=NUMBERS.get(cache.dtype, "floats"),
                PRECISION="ieee",
                num_warps=launch.tile.warps,
                num_stages=launch.tile.stages,
                maxnreg=most_registers(cache.element_size(), self._capability),
            )
            if launch.most_tokens:
                attention.reduce_parts[(launch.reductions.shape[0] * launch.most_tokens * num_heads,)](
                    launch.reductions,
                    launch.partial,
                    launch.partial_lse,
                    out,
                    launch.most_tokens,
                    NUM_KV_HEADS=num_kv_heads,
                    GROUP=group,
                    HEAD_DIM=head_dim,
                    DIM=power_of_two(max(16, head_dim)),
                    ROWS=launch.tile.rows,
                    PARTS=REDUCED_AT_ONCE,
                    num_warps=4,
                )
        return out

    def _plan(self, batch: AttentionBatch, cache: Tensor, window: int | None, group: int) -> list[Launch]:
        """Decode rows and chunks apart: they want tiles of very different height."""
        num_kv_heads, head_dim = cache.shape[4], _head_dim(cache)
        starts, contexts = batch.query_starts.numpy(), batch.context_lens.numpy()
        index = np.arange(contexts.size) if batch.lines is None else batch.lines.numpy()
        launches = []
        parts: tuple[tuple[slice, Use], ...] = (
            (slice(batch.num_decodes), "decode"),
            (slice(batch.num_decodes, None), "chunk"),
        )
        for part, use in parts:
            rows = Rows(index[part], starts[:-1][part], np.diff(starts)[part], contexts[part])
            tile = self.tile(use, group, cache)
            work = self._work(rows, tile, cache, window, group)
            if not work.items.size:
                continue
            if not work.reductions.size and (tile, group, cache.dtype) not in self._reduced:
                # Built with the first launch, in warm-up, and not while the first long row waits.
                work = replace(work, reductions=NO_REDUCTION, most_tokens=1)
            self._reduced.add((tile, group, cache.dtype))
            launches.append(_launch(work, tile, num_kv_heads, head_dim, cache.device))
        return launches

    def _plan_fixed(self, batch: AttentionBatch, cache: Tensor, window: int | None, group: int) -> list[Launch]:
        """One launch, with the most items and partial results that as many decode rows can take."""
        num_kv_heads, head_dim = cache.shape[4], _head_dim(cache)
        tile = self.tile("decode", group, cache)
        work = self._padded_work(batch, tile, cache, window, group)
        return [_launch(work, tile, num_kv_heads, head_dim, cache.device)]

    def _padded_work(self, batch: AttentionBatch, tile: Tile, cache: Tensor, window: int | None, group: int) -> Work:
        assert batch.lines is not None
        contexts = batch.context_lens.numpy()
        rows = Rows(batch.lines.numpy(), np.arange(contexts.size), np.ones_like(contexts), contexts)
        work = self._work(rows, tile, cache, window, group)
        return padded(work, most_items(contexts.size, cache.shape[4], self._num_processors), contexts.size)

    def _work(self, rows: Rows, tile: Tile, cache: Tensor, window: int | None, group: int) -> Work:
        return plan_work(
            rows,
            window=window,
            group=group,
            num_kv_heads=cache.shape[4],
            block_size=cache.shape[3],
            tile=tile,
            num_processors=self._num_processors,
        )

    def tile(self, use: Use, group: int, cache: Tensor) -> Tile:
        key = self.tile_key(use, group, cache)
        return self._tiles.get(key) or fixed_tile(key, self._capability)

    def tile_key(self, use: Use, group: int, cache: Tensor) -> TileKey:
        if cache.dtype not in (*DTYPES, *NUMBERS):
            raise ValueError(f"a cache of {cache.dtype} is not supported; supported are {(*DTYPES, *NUMBERS)}")
        return TileKey(
            use, group, _head_dim(cache), cache.shape[3], str(cache.dtype).removeprefix("torch."), cache.itemsize
        )

    def tune(
        self, cache: Tensor, num_heads: int, dtype: torch.dtype, folder: Path, report: Callable[[str], None]
    ) -> None:
        group = num_heads // cache.shape[4]
        name = torch.cuda.get_device_name(cache.device)
        table = TileTable(folder, name, self._capability, made_with(triton.__version__))
        timer = device_timer(cache.device)

        def time_tile(key: TileKey, tile: Tile) -> float:
            return timer(self.attention_with(tile, key, cache, num_heads, dtype))

        keys = self.tile_key("decode", group, cache), self.tile_key("chunk", group, cache)
        self._tiles |= tuned_tiles(keys, self._capability, table, time_tile, time.monotonic, report)

    def attention_with(
        self, tile: Tile, key: TileKey, cache: Tensor, num_heads: int, dtype: torch.dtype
    ) -> Callable[[], Tensor]:
        """Attention of full-size rows with ``tile``, which is taken from now on."""
        self._tiles[key] = tile
        batch = batch_for(key, cache)
        step = self.prepare(batch, cache)
        query = torch.zeros((batch.slot_mapping.numel(), num_heads, key.head_dim), dtype=dtype, device=cache.device)
        return lambda: self.attention(query, cache, step, 0, AttentionSpec(key.head_dim**-0.5))

    # ------------------------------------------------------------ blocks

    def copy_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> int:
        self.calls["copy_blocks"] += 1
        count = pairs.shape[0]
        block_bytes = source.stride(0) * source.element_size()
        if not count:
            return 0
        if not (self._reaches(source) and self._reaches(destination)):
            return self._staged.copy_blocks(source, destination, pairs)
        device = source.device if source.device.type == "cuda" else destination.device
        words = block_bytes // 4  # whole words: numbers of two bytes or more, or heads of a multiple of 4
        pieces = -(-words // COPY_WORDS)
        blocks.copy_blocks[(count * pieces,)](
            _words(source),
            _words(destination),
            _upload(pairs.to(torch.int32), device),
            words,
            pieces,
            PIECE=COPY_WORDS,
            num_warps=8,
        )
        return count * block_bytes

    def _reaches(self, pool: Tensor) -> bool:
        """Whether a kernel can read and write ``pool``: host memory only where it is page-locked."""
        return pool.device.type != "cpu" or self._is_interpreted or pool.is_pinned()


def _launch(work: Work, tile: Tile, num_kv_heads: int, head_dim: int, device: torch.device) -> Launch:
    items, reductions = work.items.size, work.reductions.size
    uploaded = _upload(torch.from_numpy(_joined(work)), device)
    partials = (max(1, work.num_partials), num_kv_heads, tile.rows)
    return Launch(
        tile=tile,
        uploaded=uploaded,
        items=uploaded[:items].view(-1, work.items.shape[1]),
        reductions=uploaded[items : items + reductions].view(-1, work.reductions.shape[1]),
        most_tokens=work.most_tokens,
        partial=torch.empty((*partials, head_dim), dtype=torch.float32, device=device),
        partial_lse=torch.empty(partials, dtype=torch.float32, device=device),
    )


def _head_dim(cache: Tensor) -> int:
    return cache.shape[5] - entry_elements(0, cache.dtype)


def _joined(work: Work) -> Packed:
    return np.concatenate((work.items.reshape(-1), work.reductions.reshape(-1)))


def _upload(numbers: Tensor, device: torch.device) -> Tensor:
    """``numbers`` on the device, in order with its stream and without waiting. torch keeps the page-locked copy until
    the transfer is over."""
    return _pinned(numbers, device).to(device, non_blocking=True)


def _pinned(numbers: Tensor, device: torch.device) -> Tensor:
    return numbers if device.type == "cpu" else numbers.pin_memory()


def _words(pool: Tensor) -> Tensor:
    """A pool as [blocks, words] int32."""
    return pool.view(pool.shape[0], -1).view(torch.int32)
