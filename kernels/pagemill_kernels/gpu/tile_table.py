"""The tiles that were chosen by timing, kept in the worker's cache folder: a small JSON file for each kind of GPU.

{"made_with": "<digest>", "tiles": {"<key>": {"rows": 16, "keys": 128, "warps": 4, "stages": 3}, …}}
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from pagemill_kernels.gpu.tiles import Tile
from pagemill_kernels.gpu.tuning import TileKey, candidates

MOST_BYTES = 1 << 20
SOURCES = ("attention.py", "eight_bits.py", "tiles.py", "tuning.py")


def made_with(triton: str) -> str:
    """Names what the times depend on: the sources of the kernels and the version of triton."""
    digest = hashlib.sha256(triton.encode())
    for name in SOURCES:
        digest.update(b"\0" + (Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:32]


class TileTable:
    """The file of one kind of GPU.

    Args:
        folder: the worker's cache folder.
        gpu: name of the GPU.
        capability: its compute capability, 90 for 9.0.
        digest: of `made_with`; a file with another one is as good as none.
    """

    def __init__(self, folder: Path, gpu: str, capability: int, digest: str) -> None:
        self.path = folder / "kernels" / f"tiles-{re.sub(r'[^A-Za-z0-9]+', '-', gpu).strip('-')}.json"
        self._capability = capability
        self._digest = digest

    def read(self, keys: tuple[TileKey, ...], report: Callable[[str], None]) -> dict[TileKey, Tile]:
        """What was kept for ``keys``. A file, or a tile in it, that cannot be used is left aside, and ``report`` told
        why."""
        try:
            kept = self._kept()
        except _UnusableError as error:
            report(f"warning: {self.path} is not used: {error}")
            return {}
        found = {}
        for key in keys:
            tile = next((t for t in candidates(key, self._capability) if asdict(t) == kept.get(str(key))), None)
            if tile is not None:
                found[key] = tile
            elif str(key) in kept:
                report(f"warning: {self.path}: the tile for {key} is none of the candidates and is not used")
        return found

    def add(self, tiles: Mapping[TileKey, Tile], report: Callable[[str], None]) -> None:
        """Keeps ``tiles`` beside what is there; ``report`` is told if that cannot be."""
        try:
            kept = self._kept()
        except _UnusableError:
            kept = {}
        kept |= {str(key): asdict(tile) for key, tile in tiles.items()}
        fresh = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps({"made_with": self._digest, "tiles": kept}, indent=1) + "\n", encoding="utf-8")
            os.replace(fresh, self.path)
        except OSError as error:
            report(f"warning: {self.path} cannot be written: {error.strerror}")

    def _kept(self) -> dict[str, object]:
        """Tiles by key, as they stand in the file; none where there is no file."""
        try:
            with self.path.open("rb") as file:
                text = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise _UnusableError(str(error.strerror)) from None
        try:
            content = json.loads(text) if len(text) <= MOST_BYTES else None
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict) or not isinstance(kept := content.get("tiles"), dict):
            raise _UnusableError("it is no table of tiles")
        if content.get("made_with") != self._digest:
            raise _UnusableError("it was made with other kernels or another triton")
        return kept


class _UnusableError(Exception):
    """The message says what is wrong with the file."""
