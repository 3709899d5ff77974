"""The folder a model is prepared in: where its files are written, measured and digested."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Report = Callable[[str, float | None], None]
"""Told what is being done, and which share of it is done (0 to 1, or None where that is not known)."""

_BLOCK = 1 << 20  # bytes read at once
_REPORT_EVERY = 32 << 20  # bytes


class Workspace:
    """Files of a model that is being prepared.

    Writes each file once, and digests what it writes: the fingerprint covers every byte of every file, so it is equal
    wherever the content is equal, and reading the weights once more is cheap beside what else is done with them.
    """

    def __init__(self, folder: Path, report: Report) -> None:
        self.folder = folder
        self._report = report
        self._digests: dict[str, str] = {}

    def step(self, what: str, share: float | None = None) -> None:
        self._report(what, share)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        self.write(name, [json.dumps(content, ensure_ascii=False, indent=2).encode() + b"\n"])

    def write(self, name: str, pieces: Iterable[bytes | memoryview], step: str = "", total: int = 0) -> None:
        """Writes ``pieces`` as the file ``name``; with a ``step``, reports which share of ``total`` bytes is done."""
        digest, done, reported = hashlib.sha256(), 0, 0
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        with path.open("xb") as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                done += len(piece)
                if step and done - reported >= _REPORT_EVERY:
                    reported = done
                    self._report(step, min(1.0, done / total))
            file.flush()
            os.fsync(file.fileno())
        self._digests[name] = digest.hexdigest()

    def write_templates(self, templates: dict[str, str]) -> None:
        """Chat templates by name, where transformers looks for them; the text is kept to the byte."""
        for name, text in templates.items():
            path = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            self.write(path, [text.encode()])

    def fingerprint(self) -> str:
        """Hex SHA-256 over the names and contents of all files."""
        listing = "".join(f"{digest}  {name}\n" for name, digest in sorted(self._digests.items()))
        return hashlib.sha256(listing.encode()).hexdigest()
