"""The command line as a person meets it: help, versions, and faults as one line with exit status 2."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagemill.configuration import ALL_SETTINGS
from pagemill.fields import setting_fields
from pagemill.main import main
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.settings import (
    ChatSettings,
    GatewaySettings,
    PrepareSettings,
    RunBatchSettings,
    SchedulerSettings,
    ServeSettings,
    WorkerSettings,
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in {field for cls in ALL_SETTINGS for field in setting_fields(cls)}:
        monkeypatch.delenv(field.variable, raising=False)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for a service's module: keeps the settings that its ``run`` was given, and ends with ``status``."""
    stub = SimpleNamespace(status=0, settings=None, error=None, module=None)

    def run(settings: Any) -> int:
        stub.settings = settings
        if stub.error:
            raise stub.error
        return int(stub.status)

    stub.run = run
    real = importlib.import_module

    def load(name: str, package: str | None = None) -> Any:
        if name.endswith(".app"):
            stub.module = name
            return stub
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", load)
    return stub


@pytest.mark.parametrize(
    ("command", "cls"), [("gateway", GatewaySettings), ("scheduler", SchedulerSettings), ("worker", WorkerSettings)]
)
def test_a_command_runs_its_part_with_its_settings(command: str, cls: type[Any], app: SimpleNamespace) -> None:
    app.status = 5
    assert main([command, "--log-level", "debug"]) == 5
    assert app.module == f"pagemill_{command}.app"
    assert app.settings == cls(log_level="debug")


def test_the_model_is_an_argument(app: SimpleNamespace) -> None:
    assert main(["worker", "some/model", "--dtype", "float32"]) == 0
    assert (app.settings.model, app.settings.dtype) == ("some/model", "float32")


def test_switches_go_both_ways(app: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_CHECK_INVARIANTS", "true")
    main(["scheduler"])
    assert app.settings.check_invariants
    main(["scheduler", "--no-check-invariants"])
    assert not app.settings.check_invariants


def test_the_last_of_a_repeated_flag_counts(app: SimpleNamespace) -> None:
    main(["gateway", "--port", "1", "--port", "2"])
    assert app.settings.port == 2


def test_openmp_is_told_before_the_worker_is_loaded(app: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    seen = {}
    load = importlib.import_module

    def watch(name: str, package: str | None = None) -> Any:
        seen[name] = os.environ.get("OMP_WAIT_POLICY")
        return load(name, package)

    monkeypatch.setattr(importlib, "import_module", watch)
    main(["worker"])
    assert seen["pagemill_worker.app"] == "PASSIVE"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["gateway", "--port", "70000"], "pagemill gateway: --port: '70000' is not allowed; allowed: whole number,"),
        (["gateway", "--prot", "1"], "pagemill gateway: No such option '--prot'."),
        (["gateway", "--port"], "pagemill gateway: Option '--port' requires an argument."),
        (["worker", "--dtype", "int4"], "pagemill worker: --dtype: 'int4' is not allowed; allowed: auto, float32,"),
        (["worker", "a", "b"], "pagemill worker: Got unexpected extra argument (b)"),
        (["scheduler", "--block-size", "16"], "pagemill scheduler: No such option '--block-size'."),
        (["serve", "--frontend", "ipc:///tmp/x"], "pagemill serve: No such option '--frontend'."),
        (["serve", "--workers", "0"], "pagemill serve: --workers: '0' is not allowed; allowed: whole number, 1 to 64"),
        (["run-batch"], "pagemill run-batch: Missing argument 'FILE.jsonl'."),
        (["run-batch", "no-such-file"], "pagemill run-batch: no-such-file: No such file or directory"),
        (["run-batch", "x", "--concurrency", "0"], "pagemill run-batch: --concurrency: '0' is not allowed;"),
        (["chat", "--url", "nonsense"], "pagemill chat: --url: 'nonsense' is not allowed; allowed: text, matching"),
        (["chat", "hi", "--url", "http://127.0.0.1:9"], "pagemill chat: no server answers at http://127.0.0.1:9 ("),
        (["chat", "--temperature", "hot"], "pagemill chat: Invalid value for '--temperature': 'hot' is not a"),
        (["keys"], "pagemill keys: Missing argument 'FOLDER'."),
        (["srve"], "pagemill: No such command 'srve'."),
        (["--no-such"], "pagemill: No such option '--no-such'."),
    ],
)  # fmt: skip
def test_a_fault_is_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_a_bad_variable_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_WORKER", "3")
    assert main(["serve"]) == 2
    assert (
        capsys.readouterr().err == "pagemill serve: PAGEMILL_WORKER: no such setting; did you mean PAGEMILL_WORKERS?\n"
    )


def test_a_configuration_error_of_a_part_is_one_line(app: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    app.error = ConfigurationError("the model is\n not here")
    assert main(["worker"]) == 2
    assert capsys.readouterr().err == "pagemill worker: the model is not here\n"


def test_a_missing_extra_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, package: str | None = None) -> Any:
        raise ModuleNotFoundError("No module named 'starlette'", name="starlette")

    monkeypatch.setattr(importlib, "import_module", load)
    assert main(["gateway"]) == 2
    assert capsys.readouterr().err == "pagemill gateway: the package starlette is missing; install pagemill[gateway]\n"


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_the_version_is_the_installed_one(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"pagemill {version('pagemill')}\n"


@pytest.mark.parametrize("command", ["serve", "gateway", "scheduler", "worker", "prepare", "chat", "run-batch"])
def test_help_names_every_setting_once_under_its_group(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    cls = {
        "serve": ServeSettings,
        "gateway": GatewaySettings,
        "scheduler": SchedulerSettings,
        "worker": WorkerSettings,
        "prepare": PrepareSettings,
        "chat": ChatSettings,
        "run-batch": RunBatchSettings,
    }[command]
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    sections = {section.partition(":\n")[0]: section for section in out.split("\n\n") if ":\n" in section}
    for field in setting_fields(cls):
        assert f"\n  {field.label}" in sections[field.group]
        assert out.count(f"\n  {field.label} ") == 1
        for choice in field.choices:
            assert choice in sections[field.group]


def test_help_of_the_whole_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in ("serve", "gateway", "scheduler", "worker", "prepare", "chat", "run-batch", "keys", "version"):
        assert f"\n  {command} " in out
    assert main([]) == 2


def test_keys_are_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", str(tmp_path / "keys")]) == 0
    made = {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir() if path.is_file()}
    assert made
    assert main(["keys", str(tmp_path / "keys")]) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir() if path.is_file()} == made
    assert capsys.readouterr().out.splitlines() == [
        f"CURVE keys are written to {tmp_path / 'keys'}",
        f"CURVE keys are already in {tmp_path / 'keys'}",
    ]


def test_keys_that_cannot_be_written_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["keys", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_neither_help_nor_scheduler_nor_gateway_load_torch() -> None:
    code = (
        "import sys, pagemill.main as m; m.main(['serve', '--help']);"
        "import pagemill.serve, pagemill_scheduler.app;"
        "sys.exit(bool({'torch', 'triton', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0
