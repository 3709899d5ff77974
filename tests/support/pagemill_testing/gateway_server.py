"""A whole gateway in a thread of the test: real HTTP on a free port, a real socket to the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

from pagemill_gateway import grammar_checker
from pagemill_gateway.app import bind, serve
from pagemill_shared.messages import FleetStatus
from pagemill_shared.settings import GatewaySettings
from pagemill_testing.prepared_models import FINGERPRINT, write_prepared_model
from pagemill_testing.sockets import PATIENCE, ipc_folder
from pagemill_testing.stub_scheduler import StubScheduler


@dataclass
class Stage:
    """A gateway that is ready, and the scheduler that it talks to."""

    folder: Path
    stub: StubScheduler
    gateway: GatewayServer

    @property
    def client(self) -> httpx.Client:
        return self.gateway.client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream; the last line must be [DONE] and is left out."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = sse_events(response.text)
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]


def sse_events(text: str) -> list[str]:
    """The data of each server-sent event."""
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line.removeprefix("data: ") for line in lines]


FLEET = FleetStatus(1, 2048, 2**31 - 1, FINGERPRINT)


@contextmanager
def stage(model: dict[str, Any] | None = None, fleet: FleetStatus = FLEET, **settings: Any) -> Iterator[Stage]:
    """A stub scheduler and a gateway in front of it.

    Args:
        model: arguments of ``write_prepared_model``.
        settings: of the gateway.
    """
    with ipc_folder() as folder:
        write_prepared_model(folder, **(model or {}))
        endpoint = f"ipc://{folder}/s"
        with StubScheduler(endpoint, fleet) as stub, GatewayServer(folder, endpoint, **settings) as gateway:
            gateway.until("/ready", 200)
            yield Stage(folder, stub, gateway)


class GatewayServer:
    """Serves while it is used as a context; ``client`` talks to it. Meanwhile no check of a grammar is
    too slow; a test that wants to see the limit sets it then."""

    def __init__(self, cache_dir: Path, endpoint: str, **settings: Any) -> None:
        defaults = {
            "port": 0,
            "frontend": endpoint,
            "cache_dir": cache_dir,
            "heartbeat_interval": 0.1,
            "peer_timeout": PATIENCE,  # a stub that stands still for a moment is not lost
            "shutdown_grace": 1.0,
        }
        self.settings = GatewaySettings(**(defaults | settings))
        self.exit_status: int | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._started = threading.Event()
        self._patience = mock.patch.object(grammar_checker, "MAX_CHECK_S", PATIENCE)

    def __enter__(self) -> GatewayServer:
        self._patience.start()
        self.listener = bind(self.settings.host, self.settings.port)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread.start()
        assert self._started.wait(PATIENCE)
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.stop()
        self._thread.join(PATIENCE)
        self.listener.close()
        self._patience.stop()
        assert not self._thread.is_alive(), "the gateway did not stop"
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """What SIGTERM does."""
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._stop.set)

    def join(self) -> None:
        self._thread.join(PATIENCE)

    def until(self, path: str, status: int, timeout: float = PATIENCE) -> httpx.Response:
        """Asks ``path`` until it answers with ``status``."""
        deadline = time.monotonic() + timeout
        while True:
            response = None
            with contextlib.suppress(httpx.TransportError):
                response = self.client.get(path)
            if response is not None and response.status_code == status:
                return response
            assert time.monotonic() < deadline, response and (response.status_code, response.text)
            time.sleep(0.01)

    def _run(self) -> None:
        async def main() -> int:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            self._started.set()
            return await serve(self.settings, self.listener, self._stop)

        try:
            self.exit_status = asyncio.run(main())
        except BaseException as error:
            self.error = error


def stream_error(text: str) -> dict[str, Any]:
    """The error in the last event of a stream."""
    error: dict[str, Any] = json.loads(sse_events(text)[-1])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
