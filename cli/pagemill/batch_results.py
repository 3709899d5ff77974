"""The file that the results of a batch go to. A run that ended early is taken up where it ended."""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from pagemill.batch_lines import settled_id
from pagemill_shared.errors import ConfigurationError


class Results:
    """Use it as a context; it is one run's alone while it is open.

    A last line that was cut off, and results that another run may better (no response, 5xx, 408, 429), are taken out
    when it is opened.

    Attributes:
        settled: custom_ids of the results that it holds.

    Raises:
        ConfigurationError: it cannot be written, holds something else, or belongs to another run just now.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settled: set[str] = set()
        if path.exists() and not path.is_file():
            raise ConfigurationError(f"{path}: not a file")
        with ExitStack() as undo:
            try:
                self._file: BinaryIO = path.open("a+b")
                undo.callback(lambda: self._file.close())
                _lock(self._file, path)
                kept, whole = self._read()
                if not whole:
                    self._replace(kept)
            except OSError as error:
                raise ConfigurationError(f"{path}: {error.strerror or error}") from None
            undo.pop_all()

    def __enter__(self) -> Results:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, line: bytes) -> None:
        """Writes one result; a run that is killed loses at most the line that it was writing.

        Raises:
            ConfigurationError: there is no room for it.
        """
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise ConfigurationError(f"{self.path}: {error.strerror or error}") from None

    def _read(self) -> tuple[list[bytes], bool]:
        """The lines that stay, and whether these are all."""
        self._file.seek(0)
        kept: list[bytes] = []
        whole = True
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                whole = False  # the last one, cut off
                break
            try:
                custom_id = settled_id(line)
            except ValueError as error:
                raise ConfigurationError(
                    f"{self.path}, line {number}: not a result of a batch ({error}); choose another --output"
                ) from None
            if custom_id is None:
                whole = False
                continue
            self.settled.add(custom_id)
            kept.append(line)
        return kept, whole

    def _replace(self, kept: list[bytes]) -> None:
        descriptor, name = tempfile.mkstemp(prefix=self.path.name, dir=self.path.parent)
        new = os.fdopen(descriptor, "w+b")
        _lock(new, self.path)  # before it is in place: it must never be found free
        new.writelines(kept)
        new.flush()
        os.fsync(new.fileno())
        os.fchmod(new.fileno(), os.fstat(self._file.fileno()).st_mode)
        os.replace(name, self.path)
        self._file.close()
        self._file = new


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigurationError(f"{path}: another run writes to it") from None
