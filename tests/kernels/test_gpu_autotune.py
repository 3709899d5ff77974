"""Tiles that were timed once and kept in a file, and files that are of no use."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from pagemill_kernels.gpu.autotune import tuned_tiles
from pagemill_kernels.gpu.tile_table import MOST_BYTES, TileTable, made_with
from pagemill_kernels.gpu.tiles import Tile
from pagemill_kernels.gpu.tuning import TileKey, candidates

DECODE = TileKey("decode", 4, 128, 16, "bfloat16", 2)
CHUNK = TileKey("chunk", 4, 128, 16, "bfloat16", 2)
KEYS = (DECODE, CHUNK)
BEST = {key: candidates(key, 90)[2] for key in KEYS}


class Device:
    """Times tiles: those of `BEST` take half of what others take. ``clock`` goes on by a second a tile."""

    def __init__(self, seconds_each: float = 1.0) -> None:
        self.timed: list[tuple[TileKey, Tile]] = []
        self.said: list[str] = []
        self._each = seconds_each

    def clock(self) -> float:
        return self._each * len(self.timed)

    def time_tile(self, key: TileKey, tile: Tile) -> float:
        self.timed.append((key, tile))
        return 0.001 if tile == BEST[key] else 0.002

    def tiles(self, table: TileTable, keys: tuple[TileKey, ...] = KEYS) -> dict[TileKey, Tile]:
        return tuned_tiles(keys, 90, table, self.time_tile, self.clock, self.said.append)


def table(folder: Path, gpu: str = "NVIDIA H200", digest: str = "a") -> TileTable:
    return TileTable(folder, gpu, 90, digest)


def test_timed_once_and_then_read(tmp_path: Path) -> None:
    first, second = Device(), Device()
    assert first.tiles(table(tmp_path)) == BEST
    assert len(first.timed) == sum(len(candidates(key, 90)) for key in KEYS)
    assert first.said[0].startswith("timing tiles for attention, once for this GPU and model")
    assert sum("2.00 times as fast" in line for line in first.said) == 2
    assert second.tiles(table(tmp_path)) == BEST
    assert (second.timed, second.said) == ([], [])
    [file] = tmp_path.rglob("*.*")
    assert file.relative_to(tmp_path) == Path("kernels", "tiles-NVIDIA-H200.json")


def test_another_gpu_and_another_model_are_timed_apart(tmp_path: Path) -> None:
    Device().tiles(table(tmp_path), (DECODE,))
    other, model = Device(), Device()
    other.tiles(table(tmp_path, "NVIDIA A100-SXM4/80GB"), (DECODE,))
    assert other.timed
    model.tiles(table(tmp_path), KEYS)
    assert {key for key, _ in model.timed} == {CHUNK}
    again = Device()
    assert again.tiles(table(tmp_path)) == BEST
    assert not again.timed


def test_float32_is_not_timed(tmp_path: Path) -> None:
    device = Device()
    assert device.tiles(table(tmp_path), (TileKey("decode", 4, 128, 16, "float32", 4),)) == {}
    assert (device.timed, device.said, list(tmp_path.iterdir())) == ([], [], [])


def test_what_there_was_no_time_for_is_timed_at_the_next_start(tmp_path: Path) -> None:
    slow = Device(seconds_each=5.0)
    assert slow.tiles(table(tmp_path)) == {DECODE: BEST[DECODE], CHUNK: candidates(CHUNK, 90)[0]}
    assert len(slow.timed) == 3
    assert not list(tmp_path.rglob("*.json"))
    assert Device().tiles(table(tmp_path)) == BEST


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no table"),
        (b"{", "no table"),
        (b"\xff\xfe", "no table"),
        (b"[1]", "no table"),
        (b'{"made_with": "a"}', "no table"),
        (b'{"made_with": "a", "tiles": []}', "no table"),
        (b"[" * 200_000, "no table"),
        (b" " * (MOST_BYTES + 1), "no table"),
        (b'{"made_with": "b", "tiles": {}}', "other kernels or another triton"),
    ],
)
def test_a_file_that_is_of_no_use_is_named_and_made_anew(tmp_path: Path, content: bytes, reason: str) -> None:
    path = table(tmp_path).path
    path.parent.mkdir()
    path.write_bytes(content)
    device, after = Device(), Device()
    assert device.tiles(table(tmp_path)) == BEST
    assert device.said[0].startswith(f"warning: {path} is not used: ")
    assert reason in device.said[0]
    assert after.tiles(table(tmp_path)) == BEST
    assert (after.timed, after.said) == ([], [])


@pytest.mark.parametrize("change", [{"warps": 3}, {"rows": 1 << 40}, {"keys": "64"}, {"more": 1}])
def test_a_kept_tile_that_is_no_candidate_is_not_used(tmp_path: Path, change: dict[str, object]) -> None:
    Device().tiles(table(tmp_path))
    path = table(tmp_path).path
    content = json.loads(path.read_text())
    content["tiles"][str(CHUNK)] |= change
    path.write_text(json.dumps(content))
    device = Device()
    assert device.tiles(table(tmp_path)) == BEST
    assert {key for key, _ in device.timed} == {CHUNK}
    assert "is none of the candidates" in device.said[0]


def test_a_folder_that_cannot_be_written_costs_the_file_alone(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("a file")
    device = Device()
    assert device.tiles(table(tmp_path)) == BEST
    assert [line.startswith("warning: ") for line in (device.said[0], device.said[-1])] == [True, True]
    assert "cannot be written" in device.said[-1]


def test_the_digest_follows_triton() -> None:
    digests = [made_with(version) for version in ("3.8.0", "3.9.0", "3.9.0")]
    assert [a == b for a, b in itertools.pairwise(digests)] == [False, True]
