"""Cuts the rows of an iteration into work items: which queries meet which keys, and what is put together afterwards.

An item is one program per key/value head. Query tiles come from the tile's size; long key ranges are split
(split-KV, as in Flash-Decoding) so that few rows with long contexts occupy all processors, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagemill_kernels.gpu.tiles import Tile

ITEM_FIELDS = 8
REDUCTION_FIELDS = 4
PROGRAMS_PER_PROCESSOR = 4
"""Programs that a launch should have for each processor, so that loads of one hide behind those of the others and the
last wave is short."""
MIN_DECODE_PART = 256
"""Fewest keys of a part: a part of one token writes and reads group * head_dim float32 more, which is then at most some
per cent of its keys and values."""
MIN_CHUNK_PART = 2048
"""The same for tiles of several tokens, whose partial results are larger and whose keys are mostly in the L2 cache."""

Numbers = npt.NDArray[np.int64]
Packed = npt.NDArray[np.int32]

NO_REDUCTION: Packed = np.zeros((1, REDUCTION_FIELDS), np.int32)
"""A reduction of no tokens, which does nothing."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that attend, as arrays [R].

    Attributes:
        index: row of the block tables.
        first: index of the row's first query token.
        count: query tokens.
        context: tokens whose keys are in the cache; the queries are the last ``count`` of them.
    """

    index: Numbers
    first: Numbers
    count: Numbers
    context: Numbers


@dataclass(frozen=True, slots=True)
class Work:
    """What one launch does.

    Attributes:
        items: [N, 8] int32: row of the block tables, first query token, query tokens, position of the first query,
            first key, end of keys, where the partial result goes (-1: this is the whole result), 0. Longest first.
        reductions: [M, 4] int32: first partial result, how many, first query token, query tokens.
        num_partials: partial results in all.
        most_tokens: most query tokens of a reduction.
    """

    items: Packed
    reductions: Packed
    num_partials: int
    most_tokens: int


def part_length(lengths: Numbers, num_kv_heads: int, num_processors: int, shortest: int) -> float:
    """Keys per part with which all parts together fill the processors, at least ``shortest``."""
    return max(float(shortest), float(lengths.sum()) * num_kv_heads / (PROGRAMS_PER_PROCESSOR * num_processors))


def plan_work(
    rows: Rows, *, window: int | None, group: int, num_kv_heads: int, block_size: int, tile: Tile, num_processors: int
) -> Work:
    """The items of ``rows``. Rows without queries give none."""
    per_tile = tile.rows // group
    tiles = -(-rows.count // per_tile)
    of = np.repeat(np.arange(rows.count.size), tiles)  # row of each tile
    number = np.arange(of.size) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    offset = number * per_tile
    count = np.minimum(per_tile, rows.count[of] - offset)
    position = rows.context[of] - rows.count[of] + offset
    end = position + count
    # Keys from the start of a block: loads of whole blocks, and no more of them than needed.
    begin = np.zeros_like(end) if window is None else np.maximum(0, position - window + 1) // block_size * block_size
    length = end - begin

    shortest = MIN_DECODE_PART if per_tile == 1 or bool((count == 1).all()) else MIN_CHUNK_PART
    wanted = part_length(length, num_kv_heads, num_processors, shortest)
    parts = np.maximum(1, np.floor(length / wanted + 0.5).astype(np.int64))
    each = _round_up(-(-length // parts), tile.keys)
    parts = -(-length // each)  # rounding up may have left the last ones empty

    tile_of = np.repeat(np.arange(of.size), parts)
    split = np.arange(tile_of.size) - np.repeat(np.cumsum(parts) - parts, parts)
    is_partial = parts[tile_of] > 1
    slot = np.where(is_partial, np.cumsum(is_partial) - 1, -1)
    part_begin = begin[tile_of] + split * each[tile_of]
    part_end = np.minimum(end[tile_of], part_begin + each[tile_of])
    first = rows.first[of] + offset
    items = np.zeros((tile_of.size, ITEM_FIELDS), np.int32)
    columns = (rows.index[of][tile_of], first[tile_of], count[tile_of], position[tile_of], part_begin, part_end, slot)
    for column, values in enumerate(columns):
        items[:, column] = values
    items = items[np.argsort(part_begin - part_end, kind="stable")]

    split_tiles = np.flatnonzero(parts > 1)
    split_parts = parts[split_tiles]
    starts = np.cumsum(split_parts) - split_parts
    reductions = np.stack((starts, split_parts, first[split_tiles], count[split_tiles]), 1).astype(np.int32)
    most = int(count[split_tiles].max()) if split_tiles.size else 0
    return Work(items, reductions, int(is_partial.sum()), most)


def most_items(decodes: int, num_kv_heads: int, num_processors: int) -> int:
    """Most items that ``decodes`` rows of one token can be cut into, whatever their lengths: a row has at most one part
    and its share of the parts that fill the processors (see `part_length`)."""
    return decodes + -(-PROGRAMS_PER_PROCESSOR * num_processors // num_kv_heads)


def padded(work: Work, items: int, reductions: int) -> Work:
    """Work that does the same with ``items`` items and ``reductions`` reductions, and has room for as many partial
    results as items. What is added does nothing: it has no queries and no keys.

    Raises:
        ValueError: the work has more already.
    """
    if work.items.shape[0] > items or work.reductions.shape[0] > reductions or work.most_tokens > 1:
        raise ValueError(f"{work.items.shape[0]} items and {work.reductions.shape[0]} reductions do not fit")
    more_items = np.zeros((items - work.items.shape[0], ITEM_FIELDS), np.int32)
    more_items[:, ITEM_FIELDS - 2] = -1
    more_reductions = np.zeros((reductions - work.reductions.shape[0], REDUCTION_FIELDS), np.int32)
    return Work(
        np.concatenate((work.items, more_items)),
        np.concatenate((work.reductions, more_reductions)),
        num_partials=items,
        most_tokens=1,
    )


def _round_up(values: Numbers, multiple: int) -> Numbers:
    return -(-values // multiple) * multiple
