"""HTTP requests in the background: any number open at once, each can be watched, waited for, or dropped."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from concurrent.futures import Future
from typing import Any

import httpx

from pagemill_testing.program import until


class Call:
    """One request and what has come of it so far. Fields grow in the background; the test only reads them.

    Attributes:
        status: of the response, None before it has begun.
        chunks: what has come: the events of a stream, or the one JSON answer.
        order: for each chunk its place among all chunks of all calls of one Caller.
        error: the error object of an error response or of an error event.
        failure: what broke the connection, if anything did.
        complete: a stream has ended with [DONE], or the answer is there.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.chunks: list[dict[str, Any]] = []
        self.order: list[int] = []
        self.error: dict[str, Any] | None = None
        self.failure: Exception | None = None
        self.complete = False
        self.future: Future[None] | None = None

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        return self.future is not None and self.future.done()

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]

    @property
    def text(self) -> str:
        return self.text_of(0)

    def text_of(self, index: int) -> str:
        parts = self.choices(index)
        if any("text" in part for part in parts):
            return "".join(part["text"] for part in parts)
        return "".join((part["delta"] if "delta" in part else part["message"]).get("content") or "" for part in parts)

    @property
    def token_ids(self) -> list[int]:
        """Output tokens, if the request asked for ``return_token_ids``."""
        return self.token_ids_of(0)

    def token_ids_of(self, index: int) -> list[int]:
        return [token for part in self.choices(index) for token in part.get("token_ids", ())]

    @property
    def finish_reason(self) -> str | None:
        reasons = [part["finish_reason"] for part in self.choices() if part["finish_reason"]]
        assert len(reasons) < 2, reasons
        return reasons[0] if reasons else None

    @property
    def usage(self) -> dict[str, int]:
        return next(chunk["usage"] for chunk in reversed(self.chunks) if chunk.get("usage"))

    def until_tokens(self, count: int) -> None:
        """Waits until so many output tokens have come."""
        until(lambda: len(self.token_ids) >= count or self.done, f"{count} tokens of a stream")
        assert len(self.token_ids) >= count, self.describe()

    def until_done(self) -> None:
        until(lambda: self.done, "the end of a request")

    def succeeded(self) -> Call:
        """Waits for the end, which must be a good one."""
        self.until_done()
        assert self.complete, self.describe()
        return self

    def describe(self) -> str:
        return f"status {self.status}, {len(self.chunks)} chunks, error {self.error}, failure {self.failure!r}"


class Caller:
    """Sends requests to one server, from an event loop in a thread of its own."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(
            base_url=url, timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None)
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="caller", daemon=True)
        self._thread.start()
        self._calls: list[Call] = []
        self._order = itertools.count()

    def start(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Call:
        call = Call(body)
        self._calls.append(call)
        call.future = asyncio.run_coroutine_threadsafe(self._run(call, path, headers or {}), self._loop)
        return call

    def drop(self, call: Call) -> None:
        """Closes the connection, as a client does that goes away."""
        assert call.future is not None
        call.future.cancel()

    def drop_all(self) -> None:
        for call in self._calls:
            self.drop(call)

    def close(self) -> None:
        self.drop_all()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    async def _run(self, call: Call, path: str, headers: dict[str, str]) -> None:
        try:
            async with self._client.stream("POST", path, json=call.body, headers=headers) as response:
                call.headers = dict(response.headers)
                call.status = response.status_code
                if response.headers["content-type"].startswith("text/event-stream"):
                    await self._read_events(call, response)
                else:
                    answer = json.loads(await response.aread())
                    if "error" in answer:
                        call.error = answer["error"]
                    else:
                        self._add(call, answer)
                        call.complete = True
        except httpx.TransportError as error:
            call.failure = error

    async def _read_events(self, call: Call, response: httpx.Response) -> None:
        async for line in response.aiter_lines():
            if not line:
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                call.complete = True
                continue
            event = json.loads(data)
            if "error" in event:
                call.error = event["error"]
            else:
                self._add(call, event)

    def _add(self, call: Call, chunk: dict[str, Any]) -> None:
        call.order.append(next(self._order))
        call.chunks.append(chunk)
