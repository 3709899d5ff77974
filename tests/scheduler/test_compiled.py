"""Which form of the core is imported. That both forms work, the other tests show: they run with the one that is there,
and here those that only one of them can run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pagemill_scheduler.core  # noqa: F401  (whether it runs compiled is known once it is imported)
from pagemill_scheduler import build, compiled

HERE = Path(__file__).parent
OFF = {compiled.SWITCH: "false"}
IMPORT_EACH = """
import importlib, os, sys
import pagemill_shared.messages, pagemill_shared.numbering
for name in sys.argv[1:]:
    if not (child := os.fork()):
        assert importlib.import_module(f"pagemill_scheduler.{name}").__file__.endswith(".so")
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{name} cannot be imported first")
"""
TEST_THE_CODEC = """
import sys
import pagemill_scheduler
import pytest
if code := pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]):
    sys.exit(int(code))
print(sys.modules["pagemill_shared.codec"].__file__)
"""


def python(*arguments: str | Path, **environment: str) -> str:
    """What a new Python prints."""
    inherited = {name: value for name, value in os.environ.items() if name != compiled.SWITCH}
    done = subprocess.run(
        [sys.executable, "-P", *arguments], env=inherited | environment, capture_output=True, text=True, timeout=3000
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the packages."""
    for package in (compiled.SOURCES, compiled.SHARED):
        shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__", "_compiled"))
    return tmp_path


def folder_in_use(tree: Path, **environment: str) -> str:
    """The first folder that modules of the copied package are taken from."""
    script = "import pagemill_scheduler; print(pagemill_scheduler.__path__[0])"
    return python("-c", script, PYTHONPATH=str(tree), **environment).strip()


@pytest.mark.parametrize("changed", ["pagemill_scheduler/core.py", "pagemill_shared/schema.py"])
def test_a_build_is_used_until_a_source_changes(tree: Path, changed: str) -> None:
    package = tree / compiled.SOURCES.name
    assert folder_in_use(tree) == str(package)
    built = package / "_compiled" / compiled.build_folder().name
    built.mkdir(parents=True)
    assert folder_in_use(tree) == str(built / package.name)
    with (tree / changed).open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert folder_in_use(tree) == str(package)


@pytest.mark.parametrize("value", ["false", "0", "False"])
def test_it_can_be_switched_off(tree: Path, value: str) -> None:
    package = tree / compiled.SOURCES.name
    built = package / "_compiled" / compiled.build_folder().name
    built.mkdir(parents=True)
    assert folder_in_use(tree, **{compiled.SWITCH: value}) == str(package)
    assert folder_in_use(tree, **{compiled.SWITCH: ""}) == str(built / package.name)


def test_a_build_for_another_python_is_not_used(tree: Path) -> None:
    package = tree / compiled.SOURCES.name
    other = compiled.build_folder().name.replace(compiled.python_tag(), "cpython-310-x86_64-linux-gnu")
    (package / "_compiled" / other).mkdir(parents=True)
    assert folder_in_use(tree) == str(package)


needs_build = pytest.mark.skipif(
    not compiled.build_folder().is_dir(), reason="these sources are not compiled (make compile)"
)


@needs_build
def test_what_was_compiled_runs_unless_switched_off() -> None:
    script = "import pagemill_scheduler.core; from pagemill_scheduler import compiled; print(compiled.in_use())"
    assert python("-c", script) == "True\n"
    assert python("-c", script, **OFF) == "False\n"


@needs_build
def test_every_module_can_be_imported_first() -> None:
    """They import each other in circles, and a compiled class must exist before another one names it."""
    python("-c", IMPORT_EACH, *(path.stem for path in compiled.sources()))


@needs_build
@pytest.mark.parametrize(("first", "ending"), [("", ".so\n"), ("import pagemill_shared.schema\n", ".py\n")])
def test_the_codec_is_compiled_unless_a_part_of_it_runs_as_python(first: str, ending: str) -> None:
    script = first + "import pagemill_scheduler.core, pagemill_shared.codec; print(pagemill_shared.codec.__file__)"
    assert python("-c", script).endswith(ending)


@needs_build
def test_the_codec_passes_its_tests_compiled() -> None:
    files = [str(HERE.parent / "shared" / f"test_{name}.py") for name in ("codec", "numbering", "records")]
    assert python("-c", TEST_THE_CODEC, *files).endswith(".so\n")


@pytest.mark.skipif(not compiled.in_use(), reason="nothing was skipped for being compiled")
def test_what_replaces_functions_of_the_core_passes_on_plain_python() -> None:
    files = [HERE / "test_fresh.py", HERE / "test_prefix_names.py"]
    assert "skipped" not in python("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, **OFF)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.skipif(not compiled.in_use(), reason="it has run as plain Python already")
def test_the_long_run_of_random_events_passes_on_plain_python() -> None:
    python("-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / "test_memory_machine.py", "-m", "full", **OFF)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_sources_compile(tmp_path: Path) -> None:
    folder = build.build(tmp_path)
    assert list(tmp_path.iterdir()) == [folder] == [compiled.build_folder(tmp_path)]
    assert modules(folder / compiled.SOURCES.name) == {path.stem for path in compiled.sources()} | {"_core__mypyc"}
    assert modules(folder / compiled.SHARED.name) == {*compiled.WIRE, "_wire__mypyc"}


def modules(folder: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in folder.iterdir()}


def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(build, "BUILDS", tmp_path)
    assert build.main([]) == 1
    assert capsys.readouterr().err.endswith("will run as Python: mypyc is not installed\n")
    assert list(tmp_path.iterdir()) == []
