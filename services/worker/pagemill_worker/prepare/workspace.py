"""The folder a model is prepared in: where its files are written, linked and digested."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pagemill_shared.errors import ConfigurationError

Report = Callable[[str, float | None], None]
"""Told what is being done, and which share of it is done (0 to 1, or None where that is not known)."""

_BLOCK = 1 << 20  # bytes read at once
_REPORTS = 20  # per step
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_-]+")


class Workspace:
    """Files of a model that is being prepared.

    Adds each file once, and digests it meanwhile. The fingerprint covers every byte of every file, weights included: so
    it is equal wherever the content is, and reading the weights once costs little beside converting or fetching them.
    """

    def __init__(self, folder: Path, report: Report) -> None:
        self.folder = folder
        self.report = report
        self.bytes_needed = 0
        """Size of what the folder will hold, as far as it is known."""
        self._digests: dict[str, str] = {}
        self._step = ""
        self._total = self._done = self._reported = 0

    def begin(self, step: str, total: int) -> None:
        """Files added from now on count as progress of ``step``, which ends after ``total`` bytes."""
        self._step, self._total, self._done, self._reported = step, total, 0, 0
        self.report(step, 0.0)

    def reserve(self, count: int) -> None:
        """Notes that ``count`` bytes will be written.

        Raises:
            ConfigurationError: the file system has not as many left.
        """
        self.bytes_needed += count
        free = shutil.disk_usage(self.folder).free
        if free < count:
            raise ConfigurationError(f"{self.folder.parent} has {free / 1e6:,.0f} MB free; {self._needs()}")

    def no_space_left(self) -> ConfigurationError:
        return ConfigurationError(f"{self.folder.parent} has no space left; {self._needs()}")

    def _needs(self) -> str:
        return f"the prepared model needs {self.bytes_needed / 1e6:,.0f} MB"

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        self.write(name, [json.dumps(content, ensure_ascii=False, indent=2).encode() + b"\n"])

    def write_templates(self, templates: dict[str, str]) -> None:
        """Chat templates by name, where transformers looks for them; the text is kept to the byte."""
        for name, text in templates.items():
            if not _TEMPLATE_NAME.fullmatch(name):  # it becomes a file name
                raise ConfigurationError(f"the model has a chat template with the name {name!r}, which is not allowed")
            path = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            self.write(path, [text.encode()])

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        digest = hashlib.sha256()
        with path.open("xb") as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                self._advance(len(piece))
            file.flush()
            os.fsync(file.fileno())  # else a power cut could leave an empty file under the finished folder's name
        self._digests[name] = digest.hexdigest()

    def copy(self, name: str, source: Path) -> None:
        self.write(name, _blocks(source))

    def link(self, name: str, source: Path) -> None:
        """Adds a big file without copying it, where the file system can."""
        target, path = source.resolve(strict=True), self.folder / name
        try:
            path.symlink_to(target)
        except OSError:
            try:
                path.hardlink_to(target)
            except OSError:
                self.reserve(target.stat().st_size)
                self.copy(name, target)
                return
        digest = hashlib.sha256()
        for block in _blocks(path):
            digest.update(block)
            self._advance(len(block))
        self._digests[name] = digest.hexdigest()

    def fingerprint(self) -> str:
        """Hex SHA-256 over the names and contents of all files."""
        listing = "".join(f"{digest}  {name}\n" for name, digest in sorted(self._digests.items()))
        return hashlib.sha256(listing.encode()).hexdigest()

    def _advance(self, count: int) -> None:
        self._done += count
        if self._total and (self._done - self._reported) * _REPORTS >= self._total:
            self._reported = self._done
            self.report(self._step, min(1.0, self._done / self._total))


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block
