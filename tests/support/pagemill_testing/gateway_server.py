"""A whole gateway in a thread of the test: real HTTP on a free port, a real socket to the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from pagemill_gateway.app import bind, serve
from pagemill_shared.settings import GatewaySettings


class GatewayServer:
    """Serves while it is used as a context; ``client`` talks to it."""

    def __init__(self, cache_dir: Path, endpoint: str, **settings: Any) -> None:
        defaults = {
            "port": 0,
            "frontend": endpoint,
            "cache_dir": cache_dir,
            "heartbeat_interval": 0.1,
            "peer_timeout": 1.0,
            "shutdown_grace": 1.0,
        }
        self.settings = GatewaySettings(**(defaults | settings))
        self.exit_status: int | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._started = threading.Event()

    def __enter__(self) -> GatewayServer:
        self.listener = bind(self.settings.host, self.settings.port)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread.start()
        assert self._started.wait(10)
        self.client = httpx.Client(base_url=self.url, timeout=30)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.stop()
        self._thread.join(20)
        self.listener.close()
        assert not self._thread.is_alive(), "the gateway did not stop"
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """What SIGTERM does."""
        self._loop.call_soon_threadsafe(self._stop.set)

    def join(self) -> None:
        self._thread.join(20)

    def until(self, path: str, status: int, timeout: float = 20.0) -> httpx.Response:
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
