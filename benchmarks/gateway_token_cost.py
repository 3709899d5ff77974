"""What one streamed token costs the gateway in CPU time, over the path that `pagemill serve` runs.

A gateway process stands between a scripted scheduler, which delivers one token per stream and iteration as a scheduler
does, and clients that read server-sent events over TCP. The gateway's own user and system time, from the first
delivery to the last, is divided by the tokens. So it holds everything: reading and checking the message,
detokenization, the event, and the socket.

    python benchmarks/gateway_token_cost.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import uvloop

from pagemill_shared.messages import FinishReason, FleetStatus

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from pagemill_testing.prepared_models import FINGERPRINT, byte_level_bpe, write_prepared_model
from pagemill_testing.scripts import Script
from pagemill_testing.stub_scheduler import StubScheduler
from serving.systems import free_port

_PROMPT = "The quick brown fox"
_GATEWAY = """
import sys
from pathlib import Path
from pagemill_gateway.app import run
from pagemill_shared.settings import GatewaySettings
sys.exit(run(GatewaySettings(port=int(sys.argv[1]), frontend=sys.argv[2], cache_dir=Path(sys.argv[3]),
                             log_level="warning")))
"""
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> tuple[float, float]:
    """User and system time of a process, from its scheduler's own nanoseconds where the kernel shows them."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) / _TICKS, int(fields[12]) / _TICKS


async def read_stream(port: int, path: str, body: dict[str, Any]) -> int:
    """Opens one stream and reads it to its end; how many pieces with text it had."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    data = json.dumps(body).encode()
    writer.write(
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\nconnection: close\r\n\r\n".encode()
        + data
    )
    pieces = 0
    tail = b""
    while chunk := await reader.read(1 << 16):
        chunk = tail + chunk
        pieces += chunk.count(b'"finish_reason":null') - tail.count(b'"finish_reason":null')
        tail = chunk[-24:]
    writer.close()
    if b"[DONE]" not in tail:
        raise SystemExit("a stream ended without [DONE]")
    return pieces


def bench(path: str, streams: int, tokens: int, interval: float, extra: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pm-") as folder:
        cache = Path(folder)
        write_prepared_model(cache)
        text = byte_level_bpe().encode("A stream of text flows on and on, word by word. " * tokens).ids[:tokens]
        fleet = FleetStatus(1, 4096, 700, FINGERPRINT)
        endpoint = f"ipc://{folder}/frontend"
        with StubScheduler(endpoint, fleet, interval=interval) as stub:
            stub.script = Script(text, FinishReason.LENGTH)
            stub.held = True
            port = free_port()
            gateway = subprocess.Popen([sys.executable, "-c", _GATEWAY, str(port), endpoint, folder])
            try:
                wait_ready(port)
                return measure(stub, gateway.pid, port, path, streams, tokens, extra)
            finally:
                gateway.terminate()
                gateway.wait(10)


def measure(
    stub: StubScheduler, pid: int, port: int, path: str, streams: int, tokens: int, extra: dict[str, Any]
) -> dict[str, Any]:
    body: dict[str, Any] = {"stream": True, "max_tokens": tokens} | extra
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": _PROMPT}]
    else:
        body["prompt"] = _PROMPT

    async def run() -> tuple[list[int], float, tuple[float, float], tuple[float, float]]:
        readers = [asyncio.create_task(read_stream(port, path, body)) for _ in range(streams)]
        await asyncio.to_thread(stub.wait_for, lambda: stub.running == streams)
        await asyncio.sleep(1.5)  # the gateway sends the heads of streams that are still silent
        before, began = cpu_seconds(pid), time.perf_counter()
        stub.held = False
        pieces = await asyncio.gather(*readers)
        return pieces, time.perf_counter() - began, before, cpu_seconds(pid)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pieces, wall, before, after = runner.run(run())
    total = streams * tokens
    user, system = ((b - a) / total * 1e6 for a, b in zip(before, after, strict=True))
    return {
        "path": path,
        "options": extra,
        "streams": streams,
        "tokens_per_stream": tokens,
        "pieces_per_token": round(sum(pieces) / total, 3),
        "cpu_us_per_token": round(user + system, 2),
        "user_us": round(user, 2),
        "system_us": round(system, 2),
        "tokens_per_s": round(total / wall),
    }


def first_token(requests: int) -> dict[str, Any]:
    """Time to the first token of one stream at a time when the scheduler answers at once: what the gateway, two
    sockets and this client add to it."""
    with tempfile.TemporaryDirectory(prefix="pm-") as folder:
        write_prepared_model(Path(folder))
        endpoint = f"ipc://{folder}/frontend"
        with StubScheduler(endpoint, FleetStatus(1, 4096, 700, FINGERPRINT)) as stub:
            stub.script = Script(byte_level_bpe().encode("word").ids, FinishReason.LENGTH)
            port = free_port()
            gateway = subprocess.Popen([sys.executable, "-c", _GATEWAY, str(port), endpoint, folder])
            try:
                wait_ready(port)
                times = sorted(_time_one(client, port) for client in [httpx.Client()] for _ in range(requests))
            finally:
                gateway.terminate()
                gateway.wait(10)
    return {
        "requests": requests,
        "ttft_ms_p50": times[len(times) // 2] * 1e3,
        "ttft_ms_p99": times[-len(times) // 100] * 1e3,
    }


def _time_one(client: httpx.Client, port: int) -> float:
    body = {"messages": [{"role": "user", "content": _PROMPT}], "stream": True}
    began = time.perf_counter()
    with client.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as response:
        next(response.iter_raw())
        return time.perf_counter() - began


def wait_ready(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise SystemExit("the gateway did not become ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object, last")
    parser.add_argument("--quick", action="store_true", help="fewer tokens, one case")
    arguments = parser.parse_args()
    tokens = 100 if arguments.quick else 400
    cases: list[tuple[str, int, float, dict[str, Any]]] = [("/v1/chat/completions", 64, 0.02, {})]
    if not arguments.quick:
        cases += [
            ("/v1/chat/completions", 1, 0.005, {}),
            ("/v1/chat/completions", 256, 0.05, {}),
            ("/v1/completions", 64, 0.02, {}),
            ("/v1/chat/completions", 64, 0.02, {"stop": ["fox jumps", "lazy dog"]}),
        ]
    rows = []
    for path, streams, interval, extra in cases:
        row = bench(path, streams, tokens, interval, extra)
        rows.append(row)
        print(
            f"{row['cpu_us_per_token']:7.1f} us/token (user {row['user_us']:.1f}, system {row['system_us']:.1f})  "
            f"{streams:4d} streams  {row['pieces_per_token']:.2f} pieces/token  {path} {extra or ''}",
            flush=True,
        )
    first = first_token(100 if arguments.quick else 500)
    print(f"{first['ttft_ms_p50']:7.2f} ms to the first token (p99 {first['ttft_ms_p99']:.2f}), one stream at a time")
    if arguments.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        print(
            json.dumps({"machine": machine, "python": platform.python_version(), "cases": rows, "first_token": first})
        )


if __name__ == "__main__":
    main()
