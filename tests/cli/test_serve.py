from __future__ import annotations

import contextlib
import json
import socket
import sys
from pathlib import Path

import pytest

from pagemill.main import main
from pagemill.serve import labelled, reserved_port, stages
from pagemill_gateway.app import bind
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.settings import GatewaySettings, SchedulerSettings, ServeSettings, WorkerSettings


def test_the_parts_start_scheduler_first_and_gateway_last(tmp_path: Path) -> None:
    names = [[part.name for part in stage] for stage in stages(ServeSettings(workers=2), tmp_path)]
    assert names == [["scheduler"], ["worker 1", "worker 2"], ["gateway"]]
    assert stages(ServeSettings(), tmp_path)[1][0].name == "worker"


def test_each_part_gets_its_settings_and_the_endpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_CURVE_DIR", "/elsewhere")  # of other commands: `serve` stays on this machine
    settings = ServeSettings(port=9000, max_num_seqs=7, dtype="float32", log_level="debug", api_key="k")
    (scheduler,), (worker,), (gateway,) = stages(settings, tmp_path)
    monkeypatch.delenv("PAGEMILL_CURVE_DIR")
    ends = {"frontend": f"ipc://{tmp_path}/frontend", "backend": f"ipc://{tmp_path}/backend"}
    for part, expected in (
        (scheduler, SchedulerSettings(max_num_seqs=7, log_level="debug", **ends)),
        (worker, WorkerSettings(dtype="float32", log_level="debug", backend=ends["backend"])),
        (gateway, GatewaySettings(port=9000, log_level="debug", api_key="k", frontend=ends["frontend"])),
    ):
        with monkeypatch.context() as inside:
            for name, value in part.environment.items():
                inside.setenv(name, value)
            assert type(expected)() == expected
        assert "k" not in part.command


def test_the_workers_threads_wait_passively_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert stages(ServeSettings(), tmp_path)[1][0].environment["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert stages(ServeSettings(), tmp_path)[1][0].environment["OMP_WAIT_POLICY"] == "ACTIVE"


def test_a_taken_port_is_told_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert (
        capsys.readouterr().err == f"pagemill serve: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
    )


def test_an_address_that_is_not_ours_is_refused() -> None:
    told = pytest.raises(ConfigurationError, match=r"^cannot listen on no\.such\.host\.invalid port 8000: ")
    with told, reserved_port("no.such.host.invalid", 8000):
        pass


def test_lines_of_the_parts_are_labelled_and_json_stays_json() -> None:
    assert labelled("gateway", "it runs", "console") == "gateway   | it runs"
    line = json.dumps({"event": "it runs", "process": "gateway"})
    assert labelled("gateway", line, "json") == line
    assert json.loads(labelled("worker", 'Traceback: "x"', "json")) == {"event": 'Traceback: "x"', "process": "worker"}


def test_port_zero_becomes_a_free_port() -> None:
    with reserved_port("127.0.0.1", 0) as port:
        assert port > 0
        with reserved_port("127.0.0.1", port) as again:
            assert again == port


@pytest.mark.skipif(sys.platform != "linux", reason="the port is only kept on Linux")
def test_the_port_is_kept_for_the_gateway_also_while_it_is_started_again() -> None:
    with reserved_port("127.0.0.1", 0) as port:
        for _ in range(2):
            with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
                other.bind(("127.0.0.1", port))
            with contextlib.closing(bind("127.0.0.1", port)) as listener:
                listener.listen()
                with socket.create_connection(("127.0.0.1", port)):
                    listener.accept()[0].close()
