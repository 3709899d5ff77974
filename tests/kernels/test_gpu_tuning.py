"""Which tile is chosen, by times that are given."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_kernels.gpu.tiles import Tile
from pagemill_kernels.gpu.tuning import KEYS, STAGES, WARPS, TileKey, candidates, choose, deadline, fixed_tile, lines

KEY = TileKey("decode", 4, 128, 16, "bfloat16", 2)
TILES = candidates(KEY, 90)


def never() -> bool:
    return False


@given(
    st.sampled_from(["decode", "chunk"]),
    st.integers(1, 128),
    st.sampled_from([16, 64, 80, 96, 128, 256, 512]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([80, 89, 90, 100, 120]),
)
def test_candidates_begin_with_the_fixed_tile_and_are_few(
    use: str, group: int, head_dim: int, itemsize: int, capability: int
) -> None:
    key = TileKey(use, group, head_dim, 16, "any", itemsize)  # type: ignore[arg-type]
    tiles = candidates(key, capability)
    assert tiles[0] == fixed_tile(key, capability)
    assert len(set(tiles)) == len(tiles) <= 7
    assert all(tile.rows == tiles[0].rows for tile in tiles)  # partial results are laid out by them
    assert (len(tiles) == 1) == (itemsize == 4)
    for tile in tiles[1:]:
        assert tile.keys in KEYS
        assert tile.warps in WARPS
        assert tile.stages in STAGES
        assert tile.keys & (tile.keys - 1) == tile.warps & (tile.warps - 1) == 0


def test_the_fastest_is_chosen_and_said() -> None:
    seconds = dict(zip(TILES, [1.0, 1.2, 0.8, 0.5, *[0.9] * len(TILES)], strict=False))
    choice = choose(TILES, seconds.__getitem__, never)
    assert (choice.tile, choice.is_complete, choice.failed) == (TILES[3], True, {})
    assert choice.seconds == {tile: seconds[tile] for tile in TILES}
    [line] = lines(KEY, choice)
    assert line.startswith("attention (decode, 4 x 128, blocks of 16, bfloat16): 16 x 64 with 4 warps and ")
    assert "is 2.00 times as fast as 16 x 64 with 4 warps and 3 stages" in line


def test_the_fixed_one_stays_unless_another_is_clearly_faster() -> None:
    choice = choose(TILES, lambda tile: 1.0 if tile == TILES[0] else 0.98, never)
    assert (choice.tile, choice.is_complete, list(lines(KEY, choice))) == (TILES[0], True, [])


def test_what_fails_is_left_out_and_said() -> None:
    def time_tile(tile: Tile) -> float:
        if tile == TILES[2]:
            raise RuntimeError("out of resource: shared memory\nRequired: many")
        return 0.5 if tile == TILES[1] else 1.0

    choice = choose(TILES, time_tile, never)
    assert (choice.tile, choice.is_complete) == (TILES[1], True)
    assert choice.failed == {TILES[2]: "RuntimeError: out of resource: shared memory"}
    assert len(list(lines(KEY, choice))) == 2


@pytest.mark.parametrize("broken", [TILES[:1], TILES])
def test_where_the_fixed_one_fails_nothing_is_concluded(broken: tuple[Tile, ...]) -> None:
    def time_tile(tile: Tile) -> float:
        if tile in broken:
            raise RuntimeError
        return 1.0

    choice = choose(TILES, time_tile, never)
    assert (choice.tile, choice.is_complete) == (TILES[0], False)
    assert len(list(lines(KEY, choice))) == len(broken)


def test_no_candidate_is_begun_when_the_time_is_over() -> None:
    now = [100.0]

    def time_tile(tile: Tile) -> float:
        now[0] += 4.0  # builds take their time
        return 1.0 if tile == TILES[0] else 0.1

    choice = choose(TILES, time_tile, deadline(7.0, lambda: now[0]))
    assert list(choice.seconds) == list(TILES[:2])
    assert (choice.tile, choice.is_complete) == (TILES[1], False)
    assert choose(TILES, time_tile, lambda: True).tile == TILES[0]


def test_keys_differ_in_what_the_best_tile_may_depend_on() -> None:
    others = [replace(KEY, **change) for change in ({"use": "chunk"}, {"group": 5}, {"head_dim": 64})]
    others += [replace(KEY, block_size=32), replace(KEY, dtype="float16")]
    assert len({str(key) for key in (KEY, *others)}) == 6
