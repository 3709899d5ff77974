"""The servers that are compared: how each is started, and what it needs in a request."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

READY_SECONDS = 600.0
CONTEXT = 2048
SEATS = 64
SIZES = ("--max-num-seqs", str(SEATS), "--max-model-len", str(CONTEXT))


@dataclass(frozen=True, slots=True)
class System:
    """
    Attributes:
        command: what starts it on a port of 127.0.0.1.
        body: fields that every request to it carries.
        choices: whether it knows `n`.
        most_output: tokens of an answer that it is asked for at most, where it would take hours otherwise.
        weights: what the model's products are computed with, for the report.
    """

    name: str
    weights: str
    command: Callable[[int], list[str]]
    body: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    choices: bool = True
    most_output: int | None = None


def pagemill(quantization: str = "none", settings: Sequence[str] = SIZES) -> System:
    def command(port: int) -> list[str]:
        serve = [sys.executable, "-P", "-m", "pagemill", "serve", "--port", str(port)]
        return [*serve, "--quantization", quantization, *settings]

    weights = "fp32" if quantization == "none" else quantization
    name = "pagemill" if quantization == "none" else f"pagemill {quantization}"
    return System(name, weights, command, {"ignore_eos": True})


def vllm(python: str, model: Path, eager: bool) -> System:
    def command(port: int) -> list[str]:
        settings = ["--model", str(model), "--served-model-name", "model", "--dtype", "float32", "--port", str(port)]
        settings += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(SEATS), "--disable-log-stats"]
        settings += ["--host", "127.0.0.1", *(["--enforce-eager"] if eager else [])]
        return [python, "-m", "vllm.entrypoints.openai.api_server", *settings]

    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"} | _offline()
    name = "vLLM eager" if eager else "vLLM"
    return System(name, "fp32", command, {"ignore_eos": True, "model": "model"}, environment)


def llama_cpp(server: str, gguf: Path) -> System:
    def command(port: int) -> list[str]:
        settings = ["--model", str(gguf), "--port", str(port), "--host", "127.0.0.1", "--threads", str(os.cpu_count())]
        # Its context is shared out among the seats, unless they share one cache.
        seats = ["--parallel", str(SEATS), "--ctx-size", str(SEATS * 640), "--kv-unified", "--no-webui"]
        return [server, *settings, *seats, "--log-disable"]

    return System("llama.cpp", "Q4_1", command, {"ignore_eos": True}, choices=False)


def transformers(python: str, model: Path, no_token: int) -> System:
    """`transformers serve` with continuous batching. It has no ignore_eos: ``no_token`` is made the end id."""

    def command(port: int) -> list[str]:
        settings = ["--continuous-batching", "--device", "cpu", "--dtype", "float32", "--port", str(port)]
        # It would take most of the machine's memory for its cache, and read all of it.
        settings += ["--cb-block-size", "32", "--cb-num-blocks", str(SEATS * 640 // 32)]
        settings += ["--cb-max-batch-tokens", "1024"]  # of 8,192: its attention mask is as wide
        return [python, "-m", "transformers.cli.transformers", "serve", str(model), *settings, "--host", "127.0.0.1"]

    config = f'{{"eos_token_id": {no_token}, "pad_token_id": 0, "do_sample": false}}'
    body = {"model": str(model), "generation_config": config}
    output = 16  # of 64: where many are at work, each gets about one token per second
    return System(
        f"transformers CB, {output} tokens each", "fp32", command, body, _offline(), choices=False, most_output=output
    )


def _offline() -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


class Running:
    """A started server.

    Attributes:
        ready_s: seconds from its start to the answer to its first request, of one token.
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str, ready_s: float) -> None:
        self._process = psutil.Process(process.pid)
        self.url = url
        self.ready_s = ready_s

    def peak_rss_mb(self) -> float:
        """The sum over its processes of the most memory that each has held (Linux)."""
        total = 0
        for process in [self._process, *self._process.children(recursive=True)]:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            total += next((int(row.split()[1]) for row in status.splitlines() if row.startswith("VmHWM")), 0)
        return total / 1024


@contextmanager
def started(system: System, log: Path) -> Iterator[Running]:
    """Starts it, waits until it answers, and ends it with all its processes.

    SIGTERM then ends this program as SIGINT does, so that no server outlives it.

    Raises:
        SystemExit: it ended before, or did not answer in time; with the end of what it printed.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
    begun = time.perf_counter()
    with log.open("ab") as out:
        process = subprocess.Popen(
            system.command(port),
            env={**inherited, **system.environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while not _answers(url, system.body):
            if process.poll() is not None or time.perf_counter() - begun > READY_SECONDS:
                raise SystemExit(f"{system.name} does not answer:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.05)
        yield Running(process, url, time.perf_counter() - begun)
    finally:
        _end(process)


def _answers(url: str, extra: dict[str, Any]) -> bool:
    body = json.dumps({"prompt": "Hello", "max_tokens": 1, "temperature": 0.0, **extra}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL, to its whole session: a server may leave children behind."""
    for number, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
    process.wait(20.0)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses, for a server that cannot choose one by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
