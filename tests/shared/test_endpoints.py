"""What may be bound."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pagemill_shared.endpoints import check_bind, ipc_path
from pagemill_shared.errors import ConfigurationError


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5570", "tcp://127.9.9.9:*", "tcp://localhost:1", "tcp://[::1]:5570", "inproc://x"]
)
def test_endpoints_of_this_machine_may_be_bound(endpoint: str) -> None:
    check_bind(endpoint, authenticated=False, allow_insecure=False)


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5570", "tcp://0.0.0.0:5570", "tcp://[::]:5570", "tcp://eth0:5570", "tcp://10.0.0.1:5570"]
)
def test_endpoints_beyond_need_keys_or_the_operators_word(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="can be reached from other machines") as caught:
        check_bind(endpoint, authenticated=False, allow_insecure=False)
    assert endpoint in str(caught.value)
    assert "\n" not in str(caught.value)
    check_bind(endpoint, authenticated=True, allow_insecure=False)
    check_bind(endpoint, authenticated=False, allow_insecure=True)


@pytest.mark.parametrize("endpoint", ["", "5570", "tcp://", "udp://127.0.0.1:1", "http://127.0.0.1", "127.0.0.1:5570"])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="is not an endpoint"):
        check_bind(endpoint, authenticated=True, allow_insecure=True)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1"])
def test_a_port_is_a_port(address: str) -> None:
    with pytest.raises(ConfigurationError, match="a port is 0 to 65535"):
        check_bind(f"tcp://{address}", authenticated=True, allow_insecure=True)


def test_ipc_needs_its_folder(folder: Path) -> None:
    check_bind(f"ipc://{folder}/socket", authenticated=False, allow_insecure=False)
    with pytest.raises(ConfigurationError, match="is not a folder"):
        check_bind(f"ipc://{folder}/missing/socket", authenticated=False, allow_insecure=False)


def test_ipc_takes_over_a_left_over_socket_but_nothing_else(folder: Path) -> None:
    path = folder / "socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    with pytest.raises(ConfigurationError, match="another process uses it"):
        check_bind(f"ipc://{path}", authenticated=False, allow_insecure=False)
    listener.close()
    check_bind(f"ipc://{path}", authenticated=False, allow_insecure=False)
    (folder / "file").write_text("precious")
    with pytest.raises(ConfigurationError, match="not a socket"):
        check_bind(f"ipc://{folder}/file", authenticated=False, allow_insecure=False)


def test_only_ipc_endpoints_with_a_file_have_a_path() -> None:
    assert ipc_path("ipc:///run/x") == Path("/run/x")
    assert [ipc_path(e) for e in ("ipc://@abstract", "ipc://*", "tcp://127.0.0.1:1", "ipc://")] == [None] * 4
