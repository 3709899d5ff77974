"""Compiles the C++ sources for one instruction set after the other.

    python -m pagemill_kernels.cpu.build FOLDER

leaves a library for every instruction set of this kind of machine in FOLDER, where the worker's ``--kernels-dir``
(``PAGEMILL_KERNELS_DIR``) makes it look: for images that are built on one machine and run on another, with no compiler
in them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "source"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-ffp-contract=fast", "-fvisibility=hidden", "-w")
COMPILE_SECONDS = 600.0


class BuildError(Exception):
    """No library can be had; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set that libraries are compiled for.

    Attributes:
        flags: what the compiler is told; never the machine it runs on, so that a library runs elsewhere.
        needs: what the system must say that the CPU has.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")


def _x86(name: str, *features: str) -> Isa:
    """The system's names are the compiler's, save one."""
    needs = frozenset(feature.replace("avx512vnni", "avx512_vnni") for feature in features)
    return Isa(name, tuple(f"-m{feature}" for feature in features), needs)


_ISAS = {
    "x86_64": (_x86("avx512vnni", *_AVX512, "avx512vnni"), _x86("avx512", *_AVX512), _x86("avx2", *_AVX2)),
    "aarch64": (
        Isa("neondot", ("-march=armv8.2-a+dotprod",), frozenset({"asimd", "asimddp"})),
        Isa("neon", ("-march=armv8-a",), frozenset({"asimd"})),
    ),
}


def isas(machine: str) -> tuple[Isa, ...]:
    """Instruction sets for a kind of machine, best first; none where there are no kernels for it."""
    return _ISAS.get({"AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine), ())


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the system says that the CPU has; nothing where it does not say."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def usable_isas(machine: str | None = None, features: Set[str] | None = None) -> tuple[Isa, ...]:
    """Those that run here, best first."""
    has = cpu_features() if features is None else features
    return tuple(isa for isa in isas(machine or platform.machine()) if isa.needs <= has)


def source_digest() -> str:
    """Names the sources and flags, so that no library is used with other code than it was compiled from."""
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def prebuilt_name(isa: Isa) -> str:
    """File name of a library that was compiled ahead of time."""
    return f"pagemill_cpu-{isa.name}-{source_digest()}.so"


def find_compiler() -> list[str]:
    """The command of the C++ compiler: ``CXX``, or the first of the usual names.

    Raises:
        BuildError: there is none.
    """
    wanted = shlex.split(os.environ.get("CXX", ""))
    for command in [wanted] if wanted else [["c++"], ["g++"], ["clang++"]]:
        found = shutil.which(command[0])
        if found:
            return [found, *command[1:]]
    raise BuildError(f"no C++ compiler ({wanted[0] if wanted else 'c++, g++ or clang++'})")


def compiler_version(compiler: list[str]) -> str:
    """What the compiler says that it is.

    Raises:
        BuildError: it does not answer.
    """
    return _run([*compiler, "--version"], "does not tell its version").strip()


def compile_library(compiler: list[str], isa: Isa, destination: Path) -> None:
    """Compiles all sources, at the same time, into ``destination``, which appears whole or not at all.

    Raises:
        BuildError: the compiler fails, with the first error that it names; or the folder cannot be written.
    """
    failure = f"does not compile for {isa.name}"
    try:
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".building-") as name:
            folder = Path(name)
            commands = [
                [*compiler, *FLAGS, *isa.flags, "-c", str(path), "-o", str(folder / f"{path.stem}.o")]
                for path in sorted(SOURCES.glob("*.cpp"))
            ]
            with ThreadPoolExecutor(len(commands)) as pool:
                list(pool.map(lambda command: _run(command, failure), commands))
            library = folder / "library.so"
            _run([*compiler, "-shared", *(command[-1] for command in commands), "-o", str(library)], failure)
            library.chmod(0o755)
            os.replace(library, destination)
    except OSError as error:
        raise BuildError(f"{destination.parent} cannot be written: {error.strerror}") from None


def _run(command: list[str], failure: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} {failure}: {error}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise BuildError(f"{command[0]} {failure}: {lines[0][:300]}")
    return done.stdout


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("usage: python -m pagemill_kernels.cpu.build FOLDER\n")
        return 2
    targets = isas(platform.machine())
    if not targets:
        sys.stderr.write(f"no CPU kernels for {platform.machine()}; nothing to build\n")
        return 0
    try:
        compiler = find_compiler()
        folder = Path(arguments[0])
        folder.mkdir(parents=True, exist_ok=True)
        for isa in targets:
            compile_library(compiler, isa, folder / prebuilt_name(isa))
            sys.stdout.write(f"{folder / prebuilt_name(isa)}\n")
    except (BuildError, OSError) as error:
        sys.stderr.write(f"the CPU kernels cannot be built: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
