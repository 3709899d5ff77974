"""Clients that go away, at any moment and in any number: every block is free again, and nobody else notices."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pagemill_testing.http_calls import Call
from pagemill_testing.live_server import ServeCommand
from pagemill_testing.program import until
from pagemill_testing.sockets import python

pytestmark = pytest.mark.timeout(300)

PROMPT = "Once upon a time"
LONG_PROMPT = [300 + i % 1000 for i in range(3000)]
CLIENT = """
import json, socket, sys
host, port, streams = sys.argv[1].rpartition(":")[0], int(sys.argv[1].rpartition(":")[2]), int(sys.argv[2])
body = json.dumps({"prompt": "Once upon a time", "max_tokens": 500, "ignore_eos": True, "stream": True}).encode()
head = "POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Type: application/json\\r\\n"
head += f"Content-Length: {len(body)}\\r\\n\\r\\n"
connections = [socket.create_connection((host, port)) for _ in range(streams)]
for connection in connections:
    connection.sendall(head.encode() + body)
print("sent", flush=True)
for connection in connections:
    connection.recv(1)
print("streaming", flush=True)
sys.stdin.read()
"""


def dropped(server: ServeCommand, call: Call) -> None:
    server.drop(call)
    until(lambda: call.done, "the client has gone")


@pytest.mark.parametrize("stream", [False, True])
def test_in_prefill(server: ServeCommand, stream: bool) -> None:
    aborted = server.counter("requests_aborted_total")

    def in_prefill(state: dict[str, Any]) -> bool:
        return any(r["status"] == "running" and r["output_tokens"] == 0 for r in state["requests"])

    with server.worker_held():
        call = server.start(prompt=LONG_PROMPT, max_tokens=50, stream=stream, request_id="leaver")
        state = server.until_state(in_prefill, "the prompt is being computed")
        assert state["workers"][0]["blocks"]["used"] > 0
        dropped(server, call)
        server.until(lambda: server.request("leaver") is None, "the request is gone")
    server.until_idle()
    assert server.counter("requests_aborted_total") == aborted + 1


@pytest.mark.parametrize("stream", [False, True])
def test_while_decoding(server: ServeCommand, stream: bool) -> None:
    aborted = server.counter("requests_aborted_total")
    other = server.stream(prompt="The capital of France is", max_tokens=40, ignore_eos=True)
    call = server.start(prompt=PROMPT, max_tokens=4000, ignore_eos=True, stream=stream, request_id="leaver")

    def decoding(state: dict[str, Any]) -> bool:
        return any(r["request_id"] == "leaver" and r["output_tokens"] >= 3 for r in state["requests"])

    server.until_state(decoding, "some tokens have been generated")
    dropped(server, call)
    server.until_state(lambda s: not any(r["request_id"] == "leaver" for r in s["requests"]), "the request is gone")
    assert len(other.succeeded().token_ids) == 40
    server.until_idle()
    assert server.counter("requests_aborted_total") == aborted + 1


def test_before_the_request_is_complete(server: ServeCommand) -> None:
    submitted = server.counter("prompt_tokens_total")
    with python(CLIENT.replace("head.encode() + body", "head.encode() + body[:10]"), server.url[7:], "4") as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "sent\n"
        server.assert_alive()
    server.until_idle()
    assert server.counter("prompt_tokens_total") < submitted + 100


def test_all_at_once_leave_no_trace_in_the_metrics(server: ServeCommand) -> None:
    calls = [server.stream(prompt=f"{PROMPT} {number}", max_tokens=1000, ignore_eos=True) for number in range(16)]
    for call in calls:
        call.until_tokens(1)
    assert metric(server, "num_requests_running") == 16
    assert metric(server, "kv_cache_usage_perc") > 0
    for call in calls:
        server.drop(call)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    server.until(lambda: [metric(server, name) for name in names] == [0, 0, 0], "the gauges are at their idle level")
    server.until_idle()


def test_killed_clients_use_up_no_place(server: ServeCommand) -> None:
    for _ in range(4):
        with python(CLIENT, server.url[7:], "32") as client:
            assert client.stdout is not None
            assert [client.stdout.readline() for _ in range(2)] == ["sent\n", "streaming\n"]
            client.kill()
        server.assert_alive()
    server.until_idle()


def metric(server: ServeCommand, name: str) -> float:
    match = re.search(rf"^pagemill:{name}(?:{{.*}})? (\S+)$", server.get("/metrics").text, re.MULTILINE)
    assert match is not None, name
    return float(match[1])
