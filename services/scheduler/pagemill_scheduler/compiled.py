"""Which form of the scheduler runs: its modules compiled to machine code, or the Python that they are compiled from.

``python -m pagemill_scheduler.build`` leaves the compiled form in a folder that is named after the sources and the
Python that it was compiled for. Where there is such a folder it comes first in the package's path; with a source that
has changed since, there is none, and plain Python runs.

The scheduler's process also encodes and decodes with compiled modules of the shared package. Gateways and workers,
which do not import this package, always run those as Python.
"""

from __future__ import annotations

import hashlib
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pagemill_shared

SWITCH = "PAGEMILL_COMPILED_SCHEDULER"
"""Environment variable of the setting: read here, because it decides what is imported."""

SOURCES = Path(__file__).resolve().parent
SHARED = Path(pagemill_shared.__file__).resolve().parent
BUILDS = SOURCES / "_compiled"

PLAIN = frozenset({"__init__", "app", "build", "collector", "compiled", "shell"})
"""Modules that stay Python: they carry, and wait for others."""


WIRE = ("codec", "numbering", "records", "schema")
"""Modules of the shared package that are compiled, too."""


def sources(package: Path = SOURCES) -> list[Path]:
    """What of the core is compiled."""
    return [path for path in sorted(package.glob("*.py")) if path.stem not in PLAIN]


def digest(package: Path = SOURCES, shared: Path = SHARED) -> str:
    """Names what a build depends on: also the shared package, whose types and constants the compiled code knows."""
    found = hashlib.sha256()
    for path in [*sources(package), package / "build.py", *sorted(shared.glob("*.py"))]:
        found.update(f"{path.parent.name}/{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:32]


def python_tag() -> str:
    """Names the Python that extension modules are made for, and the machine."""
    return EXTENSION_SUFFIXES[0].strip(".").partition(".")[0]


def build_folder(builds: Path = BUILDS) -> Path:
    """Where the compiled form of these sources is, if there is one."""
    return builds / f"{python_tag()}-{digest()}"


def prefer(package_path: list[str]) -> None:
    """Puts the compiled form first in the path of the package, if there is one and it is not switched off.

    And in that of the shared package; but if one of its modules has been imported as Python, all stay so, because
    compiled ones know each other's insides.
    """
    if os.environ.get(SWITCH, "").lower() in ("0", "false", "f", "no", "n", "off"):
        return
    if BUILDS.is_dir() and (folder := build_folder()).is_dir():
        package_path.insert(0, str(folder / SOURCES.name))
        if not any(f"{SHARED.name}.{name}" in sys.modules for name in WIRE):
            pagemill_shared.__path__.insert(0, str(folder / SHARED.name))


def in_use() -> bool:
    """Whether the compiled form runs in this process."""
    core = sys.modules.get("pagemill_scheduler.core")
    return core is not None and not str(core.__file__).endswith(".py")
