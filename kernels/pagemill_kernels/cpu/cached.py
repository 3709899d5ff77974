"""Where the library for this machine comes from: compiled ahead of time, or compiled on first use and kept.

A kept library is named by the digest of its content, so that a damaged or foreign file is noticed before it is loaded,
and it lies in a folder that nobody else may write to: whatever is loaded runs with the worker's rights.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from pagemill_kernels.cpu.build import (
    COMPILE_SECONDS,
    FLAGS,
    BuildError,
    Isa,
    compile_library,
    compiler_version,
    find_compiler,
    prebuilt_name,
    source_digest,
    usable_isas,
)


def find_library(prebuilt: Path | None, cache_dir: Path | None, report: Callable[[str], None]) -> tuple[Path, Isa]:
    """A library for the best instruction set of this machine.

    Args:
        prebuilt: where libraries lie that were compiled ahead of time; None for none.
        cache_dir: what is compiled on first use is kept below it; None to compile nothing.
        report: told before something that takes long.

    Raises:
        BuildError: there is none, and none can be compiled.
    """
    usable = usable_isas()
    if not usable:
        raise BuildError("there are no kernels for this machine's CPU")
    if prebuilt is not None:
        for isa in usable:
            path = prebuilt / prebuilt_name(isa)
            if path.is_file():
                _refuse_foreign(prebuilt)
                return path, isa
        if cache_dir is None:
            raise BuildError(f"{prebuilt} holds none of this version for this machine's CPU")
    if cache_dir is None:
        raise BuildError("none were compiled ahead of time, and there is no folder to keep them in")
    return _kept(cache_dir, usable[0], report), usable[0]


def _kept(cache_dir: Path, isa: Isa, report: Callable[[str], None]) -> Path:
    compiler = find_compiler()
    parts = (source_digest(), *FLAGS, *isa.flags, *compiler, compiler_version(compiler), isa.name)
    folder = cache_dir / "kernels" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        _refuse_foreign(folder)
        with FileLock(folder / "lock", timeout=COMPILE_SECONDS):
            for path in sorted(folder.glob("pagemill_cpu-*.so")):
                if path.name == _name(path):
                    return path
                path.unlink()  # cut short, or not what was compiled
            report(f"compiling the CPU kernels for {isa.name} (once)")
            fresh = folder / "fresh.so"
            compile_library(compiler, isa, fresh)
            path = folder / _name(fresh)
            os.replace(fresh, path)
            return path
    except Timeout:
        raise BuildError(f"another process has been compiling into {folder} for {COMPILE_SECONDS:.0f} s") from None
    except OSError as error:
        raise BuildError(f"{folder} cannot be used: {error.strerror or error}") from None


def _name(path: Path) -> str:
    return f"pagemill_cpu-{hashlib.sha256(path.read_bytes()).hexdigest()[:32]}.so"


def _refuse_foreign(folder: Path) -> None:
    """Raises BuildError where others than this user and root could have put the library there."""
    found = folder.stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"{folder} can be written by other users, so no code is loaded from it")
