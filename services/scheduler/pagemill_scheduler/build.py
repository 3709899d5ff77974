"""Compiles the scheduler's core with mypyc, and what encodes and decodes its messages.

    python -m pagemill_scheduler.build

leaves it inside the package, where importing the package finds it as long as no source changes (see ``compiled``). It
wants a C compiler, mypy and setuptools, and takes about a minute; what it leaves needs none of them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pagemill_scheduler.compiled import BUILDS, SHARED, SOURCES, WIRE, build_folder, python_tag, sources

COMPILE_SECONDS = 1800.0

# Run by a process of its own, in a folder that holds a copy of the sources. The name of a group makes the one library
# that holds all its code a module of the package. The core is a group of its own, so that it also runs with the other
# one as Python.
SETUP = """
import sys
from mypyc.build import mypycify
from setuptools import setup

modules = []
for group in sys.argv[2:]:
    name, *files = group.split()
    options = ["--config-file=", "--ignore-missing-imports", *files]
    modules += mypycify(options, opt_level="3", debug_level="0", group_name=name)
setup(name="core", packages=[], ext_modules=modules, script_args=["-q", "build_ext", "--build-lib", sys.argv[1]])
"""


class BuildError(Exception):
    """The core cannot be compiled; the message says why, in one line."""


def build(builds: Path = BUILDS) -> Path:
    """Compiles the sources as they are now, and removes what was compiled from others for this Python.

    Returns:
        The folder with the compiled modules, which appears whole or not at all.

    Raises:
        BuildError: something that it takes is missing, or fails; or the folder cannot be written.
    """
    for needed in ("mypyc", "setuptools"):
        if importlib.util.find_spec(needed) is None:
            raise BuildError(f"{needed} is not installed")
    destination = build_folder(builds)
    try:
        builds.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=builds, prefix=".building-") as name:
            folder = Path(name)
            for package in (SOURCES, SHARED):
                shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns(".*", "_*_", BUILDS.name))
            _compile(folder)
            for old in builds.glob(f"{python_tag()}-*"):
                shutil.rmtree(old)
            os.replace(folder / "built", destination)
    except OSError as error:
        raise BuildError(f"{builds} cannot be written: {error}") from None
    return destination


def _compile(folder: Path) -> None:
    wire = " ".join([f"{SHARED.name}._wire", *(f"{SHARED.name}/{name}.py" for name in WIRE)])
    core = " ".join([f"{SOURCES.name}._core", *(f"{SOURCES.name}/{path.name}" for path in sources())])
    command = [sys.executable, "-P", "-c", SETUP, "built", wire, core]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"mypyc takes more than {COMPILE_SECONDS:.0f} s") from None
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        raise BuildError(next((line for line in lines if "error" in line), lines[-1] if lines else "?")[:300])


def main(arguments: list[str]) -> int:
    if arguments:
        sys.stderr.write("usage: python -m pagemill_scheduler.build\n")
        return 2
    try:
        folder = build()
    except BuildError as error:
        sys.stderr.write(f"the scheduler's core is not compiled and will run as Python: {error}\n")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
