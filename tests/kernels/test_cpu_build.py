"""Compiling, keeping and refusing libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pagemill_testing.cpu_kernels import compiled, isa_names

from pagemill_kernels.cpu import build
from pagemill_kernels.cpu.build import BuildError, cpu_features, isas, main, prebuilt_name, usable_isas
from pagemill_kernels.cpu.cached import find_library
from pagemill_kernels.cpu.kernels import CpuKernels
from pagemill_kernels.reference import TorchKernels
from pagemill_kernels.select import select_kernels

CPU = torch.device("cpu")
BEST = isa_names()[0]


@pytest.fixture
def compiler(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that counts its runs and answers with a library that was compiled before; where it writes them."""
    library = compiled(BEST, tmp_path_factory)
    program, runs = tmp_path / "compiler", tmp_path / "runs"
    program.write_text(
        f"""#!{sys.executable}
import shutil, sys, time
if "--version" in sys.argv:
    print("compiler 1")
    sys.exit()
out = sys.argv[sys.argv.index("-o") + 1]
if "-shared" in sys.argv:
    with open({str(runs)!r}, "a") as file:
        file.write("run\\n")
    time.sleep(0.2)
    shutil.copy({str(library)!r}, out)
else:
    open(out, "w").close()
"""
    )
    program.chmod(0o755)
    runs.touch()
    monkeypatch.setenv("CXX", str(program))
    return runs


def said(reports: list[str]) -> str:
    assert len(reports) == 1
    assert "\n" not in reports[0]
    return reports[0]


def test_compiled_once_then_found(tmp_path: Path, compiler: Path) -> None:
    reports: list[str] = []
    for _ in range(2):
        kernels = select_kernels(CPU, tmp_path / "cache", reports.append)
        assert isinstance(kernels, CpuKernels)
        assert kernels.name == f"cpu-{BEST}"
    assert compiler.read_text() == "run\n"
    assert said(reports) == f"compiling the CPU kernels for {BEST} (once)"
    [library] = (tmp_path / "cache").rglob("*.so")
    assert library.stat().st_mode & 0o022 == 0


def test_another_compiler_compiles_anew(tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_library(None, tmp_path / "cache", str)
    monkeypatch.setenv("CXX", os.environ["CXX"] + " --of-another-kind")
    find_library(None, tmp_path / "cache", str)
    assert compiler.read_text() == "run\n" * 2


def test_a_poisoned_file_is_compiled_anew(tmp_path: Path, compiler: Path) -> None:
    library, _ = find_library(None, tmp_path / "cache", str)
    good = library.read_bytes()
    for poison in (b"", good[:1000], b"\x7fELF" + good[4:-1] + b"!"):
        library.unlink()  # a loaded library must not change under its process
        library.write_bytes(poison)
        assert isinstance(select_kernels(CPU, tmp_path / "cache"), CpuKernels)
        assert find_library(None, tmp_path / "cache", str)[0].read_bytes() == good
    assert compiler.read_text() == "run\n" * 4


def test_two_processes_compile_once(tmp_path: Path, compiler: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pagemill_kernels.cpu.cached import find_library; "
        "print(find_library(None, Path(sys.argv[1]), str)[0])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {process.communicate(timeout=60)[0] for process in running}
    assert len(found) == 1
    assert Path(found.pop().strip()).is_file()
    assert [process.returncode for process in running] == [0, 0, 0]
    assert compiler.read_text() == "run\n"


def test_plain_torch_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    reports: list[str] = []
    assert isinstance(select_kernels(CPU, tmp_path / "cache", reports.append), TorchKernels)
    assert "no C++ compiler" in said(reports)


def test_plain_torch_when_the_compiler_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "compiler"
    program.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit\necho 'x.cpp:1: error: no such luck' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    reports: list[str] = []
    assert isinstance(select_kernels(CPU, tmp_path / "cache", reports.append), TorchKernels)
    assert "error: no such luck" in reports[-1]
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_plain_torch_when_the_library_is_none(tmp_path: Path) -> None:
    (tmp_path / prebuilt_name(usable_isas()[0])).write_bytes(b"not a library")
    reports: list[str] = []
    assert isinstance(select_kernels(CPU, None, reports.append, tmp_path), TorchKernels)
    assert "cannot be loaded" in said(reports)


def test_plain_torch_when_the_folder_is_read_only_or_everyones(tmp_path: Path, compiler: Path) -> None:
    (tmp_path / "file").touch()
    reports: list[str] = []
    assert isinstance(select_kernels(CPU, tmp_path / "file", reports.append), TorchKernels)
    assert "cannot be used" in said(reports)
    library, _ = find_library(None, tmp_path / "cache", str)
    library.parent.chmod(0o777)
    with pytest.raises(BuildError, match="other users"):
        find_library(None, tmp_path / "cache", str)


def test_compiled_ahead_of_time(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "built")]) == 0
    names = {Path(line).name for line in capsys.readouterr().out.splitlines()}
    assert names == {path.name for path in (tmp_path / "built").iterdir()}
    assert {prebuilt_name(isa) for isa in usable_isas()} <= names
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX")
    reports: list[str] = []
    assert isinstance(select_kernels(CPU, None, reports.append, tmp_path / "built"), CpuKernels)
    assert not reports


def test_the_command_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == 2
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main([str(tmp_path)]) == 1
    assert "no C++ compiler (no-such-compiler)" in capsys.readouterr().err


def test_building_needs_no_torch() -> None:
    code = "import sys, pagemill_kernels.cpu.build, pagemill_kernels.cpu.cached; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_instruction_sets_are_chosen_by_what_the_system_says(tmp_path: Path) -> None:
    avx2 = {"avx2", "fma", "f16c", "sse2"}
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    assert [isa.name for isa in usable_isas("x86_64", avx2)] == ["avx2"]
    assert [isa.name for isa in usable_isas("x86_64", avx512 - {"fma"})] == []
    assert [isa.name for isa in usable_isas("x86_64", avx512 | {"avx512_vnni"})] == ["avx512vnni", "avx512", "avx2"]
    assert [isa.name for isa in usable_isas("aarch64", {"asimd"})] == ["neon"]
    assert usable_isas("riscv64", {"v"}) == ()
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert cpu_features(cpuinfo) == {"fp", "asimd"}
    assert cpu_features(tmp_path / "none") == frozenset()


def test_no_library_is_built_for_the_building_machine() -> None:
    for machine in ("x86_64", "aarch64"):
        assert not any("native" in flag for isa in isas(machine) for flag in (*isa.flags, *build.FLAGS))
