"""The gateway process: start, stop, and what keeps it from starting."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import site
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagemill_testing.gateway_server import FLEET, GatewayServer, sse_events
from pagemill_testing.prepared_models import byte_level_bpe, write_prepared_model
from pagemill_testing.scripts import Script
from pagemill_testing.sockets import PATIENCE, ipc_folder, wait_until
from pagemill_testing.stub_scheduler import StubScheduler

import pagemill_gateway
import pagemill_shared
from pagemill_gateway.app import run
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.messages import FinishReason
from pagemill_shared.settings import GatewaySettings

TOKENIZER = byte_level_bpe()
PROGRAM = """
import json, sys
from pathlib import Path
from pagemill_gateway.app import run
from pagemill_shared.settings import GatewaySettings
settings = json.loads(sys.argv[1])
settings["cache_dir"] = Path(settings["cache_dir"])
sys.exit(run(GatewaySettings(**settings)))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with ipc_folder() as path:
        yield path


class Process:
    """A gateway process with a stub scheduler, on a port that the system chooses."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        settings |= {"port": 0, "cache_dir": str(folder), "frontend": f"ipc://{folder}/s", "log_format": "json"}
        settings.setdefault("peer_timeout", PATIENCE)
        self.log = folder / "gateway.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "-c", PROGRAM, json.dumps(settings)], stderr=log)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def until_ready(self) -> None:
        self.url = wait_until(self._address, what="a gateway that listens")
        wait_until(lambda: self.status() == 200, what="a gateway that is ready")

    def _address(self) -> str | None:
        assert self.process.poll() is None, self.log.read_text()
        lines = self.log.read_text().split("\n")[:-1]  # what follows the last end of a line is not whole yet
        entries = [json.loads(line) for line in lines if line.startswith("{")]
        return next((str(entry["url"]) for entry in entries if entry["event"] == "listening"), None)

    def status(self, path: str = "/ready") -> int | None:
        try:
            return httpx.get(self.url + path, timeout=PATIENCE).status_code
        except httpx.TransportError:
            return None

    def wait(self) -> int:
        """The exit status."""
        return self.process.wait(PATIENCE)


class Stream:
    """A request that is streamed to a thread."""

    def __init__(self, url: str) -> None:
        self.text = ""
        self._url = url
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def join(self) -> str:
        """All that has come."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self.text

    def _read(self) -> None:
        body = {"prompt": "x", "stream": True}
        with httpx.stream("POST", self._url + "/v1/completions", json=body, timeout=PATIENCE) as response:
            for part in response.iter_text():
                self.text += part


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_streams_finish(folder: Path, number: int) -> None:
    write_prepared_model(folder)
    with StubScheduler(f"ipc://{folder}/s", FLEET) as stub, Process(folder, shutdown_grace=600) as gateway:
        gateway.until_ready()
        stub.script = Script(TOKENIZER.encode("one two three").ids)
        stub.held = True
        streams = [Stream(gateway.url) for _ in range(4)]
        stub.wait_for(lambda: stub.running == 4)
        gateway.process.send_signal(number)
        wait_until(lambda: gateway.status() == 503)
        refused = httpx.post(gateway.url + "/v1/completions", json={"prompt": "x"}, timeout=PATIENCE)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_stopping"
        assert gateway.status("/health") == 200
        stub.held = False
        assert [sse_events(stream.join())[-1] for stream in streams] == ["[DONE]"] * 4
        assert gateway.wait() == 0
        assert not stub.aborted


def test_at_the_end_of_the_grace_streams_end_with_an_error(folder: Path) -> None:
    write_prepared_model(folder)
    with StubScheduler(f"ipc://{folder}/s", FLEET) as stub, Process(folder, shutdown_grace=0.3) as gateway:
        gateway.until_ready()
        stub.script = Script(TOKENIZER.encode("one").ids, FinishReason.NOT_FINISHED)
        stream = Stream(gateway.url)
        wait_until(lambda: "data: " in stream.text)  # before its first token it is answered as any other request
        gateway.process.terminate()
        assert json.loads(sse_events(stream.join())[-1])["error"]["code"] == "server_stopping"
        assert gateway.wait() == 0
        stub.wait_for(lambda: not stub.running)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("output", ["", "one two"])
def test_a_second_signal_ends_at_once_with_an_error(folder: Path, number: int, output: str) -> None:
    write_prepared_model(folder)
    with StubScheduler(f"ipc://{folder}/s", FLEET) as stub, Process(folder, shutdown_grace=600) as gateway:
        gateway.until_ready()
        stub.script = Script(TOKENIZER.encode(output).ids, FinishReason.NOT_FINISHED)
        streams = [Stream(gateway.url) for _ in range(4)]
        stub.wait_for(lambda: stub.running == 4)
        if output:  # before its first token a stream is answered as any other request
            wait_until(lambda: all("data: " in stream.text for stream in streams))
        gateway.process.send_signal(number)
        wait_until(lambda: gateway.status() == 503)
        gateway.process.send_signal(number)
        assert gateway.wait() == 0
        for stream in streams:
            result = stream.join()
            last = sse_events(result)[-1] if output or result.startswith("data: ") else result
            assert json.loads(last)["error"]["code"] == "server_stopping"


