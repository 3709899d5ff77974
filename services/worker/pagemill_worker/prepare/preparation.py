"""From MODEL to a prepared folder, at once when it is there already."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from pagemill_shared.errors import ConfigurationError
from pagemill_shared.manifest import FORMAT, ModelManifest, prepared_folder, read_manifest, write_manifest
from pagemill_worker.prepare.facts import read_facts
from pagemill_worker.prepare.sources import Source, find_source
from pagemill_worker.prepare.workspace import Report, Workspace

REVISION = 3
"""Of what this package writes: a folder that another revision wrote is prepared anew."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REQUIRED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def prepare_model(model: str, cache_dir: Path, report: Report) -> Path:
    """The folder of ``model``'s prepared form (see `pagemill_shared.manifest`), made first where it is missing or old.

    Several processes may prepare one model at once: one works, the others wait and find it done. What is not
    finished is never seen under the folder's name.

    Args:
        model: ``bundled``, a .gguf file, a folder with safetensors weights, or a name on the hub.
        cache_dir: prepared models are kept below it.
        report: told about progress.

    Raises:
        ConfigurationError: the model is missing, damaged or not supported, or the cache cannot be written.
    """
    source = find_source(model)
    folder = prepared_folder(cache_dir, model)
    if _is_current(folder, source):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, report):
            if not _is_current(folder, source):  # another process may have made it meanwhile
                _prepare(model, source, folder, report)
    except (OSError, NotImplementedError) as error:  # the latter from file systems without locks
        raise ConfigurationError(f"{folder} cannot be written: {_cause(error)}") from error
    return folder


def _cause(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


@contextmanager
def _locked(folder: Path, report: Report) -> Iterator[None]:
    """The kernel frees the lock when its holder dies."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        report("waiting for another process that prepares this model", None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _is_current(folder: Path, source: Source) -> bool:
    try:
        manifest = read_manifest(folder)
    except ConfigurationError:
        return False
    state = source.state()
    weights = list(folder.glob("*.safetensors"))
    return (
        manifest.format == FORMAT
        and (state is None or manifest.source_state == _state(state))
        and all((folder / name).is_file() for name in _REQUIRED)
        and bool(weights)
        and all(path.is_file() for path in weights)  # a link's target may be gone
    )


def _state(state: str) -> str:
    return f"{REVISION}:{state}"


def _prepare(model: str, source: Source, folder: Path, report: Report) -> None:
    made, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("new", "old"))
    for left in (made, old):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    made.mkdir()
    space = Workspace(made, report)
    try:
        state = source.prepare(space)
        facts = read_facts(made)
        write_manifest(
            made,
            ModelManifest(
                name=source.name,
                source=model,
                source_state=_state(state),
                fingerprint=space.fingerprint(),
                architecture=facts.architecture,
                vocab_size=facts.vocab_size,
                max_model_len=facts.max_model_len,
                bos_token_id=facts.bos_token_id,
                eos_token_ids=facts.eos_token_ids,
            ),
        )
        with suppress(FileNotFoundError):
            folder.rename(old)  # a rename does not replace a folder that holds files
        made.rename(folder)
    except OSError as error:
        if error.errno in _FULL:
            raise space.no_space_left() from error
        raise
    finally:
        for left in (made, old):
            shutil.rmtree(left, ignore_errors=True)
