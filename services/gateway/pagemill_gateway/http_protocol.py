"""uvicorn's HTTP protocol with two additions: a way to drop a connection, and JSON for requests that are not HTTP."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pagemill_gateway.errors import ApiError
from pagemill_gateway.exchange import ABORT_EXTENSION


class HttpProtocol(HttpToolsProtocol):
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT_EXTENSION: {"abort": self.transport.abort}}

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection ends; one whose client never read its last response, without waiting for that."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        body = ApiError(400, "the request is not valid HTTP", code="invalid_http").encoded()
        head = (
            "HTTP/1.1 400 Bad Request\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()
