"""uvicorn's HTTP protocol, which cuts off clients that do not read, and answers in JSON what is not HTTP."""

from __future__ import annotations

import asyncio

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pagemill_gateway.errors import ApiError
from pagemill_gateway.exchange import ABORT_EXTENSION

MAX_SURPLUS_BYTES = 64 * 1024 * 1024
"""What a client may still send of a body when its request has been answered, a refusal of a large one in particular."""
STALLED_CLIENT_S = 30.0
"""A client that has taken nothing of what is written to it for so long is cut off."""


class HttpProtocol(HttpToolsProtocol):
    _watch: asyncio.TimerHandle | None = None
    _unsent = 0
    _surplus = 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete:  # then it was dropped
            self._surplus += len(body)
            if self._surplus > MAX_SURPLUS_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        self._surplus = 0
        super().on_message_begin()
        self.scope["extensions"] = {ABORT_EXTENSION: {"abort": self.transport.abort}}

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_client()

    def resume_writing(self) -> None:
        self._stop_watching()  # it has read
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_client()  # without this a finished response would wait for its reader for ever

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

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

    def _watch_client(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        if self._unsent and self._watch is None:
            self._watch = self.loop.call_later(STALLED_CLIENT_S, self._check_client)

    def _check_client(self) -> None:
        self._watch = None
        if 0 < self._unsent <= self.transport.get_write_buffer_size():
            structlog.get_logger("pagemill.gateway").warning(
                "client does not read: connection dropped", unsent_bytes=self._unsent
            )
            self.transport.abort()
        else:
            self._watch_client()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
