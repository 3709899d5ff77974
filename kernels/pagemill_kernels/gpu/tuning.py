"""Which tile is the fastest on a GPU: a handful of candidates around the fixed ones of ``tiles``, timed once.

Only the choice is here. It imports neither triton nor anything that needs a GPU; what times a candidate comes from
outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pagemill_kernels.gpu.tiles import Tile, chunk_tile, decode_tile

SECONDS = 15.0
"""No candidate is begun after so many seconds, builds included, for decode rows and chunks together."""
MARGIN = 0.97
"""Share of the fixed tile's time that another one must stay below: less is noise."""
KEYS = range(16, 257)
WARPS = range(2, 17)
STAGES = range(2, 5)


Use = Literal["decode", "chunk"]


@dataclass(frozen=True, slots=True)
class TileKey:
    """What a tile is chosen for, on one kind of GPU.

    Attributes:
        use: rows of one token, or chunks.
        group: query heads that share a key/value head.
        dtype, itemsize: of the cache's numbers: name, and bytes of one.
    """

    use: Use
    group: int
    head_dim: int
    block_size: int
    dtype: str
    itemsize: int

    def __str__(self) -> str:
        return f"{self.use}, {self.group} x {self.head_dim}, blocks of {self.block_size}, {self.dtype}"


def fixed_tile(key: TileKey, capability: int) -> Tile:
    """The tile that is taken where nothing was timed."""
    choose = decode_tile if key.use == "decode" else chunk_tile
    return choose(key.group, key.head_dim, key.itemsize, capability)


def candidates(key: TileKey, capability: int) -> tuple[Tile, ...]:
    """The fixed tile, then others: half and twice its keys a round and its warps, one stage less and more. Rows stay:
    partial results and work items are laid out by them. float32, which is there for comparisons, has no others."""
    fixed = fixed_tile(key, capability)
    if key.itemsize == 4:
        return (fixed,)
    others = (
        replace(fixed, keys=fixed.keys // 2, stages=fixed.stages + 1),
        replace(fixed, keys=fixed.keys * 2),
        replace(fixed, stages=fixed.stages + 1),
        replace(fixed, stages=fixed.stages - 1),
        replace(fixed, warps=fixed.warps // 2),
        replace(fixed, warps=fixed.warps * 2),
    )
    return (fixed, *(t for t in others if t.keys in KEYS and t.warps in WARPS and t.stages in STAGES))


@dataclass(frozen=True, slots=True)
class Choice:
    """What came of timing.

    Attributes:
        seconds: of every candidate that ran.
        failed: why each of the others did not, in one line.
        is_complete: whether all candidates had their turn, and the fixed tile ran.
    """

    tile: Tile
    seconds: dict[Tile, float]
    failed: dict[Tile, str]
    is_complete: bool


def choose(tiles: tuple[Tile, ...], time_tile: Callable[[Tile], float], is_over: Callable[[], bool]) -> Choice:
    """The fastest of ``tiles``, of which the first is the fixed one and stays unless another is clearly faster.

    Args:
        time_tile: seconds that a tile takes; what it raises leaves the tile out.
        is_over: whether there is no time left for another one.
    """
    seconds: dict[Tile, float] = {}
    failed: dict[Tile, str] = {}
    for tile in tiles:
        if is_over():
            break
        try:
            seconds[tile] = time_tile(tile)
        except Exception as error:  # a build may fail in as many ways as a compiler and a driver have
            failed[tile] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    fixed = tiles[0]
    best = min(seconds, key=seconds.__getitem__, default=fixed)
    if fixed not in seconds or seconds[best] > MARGIN * seconds[fixed]:
        best = fixed
    return Choice(best, seconds, failed, fixed in seconds and len(seconds) + len(failed) == len(tiles))


def deadline(seconds: float, clock: Callable[[], float]) -> Callable[[], bool]:
    """Whether ``seconds`` have passed since now."""
    end = clock() + seconds
    return lambda: clock() >= end


def lines(key: TileKey, choice: Choice) -> Iterator[str]:
    """What there is to tell of a choice."""
    fixed = next(iter(choice.seconds), choice.tile)
    if choice.tile in choice.seconds and choice.tile != fixed:
        gain = choice.seconds[fixed] / choice.seconds[choice.tile]
        yield f"attention ({key}): {_sizes(choice.tile)} is {gain:.2f} times as fast as {_sizes(fixed)}"
    for tile, reason in choice.failed.items():
        yield f"attention ({key}): {_sizes(tile)} was left out: {reason}"


def _sizes(tile: Tile) -> str:
    return f"{tile.rows} x {tile.keys} with {tile.warps} warps and {tile.stages} stages"
