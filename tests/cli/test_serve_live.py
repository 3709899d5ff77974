"""`pagemill serve` with the bundled model: three real processes, from the ready line to the last file removed."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from pagemill_testing.processes import children, is_alive, until
from pagemill_testing.run_files import bundled_cache
from pagemill_testing.sockets import ipc_folder

DEADLINE = 180.0

pytestmark = pytest.mark.timeout(300)


class Server:
    """A `pagemill serve` process in a temporary folder of its own."""

    def __init__(self, cache: Path, temporary: Path, *arguments: str) -> None:
        self.temporary = temporary
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
        small = ("--num-kv-blocks", "256", "--num-threads", "1")
        patient = ("--peer-timeout", "20")  # other tests keep the machine busy
        command = ("serve", "--port", "0", "--cache-dir", str(cache), *small, *patient, *arguments)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pagemill", *command],
            env={**environment, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=lambda: self.out.extend(self.process.stdout or [])),
            threading.Thread(target=lambda: self.err.extend(self.process.stderr or [])),
        ]
        for reader in self._readers:
            reader.start()

    def until_ready(self) -> None:
        until(lambda: len(self.out) >= 2 or self.process.poll() is not None, "the ready line is there")
        assert self.process.poll() is None, "".join(self.err)

    @property
    def curl(self) -> list[str]:
        """The words of the example that the ready line shows."""
        return shlex.split(self.out[1])

    @property
    def url(self) -> str:
        return self.curl[1].partition("/v1/")[0]

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=DEADLINE, trust_env=False)

    def ask(self) -> str:
        """What the example request answers."""
        with self.client() as client:
            body = self.curl[self.curl.index("-d") + 1]
            answer = client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def is_ready(self) -> bool:
        try:
            with self.client() as client:
                return client.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def parts(self) -> dict[str, int]:
        """Process ids of the parts, by their command."""
        return {command: pid for pid, command in children(self.process.pid).items()}

    def end(self) -> int:
        status = self.process.wait(DEADLINE)
        for reader in self._readers:
            reader.join()
        return status


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundled_cache(tmp_path_factory)


@pytest.fixture
def serve(cache: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*arguments: str, cache: Path = cache) -> Server:
        servers.append(Server(cache, tmp_path, *arguments))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
        server.end()
        for stream in (server.process.stdout, server.process.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture
def empty_cache() -> Iterator[Path]:
    with ipc_folder() as folder:
        yield folder


def test_the_example_of_the_ready_line_is_answered_and_sigterm_leaves_nothing(
    empty_cache: Path, serve: Callable[..., Server]
) -> None:
    """From a first start, which prepares the model."""
    server = serve("--check-invariants", cache=empty_cache)
    server.until_ready()
    assert re.fullmatch(
        r"pagemill is ready: SmolLM2-135M-Instruct at http://127\.0\.0\.1:\d+ \(Ctrl-C stops it\)\n", server.out[0]
    )
    assert "Paris" in server.ask()
    parts = server.parts()
    assert sorted(parts) == ["gateway", "scheduler", "worker"]
    assert list(server.temporary.iterdir()) != []
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0, "".join(server.err)
    assert not any(is_alive(pid) for pid in parts.values())
    assert list(server.temporary.iterdir()) == []
    assert any(line.startswith("prepare   | ") for line in server.err)
    assert any(line.startswith("worker    | ") for line in server.err)


def test_each_part_may_be_killed_and_comes_back(serve: Callable[..., Server]) -> None:
    server = serve()
    server.until_ready()
    for name in ("worker", "scheduler", "gateway"):
        killed = server.parts()[name]
        os.kill(killed, signal.SIGKILL)
        until(lambda killed=killed, name=name: server.parts().get(name, killed) != killed, f"the {name} is back")
        until(lambda: not_lost(server), f"the server answers after the {name} was killed")
    server.process.send_signal(signal.SIGINT)
    assert server.end() == 0


def not_lost(server: Server) -> bool:
    """Whether a request is answered; right after a kill it may end in an error that says so."""
    try:
        return server.is_ready() and "Paris" in server.ask()
    except (httpx.TransportError, AssertionError):
        return False


def test_open_streams_finish_when_told_to_stop(serve: Callable[..., Server]) -> None:
    server = serve("--shutdown-grace", "60")
    server.until_ready()
    body = {"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True, "stream": True, "temperature": 0}
    lines: list[str] = []
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if not line:
                continue
            lines.append(line)
            if len(lines) == 1:  # once: a second signal would not wait for open streams
                server.process.send_signal(signal.SIGTERM)
    assert lines[-1] == "data: [DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line.removeprefix("data: "))["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    assert server.end() == 0
    assert list(server.temporary.iterdir()) == []


def test_a_second_signal_ends_open_streams_with_an_error(serve: Callable[..., Server]) -> None:
    server = serve("--shutdown-grace", "600")
    server.until_ready()
    body = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    told = False
    last = ""
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if not told:
                server.process.send_signal(signal.SIGINT)
                until(lambda: not server.is_ready(), "the server stops")
                server.process.send_signal(signal.SIGINT)
                told = True
            last = line or last
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_stopping"
    assert server.end() == 130
    assert list(server.temporary.iterdir()) == []


def test_no_part_outlives_a_killed_server_and_the_next_one_tidies_up(serve: Callable[..., Server]) -> None:
    server = serve("--workers", "2")
    server.until_ready()
    parts = children(server.process.pid)
    assert sorted(parts.values()) == ["gateway", "scheduler", "worker", "worker"]
    server.process.kill()
    server.end()
    until(lambda: not any(map(is_alive, parts)), "no part is left")
    (left,) = server.temporary.iterdir()
    after = serve()
    after.until_ready()
    assert left not in after.temporary.iterdir()
    after.process.terminate()
    assert after.end() == 0
    assert list(after.temporary.iterdir()) == []


def test_a_missing_model_is_told_in_one_line(serve: Callable[..., Server]) -> None:
    server = serve("no-such-folder/model.gguf")
    assert server.end() == 2
    assert server.out == []
    assert not any("Traceback" in line for line in server.err)
    assert any("no-such-folder/model.gguf" in line for line in server.err)
    assert list(server.temporary.iterdir()) == []
