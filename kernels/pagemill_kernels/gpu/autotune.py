"""Tiles for one model on one GPU: those that were kept, and otherwise timed now, for some seconds at most."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pagemill_kernels.gpu.tile_table import TileTable
from pagemill_kernels.gpu.tiles import Tile
from pagemill_kernels.gpu.tuning import SECONDS, TileKey, candidates, choose, deadline, lines


def tuned_tiles(
    keys: tuple[TileKey, ...],
    capability: int,
    table: TileTable,
    time_tile: Callable[[TileKey, Tile], float],
    clock: Callable[[], float],
    report: Callable[[str], None],
) -> dict[TileKey, Tile]:
    """A tile for every key that has more than one candidate.

    A key whose candidates could not all be timed gets the best so far, which is not kept: the next start goes on,
    faster, since what was built is in Triton's cache.

    Args:
        time_tile: seconds that a tile takes; what it raises leaves the tile out.
        clock: seconds since any time.
        report: told in one line each what is done, found and left out.
    """
    keys = tuple(key for key in keys if len(candidates(key, capability)) > 1)
    found = table.read(keys, report)
    missing = [key for key in keys if key not in found]
    if not missing:
        return found
    report(f"timing tiles for attention, once for this GPU and model, for {SECONDS:.0f} s at most")
    is_over = deadline(SECONDS, clock)
    kept = {}
    for key in missing:
        choice = choose(candidates(key, capability), partial(time_tile, key), is_over)
        for line in lines(key, choice):
            report(line)
        found[key] = choice.tile
        if choice.is_complete:
            kept[key] = choice.tile
    if kept:
        table.add(kept, report)
    return found
