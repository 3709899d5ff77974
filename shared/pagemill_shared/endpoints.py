"""ZeroMQ endpoints: which ones may be bound, and what stands in their way."""

from __future__ import annotations

import ipaddress
import socket
import stat
from pathlib import Path

from pagemill_shared.errors import ConfigurationError


def ipc_path(endpoint: str) -> Path | None:
    """The socket file of an ``ipc://`` endpoint; None for the other transports and for names without a file."""
    transport, _, address = endpoint.partition("://")
    return Path(address) if transport == "ipc" and address and not address.startswith(("@", "*")) else None


def check_bind(endpoint: str, *, authenticated: bool, allow_insecure: bool) -> None:
    """Refuses what the scheduler must not bind.

    Raises:
        ConfigurationError: an unknown transport, an endpoint beyond this machine without CURVE, or an ipc file that
            is not a socket or that another process answers on (ZeroMQ would silently take it over).
    """
    transport, separator, address = endpoint.partition("://")
    if not separator or not address or transport not in ("tcp", "ipc", "inproc"):
        raise ConfigurationError(f"{endpoint!r} is not an endpoint like tcp://127.0.0.1:5570 or ipc:///run/pagemill/x")
    if transport == "tcp" and not _has_port(address):
        raise ConfigurationError(f"{endpoint} cannot be bound: a port is 0 to 65535, or * for a free one")
    if transport == "tcp" and not (authenticated or allow_insecure or _is_loopback(address)):
        raise ConfigurationError(
            f"{endpoint} can be reached from other machines and has no CURVE keys: "
            "give --curve-dir, bind 127.0.0.1, or say --allow-insecure-bind"
        )
    path = ipc_path(endpoint)
    if path is not None:
        _check_ipc(endpoint, path)


def _has_port(address: str) -> bool:
    port = address.rpartition(":")[2]  # ZeroMQ would take 70000 for 4464
    return port == "*" or (port.isascii() and port.isdigit() and int(port) <= 65535)


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    if host in ("localhost", "lo"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_ipc(endpoint: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigurationError(f"{endpoint} cannot be bound: {path.parent} is not a folder")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(f"{endpoint} cannot be bound: {path} is a file that is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return  # left over by a process that was killed
    raise ConfigurationError(f"{endpoint} cannot be bound: another process uses it")
