"""A client that reads what it wants, when it wants."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

from pagemill_testing.sockets import PATIENCE


class RawClient:
    """A client over a bare socket, which reads only when told to."""

    def __init__(self, port: int, receive_buffer: int | None = None, **body: Any) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(("127.0.0.1", port))
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
        self.socket.sendall(head.encode() + data)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def read_until(self, text: str) -> None:
        """Reads a stream until its pieces, however many events they came in, hold ``text``, and the last is whole."""
        data = b""
        while not data.endswith(b"\n\n\r\n") or text not in "".join(re.findall(r'"text": ?"([^"]*)"', data.decode())):
            part = self.socket.recv(65536)
            assert part, data
            data += part

    def read_all(self) -> bytes:
        data = b""
        while part := self.socket.recv(1 << 20):
            data += part
        return data
