"""The health check script against real sockets of this machine."""

from __future__ import annotations

import http.server
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "healthcheck.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")


def check(*arguments: object) -> int:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], stderr=subprocess.DEVNULL).returncode


def taken() -> socket.socket:
    """A socket that keeps a port, and does not listen there."""
    keeper = socket.socket()
    keeper.bind(("127.0.0.1", 0))
    return keeper


def test_listening_means_every_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two, taken() as three:
        ports = [server.getsockname()[1] for server in (one, two)]
        assert check("listening", *ports) == 0
        assert check("listening", ports[0], three.getsockname()[1]) == 1
        assert check("listening", three.getsockname()[1]) == 1


def test_connected_means_a_connection_to_the_remote_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert check("connected", port) == 1
        with socket.create_connection(("127.0.0.1", port)):
            assert check("connected", port) == 0


def test_http_means_an_answer_with_status_200() -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/good" else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            assert check("http", port, "/good") == 0
            assert check("http", port, "/bad") == 1
        finally:
            server.shutdown()
            thread.join()
    with taken() as deaf:
        assert check("http", deaf.getsockname()[1], "/good") == 1


def test_an_unknown_question_is_not_healthy() -> None:
    assert check("nonsense") == 1
