"""One HTTP request and its response, on raw ASGI: as little as possible lies between a token and the socket."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from pagemill_gateway.errors import ApiError, Headers
from pagemill_gateway.keys import Key
from pagemill_gateway.request_ids import is_request_id

ABORT_EXTENSION = "pagemill.abort"
"""ASGI extension: ``abort`` is a callable that drops the connection at once, with what its client has not read."""

_JSON = (b"content-type", b"application/json")
_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGoneError(Exception):
    """The client closed its connection before its request was complete."""


class Exchange:
    """Reads one request, writes one response.

    Attributes:
        request_id: the client's ``X-Request-Id``, or a new one; sent back with every response.
        started: whether the status line has been sent.
        key: what it came in with, None where none is needed.
        began: when it came, monotonic.
        timeout: seconds that the answer may take from then on, None for as long as it takes.
        extra_headers: that every response to it carries.
    """

    __slots__ = (
        "_body_wanted",
        "_receive",
        "_send",
        "began",
        "extra_headers",
        "key",
        "request_id",
        "scope",
        "started",
        "timeout",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.request_id = _given_request_id(scope) or uuid.uuid4().hex
        self.started = False
        self.key: Key | None = None
        self.began = time.monotonic()
        self.timeout: float | None = None
        self.extra_headers: Headers = []
        self._body_wanted = False
        self._receive = receive
        self._send = send

    async def read_body(self, limit: int) -> bytes:
        """The whole body.

        Raises:
            ApiError: 413, it is longer than ``limit`` bytes; 415, it is compressed.
            ClientGoneError: the client went before it was all here.
        """
        encoding = self.header(b"content-encoding") or b"identity"
        if encoding.strip().lower() not in (b"identity", b""):
            raise ApiError(
                415,
                f"Content-Encoding {encoding.decode('latin-1')!r:.40} is not supported: send the body as it is",
                code="unsupported_encoding",
                headers={"Accept-Encoding": "identity"},
            )
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        self._body_wanted = True
        parts: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            body = message.get("body", b"")
            size += len(body)
            if size > limit:
                raise _too_large(limit)
            parts.append(body)
            more = message.get("more_body", False)
        return b"".join(parts)

    async def disconnected(self) -> None:
        """Returns when the client closes its connection. Only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def header(self, name: bytes) -> bytes | None:
        """The first header called ``name``, in lower case."""
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    async def send_json(self, value: Any) -> None:
        await self.send_json_text(json_text(value))

    async def send_json_text(self, body: bytes) -> None:
        """A JSON object that is encoded already."""
        await self.send_bytes(body, 200, None, [_JSON])

    async def send_error(self, error: ApiError) -> None:
        """The error as a response.

        What is left of the body is dropped as it comes: a connection that were closed before its client has sent it all
        would be reset, and the response lost. But a client that waits for a word before it sends its body may send it
        or not, so nobody knows what would come next on its connection.
        """
        closing = {"Connection": "close"} if self._client_waits else {}
        await self.send_bytes(error.encoded(), error.status, {**error.headers, **closing}, [_JSON])

    @property
    def _client_waits(self) -> bool:
        return not self._body_wanted and (self.header(b"expect") or b"").lower() == b"100-continue"

    async def send_bytes(self, body: bytes, status: int, headers: dict[str, str] | None, content_type: Headers) -> None:
        given = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*content_type, length, *given])
        await self._send({"type": "http.response.body", "body": body})

    async def start_stream(self) -> None:
        await self._start(200, _STREAM)

    async def write(self, body: bytes) -> None:
        """Hands over a part of the stream; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end_stream(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body})

    def drop(self) -> None:
        """Ends the connection at once, without waiting for the client to read."""
        extension: dict[str, Callable[[], None]] = self.scope.get("extensions", {}).get(ABORT_EXTENSION, {})
        if "abort" in extension:
            extension["abort"]()

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        request_id = (b"x-request-id", self.request_id.encode("ascii"))
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*headers, request_id, *self.extra_headers]}
        )


def json_text(value: Any) -> bytes:
    """``value`` as JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def _given_request_id(scope: Scope) -> str | None:
    for key, value in scope["headers"]:
        if key == b"x-request-id":
            text = value.decode("latin-1")
            return text if is_request_id(text) else None
    return None


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes", code="request_too_large")