def test_it_sleeps_when_nothing_is_to_do(folder: Path) -> None:
    write_prepared_model(folder)
    with StubScheduler(f"ipc://{folder}/s", FLEET), Process(folder) as gateway:
        gateway.until_ready()

        def cpu() -> float:
            fields = Path(f"/proc/{gateway.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        before, began = cpu(), time.monotonic()
        time.sleep(1.0)
        assert (cpu() - before) / (time.monotonic() - began) < 0.2


def test_a_port_in_use(folder: Path) -> None:
    write_prepared_model(folder)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"127.0.0.1 port {port}.*in use"):
            run(GatewaySettings(port=port, cache_dir=folder))


@pytest.mark.parametrize(("settings", "reason"), [({"host": "203.0.113.7"}, "listen"), ({"curve_dir": "none"}, "key")])
def test_settings_that_cannot_be(folder: Path, settings: dict[str, Any], reason: str) -> None:
    write_prepared_model(folder)
    with pytest.raises(ConfigurationError, match=reason):
        run(GatewaySettings(port=0, cache_dir=folder, frontend=f"ipc://{folder}/s", **settings))


def test_a_model_that_is_not_prepared(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="no prepared model"):
        run(GatewaySettings(port=0, cache_dir=folder, frontend=f"ipc://{folder}/s"))


def test_a_model_that_stays_away_too_long(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="no prepared model"):
        run(GatewaySettings(port=0, cache_dir=folder, frontend=f"ipc://{folder}/s", model_wait=0.3))


def test_a_broken_manifest(folder: Path) -> None:
    (write_prepared_model(folder) / "pagemill.json").write_text("{")
    with pytest.raises(ConfigurationError, match="not readable"):
        run(GatewaySettings(port=0, cache_dir=folder, frontend=f"ipc://{folder}/s"))


def test_waiting_for_a_model_that_is_being_prepared(folder: Path) -> None:
    endpoint = f"ipc://{folder}/s"
    with StubScheduler(endpoint, FLEET) as stub, GatewayServer(folder, endpoint, model_wait=60.0) as gateway:
        for path in ("/ready", "/health", "/v1/models"):
            error = gateway.until(path, 503).json()["error"]
            assert error["code"] == "model_loading"
        assert gateway.client.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        assert gateway.client.get("/version").status_code == 200
        write_prepared_model(folder)
        gateway.until("/ready", 200)
        stub.script = Script(TOKENIZER.encode("one").ids)
        assert gateway.client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_stopping_while_the_model_is_awaited(folder: Path) -> None:
    with GatewayServer(folder, f"ipc://{folder}/s", model_wait=600.0) as gateway:
        gateway.until("/ready", 503)
        gateway.stop()
        gateway.join()
        assert gateway.exit_status == 0


def test_a_gateway_without_a_scheduler_serves_its_own_pages(folder: Path) -> None:
    write_prepared_model(folder)
    with GatewayServer(folder, f"ipc://{folder}/s") as gateway:
        error = gateway.until("/ready", 503).json()["error"]
        with contextlib.suppress(AssertionError):
            gateway.until("/v1/models", 200)
        assert error["type"] == "service_unavailable_error"
        assert gateway.client.get("/v1/models").status_code == 200
        assert gateway.client.get("/v1/pagemill/state").status_code == 503
        assert gateway.client.post("/tokenize", json={"prompt": "x"}).status_code == 200


def packages_without(hidden: set[str], view: Path) -> list[str]:
    """A search path with everything that is installed here save ``hidden``; ``view`` becomes part of it."""
    for installed in map(Path, site.getsitepackages()):
        for entry in installed.iterdir():
            name = entry.name.partition("-")[0].partition(".")[0].lower()
            if name not in hidden and entry.suffix != ".pth" and not (view / entry.name).exists():
                (view / entry.name).symlink_to(entry)
    roots = {Path(str(package.__file__)).parent.parent for package in (pagemill_shared, pagemill_gateway)}
    return [str(view), *map(str, roots)]


def test_nothing_of_torch_is_needed(folder: Path) -> None:
    """Loads all of the gateway, and takes a conversation to ids and back, where no torch is installed."""
    write_prepared_model(folder)
    (folder / "view").mkdir()
    path = packages_without({"torch", "triton", "gguf", "functorch", "torchgen"}, folder / "view")
    program = """
import importlib, importlib.util, pkgutil, sys
assert importlib.util.find_spec("torch") is None
import pagemill_gateway
for module in pkgutil.walk_packages(pagemill_gateway.__path__, "pagemill_gateway."):
    importlib.import_module(module.name)
from pathlib import Path
from pagemill_gateway.tokenizer import TextTokenizer
from pagemill_shared.manifest import prepared_folder
tokenizer = TextTokenizer.load(prepared_folder(Path(sys.argv[1]), "bundled"))
ids = tokenizer.encode_chat([{"role": "user", "content": "Hi <|im_end|>"}], add_generation_prompt=True,
                            continue_final_message=False, template_kwargs={})
detokenizer = tokenizer.detokenizer([], skip_special_tokens=False)
text = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
assert "user\\nHi <|im_end|><|im_end|>" in text, text
print("fine")
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.stdout == "fine\n", done.stderr


def test_torch_is_not_imported_where_it_is_installed(folder: Path) -> None:
    program = """
import sys, pagemill_gateway.app
assert not {"torch", "triton"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=110)
