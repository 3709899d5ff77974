"""The whole server, end to end: `pagemill serve` over a random 1B-shaped model, many requests at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from gpu_check.shapes import LLAMA_1B, Shape, write_folder
from gpu_check.table import Row

READY_SECONDS, REQUEST_SECONDS = 120, 120
PROMPT, OUTPUT = 128, 128
CONCURRENCIES = (1, 64)


class Server:
    """`pagemill serve`, and requests to it."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        with socket.socket() as probe:  # free now; nobody else binds ports in between on a machine for this check
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "server.log"
        command = [sys.executable, "-P", "-m", "pagemill", "serve", str(model), "--port", str(port), *flags]
        environment = os.environ | {"PAGEMILL_CACHE_DIR": str(folder / "cache")}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def wait_until_ready(self) -> float:
        """Seconds until it answers that it is ready."""
        begun = time.monotonic()
        while time.monotonic() - begun < READY_SECONDS:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/ready", timeout=5):
                    return time.monotonic() - begun
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError(f"the server is not ready; it last said: {self._log.read_text()[-600:]}")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=REQUEST_SECONDS) as answer:
            return json.load(answer)

    def complete(self, prompt: list[int], tokens: int) -> int:
        """Tokens that came."""
        body = {"model": self.get("/v1/models")["data"][0]["id"], "prompt": prompt, "max_tokens": tokens}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body | {"temperature": 0, "ignore_eos": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
            return int(json.load(answer)["usage"]["completion_tokens"])

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def made_up(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Prompts, no two of which begin alike."""
    words = vocab_size - 3  # ids 0 to 2 are special
    return [[3 + (n * 7919 + i * 31 + i * i) % words for i in range(length)] for n in range(count)]


def cases(shape: Shape, quick: bool) -> list[tuple[str, list[list[int]], int]]:
    """What each is called, its prompts, which come at once, and the tokens asked for."""
    prompt, output = (16, 8) if quick else (PROMPT, OUTPUT)
    return [
        (f"{shape.name}, {n} at once, {prompt} in, {output} out", made_up(n, prompt, shape.vocab_size), output)
        for n in CONCURRENCIES
    ]


def throughput(server: Server, prompts: list[list[int]], output: int) -> float:
    """Output tokens per second of ``prompts`` at once."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        came = list(pool.map(lambda ids: server.complete(ids, output), prompts))
    seconds = time.perf_counter() - begun
    if came != [output] * len(prompts):
        raise RuntimeError(f"asked for {output} tokens each, got {sorted(set(came))}")
    return sum(came) / seconds


def measure(device: torch.device, quick: bool, shape: Shape = LLAMA_1B, flags: tuple[str, ...] = ()) -> Iterator[Row]:
    """With CUDA graphs and, unless ``quick``, without."""
    kinds: tuple[tuple[str, tuple[str, ...]], ...] = (("server", ()), ("server, no graphs", ("--no-cuda-graphs",)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_folder(shape, folder / "model", device)
        torch.cuda.empty_cache()
        flags = ("--device", device.type, *(flags or ("--max-model-len", "8192")))
        for kind, more in kinds[:1] if quick else kinds:
            server = Server(model, folder, *flags, *more)
            try:
                yield Row(f"{kind}, until ready", shape.name, server.wait_until_ready(), "s")
                made = cases(shape, quick)
                throughput(server, *made[0][1:])  # compiles what has not run yet
                for case, prompts, output in made:
                    rate = throughput(server, prompts, output)
                    yield Row(f"{kind}, output", case, rate, "tokens/s", note=_kernels(server))
            finally:
                server.close()


def _kernels(server: Server) -> str:
    """Which kernels its workers run."""
    try:
        workers = server.get("/v1/pagemill/state").get("workers", [])
    except urllib.error.HTTPError:
        return ""
    return ", ".join(sorted({str(worker.get("kernels", "")) for worker in workers if isinstance(worker, dict)}))
