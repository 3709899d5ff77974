"""From MODEL to a prepared folder, at once when it is there already."""

from __future__ import annotations

import errno
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from pagemill_shared.errors import ConfigurationError
from pagemill_shared.manifest import ModelManifest, prepared_folder, read_manifest, write_manifest
from pagemill_worker.prepare.facts import read_facts
from pagemill_worker.prepare.sources import Source, find_source
from pagemill_worker.prepare.workspace import Report, Workspace

REVISION = 1
"""Of what this package writes: a folder that another revision wrote is prepared anew."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


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
        lock = FileLock(folder.with_name(f".{folder.name}.lock"))
        try:
            lock.acquire(blocking=False)
        except Timeout:
            report("waiting for another process that prepares this model", None)
            lock.acquire()
        with lock:
            lock.release()  # `with` has taken it a second time
            if not _is_current(folder, source):
                _prepare(model, source, folder, report)
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be written: {error.strerror or error}") from error
    return folder


def _is_current(folder: Path, source: Source) -> bool:
    try:
        manifest = read_manifest(folder)
    except ConfigurationError:
        return False
    state = source.state()
    return state is None or manifest.source_state == _state(state)


def _state(state: str) -> str:
    return f"{REVISION}:{state}"


def _prepare(model: str, source: Source, folder: Path, report: Report) -> None:
    for left in folder.parent.glob(f".{folder.name}.tmp-*"):
        shutil.rmtree(left)  # of a process that was killed; the lock says that none is at work
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    try:
        state = source.state()
        space = Workspace(made, report)
        source.prepare(space)
        facts = read_facts(made)
        write_manifest(
            made,
            ModelManifest(
                name=source.name,
                source=model,
                source_state=_state(state or ""),
                fingerprint=space.fingerprint(),
                architecture=facts.architecture,
                vocab_size=facts.vocab_size,
                max_model_len=facts.max_model_len,
                bos_token_id=facts.bos_token_id,
                eos_token_ids=facts.eos_token_ids,
            ),
        )
        made.chmod(0o755)
        _replace(folder, made)
    except OSError as error:
        if error.errno in _FULL:
            raise ConfigurationError(f"{folder.parent} has no space left for the prepared model") from error
        raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    report("the model is prepared", 1.0)


def _replace(folder: Path, made: Path) -> None:
    """Puts ``made`` in the place of ``folder``, which a rename can only do where there is none."""
    old = made.with_name(f"{made.name}-old")
    with suppress(FileNotFoundError):
        folder.rename(old)
    made.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
