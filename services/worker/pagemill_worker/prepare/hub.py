"""Models on the hub: what the local cache has of them, and fetching the rest.

``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN`` and the others work as everywhere: ``huggingface_hub`` does the work.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.workspace import Report

_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", "*.tiktoken"]
# Other forms of the same model live in subfolders; and Mistral's own form doubles the weights.
_UNWANTED = ["*/*.safetensors", "*/*.json", "*/*.model", "*/*.txt", "consolidated*"]


def cached_commit(repository: str) -> str | None:
    """The commit that the local cache has of the main branch, or None."""
    from huggingface_hub import constants

    reference = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "refs" / "main"
    try:
        return reference.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def fetch(repository: str, report: Report) -> Path:
    """The folder of ``repository`` in the local cache, fetched as far as it is missing there.

    Raises:
        ConfigurationError: there is no such model, it may not be fetched, or the hub is out of reach and the local
            cache lacks it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    report(f"fetching {repository} from the hub", None)
    try:
        return Path(
            snapshot_download(
                repository,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                tqdm_class=_progress_bar(f"fetching {repository} from the hub", report),
            )
        )
    except GatedRepoError:
        cause = "is gated: accept its terms on the hub and set HF_TOKEN"
    except RepositoryNotFoundError:
        cause = "is neither a file, a folder nor (for this user) a model on the hub"
    except LocalEntryNotFoundError:
        cause = "is not (or not whole) in the local cache, and the hub is out of reach or switched off"
    except (HFValidationError, EntryNotFoundError) as error:
        cause = f"cannot be fetched from the hub: {_first_line(error)}"
    except OSError as error:  # of the network, which the library's own errors are, too, or of the disk
        cause = f"cannot be fetched from the hub: {error.strerror or _first_line(error)}"
    raise ConfigurationError(f"model {repository!r} {cause}")


def _progress_bar(step: str, report: Report) -> type[Any]:
    """A class in the place of the library's bars that reports the share of bytes and draws nothing."""
    from huggingface_hub.utils.tqdm import tqdm

    percent = -1

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # It would be disabled where there is no terminal, and writes a line end on closing.
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})  # type: ignore[no-untyped-call]

        def display(self, *_: Any, **__: Any) -> None:
            nonlocal percent
            if self.unit == "B" and self.total and int(100 * self.n / self.total) > percent:
                percent = int(100 * self.n / self.total)
                report(step, percent / 100)

    return ReportingBar


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
