"""The gateway process: loads the model's text side, serves HTTP, and ends in good order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Literal

import structlog
import uvicorn
import uvloop

from pagemill_gateway.connection import Connection
from pagemill_gateway.defaults import GenerationDefaults
from pagemill_gateway.engine import Engine
from pagemill_gateway.errors import ApiError
from pagemill_gateway.http_protocol import HttpProtocol
from pagemill_gateway.metrics import GatewayMetrics
from pagemill_gateway.server import Gateway, limits_of
from pagemill_gateway.tokenizer import TextTokenizer
from pagemill_gateway.tool_formats import FORMATS, FormatName, ToolFormat
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.logs import configure_logging
from pagemill_shared.manifest import MANIFEST_NAME, prepared_folder, read_manifest
from pagemill_shared.settings import GatewaySettings

_SEND_BUFFER_BYTES = 256 * 1024
"""What the kernel keeps for one client that does not read."""
_LATE_TASKS_S = 1.0
"""What requests that were ended by us get to write their last event."""


def run(settings: GatewaySettings) -> int:
    """Serves until SIGTERM or SIGINT; the exit status.

    Raises:
        ConfigurationError: the port is in use, the model is not there or broken, the endpoint or keys are unusable.
    """
    configure_logging("gateway", settings.log_level, settings.log_format)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # we tell ourselves that we start and stop
    listener = bind(settings.host, settings.port)
    with contextlib.closing(listener), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(settings, listener, asyncio.Event()))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket's ancestor: bound, so that a port in use is noticed before anything is loaded.

    Raises:
        ConfigurationError: the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # connections inherit it
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    return listener


async def serve(settings: GatewaySettings, listener: socket.socket, stop_requested: asyncio.Event) -> int:
    """Serves on ``listener`` until ``stop_requested`` is set, by a signal among others."""
    log = structlog.get_logger("pagemill.gateway")
    gateway = Gateway(settings)
    server = GatewayServer(gateway, stop_requested)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop_requested.wait())
    loading = asyncio.create_task(load_engine(settings))
    host, port = listener.getsockname()[:2]
    try:
        await asyncio.wait({loading, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            gateway.engine = loading.result()
            gateway.engine.connection.open()
            log.info("listening", url=f"http://{host}:{port}", model=gateway.engine.name)
            await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        gateway.stopping = True
        await drain(gateway, settings.shutdown_grace, lambda: server.force_exit)
    finally:
        for task in (loading, stopping):
            task.cancel()
        server.should_exit = True
        await serving
        if gateway.engine is not None:
            gateway.engine.close()
    return 0


async def load_engine(settings: GatewaySettings) -> Engine:
    """Reads the prepared model, waiting for it as long as the settings allow.

    Raises:
        ConfigurationError: it is not there in time, or broken.
    """
    folder = prepared_folder(settings.cache_dir, settings.model)
    deadline = time.monotonic() + settings.model_wait
    if settings.model_wait and not (folder / MANIFEST_NAME).exists():
        structlog.get_logger("pagemill.gateway").info(
            "waiting for the model to be prepared", model=settings.model, folder=str(folder)
        )
    while not (folder / MANIFEST_NAME).exists() and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    manifest = read_manifest(folder)
    loop = asyncio.get_running_loop()
    tokenizer = await loop.run_in_executor(None, TextTokenizer.load, folder, settings.chat_template)
    name = settings.served_model_name or manifest.name
    return Engine(
        name,
        manifest,
        tokenizer,
        GenerationDefaults.load(folder),
        Connection(settings, manifest.fingerprint),
        GatewayMetrics(settings.metrics_prefix, name),
        limits_of(settings),
        settings.trust_request_chat_template,
        tool_format(settings.tool_call_parser, tokenizer),
    )


def tool_format(wanted: Literal["auto"] | FormatName, tokenizer: TextTokenizer) -> ToolFormat:
    """How the model writes function calls: as the operator says, or as its chat template looks."""
    if wanted != "auto":
        return FORMATS[wanted]
    template = tokenizer.chat_template
    return FORMATS["hermes" if template is None else template.format]


async def drain(gateway: Gateway, grace: float, hurry: Callable[[], bool]) -> None:
    """Lets open requests finish for ``grace`` seconds or until ``hurry``, then ends the rest with an error."""
    log = structlog.get_logger("pagemill.gateway")
    if gateway.exchanges:
        log.info("stopping", open_requests=len(gateway.exchanges), grace_s=grace)
    await _until_idle(gateway, grace, hurry)
    engine = gateway.engine
    if engine is None or not gateway.exchanges:
        return
    log.warning("ending requests that did not finish in time", requests=len(engine.open))
    for generation in list(engine.open):
        generation.output.fail(ApiError(503, "the server is stopping", code="server_stopping"))
    await _until_idle(gateway, _LATE_TASKS_S, lambda: False)
    for exchange in list(gateway.exchanges):
        exchange.drop()  # its client does not read


async def _until_idle(gateway: Gateway, seconds: float, hurry: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while gateway.exchanges and time.monotonic() < deadline and not hurry():
        await asyncio.sleep(0.02)


class GatewayServer(uvicorn.Server):
    """uvicorn's server, save that a signal begins to drain: connections are still accepted, and refused with 503."""

    def __init__(self, gateway: Gateway, stop_requested: asyncio.Event) -> None:
        super().__init__(
            uvicorn.Config(
                gateway,
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                access_log=False,
                proxy_headers=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=2,
                backlog=2048,
            )
        )
        self.stop_requested = stop_requested
        self._loop = asyncio.get_running_loop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT begin to drain; a second one cuts the grace short."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are the main thread's
            return
        originals = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in originals.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stop_requested.is_set():
            self.force_exit = True
        self._loop.call_soon_threadsafe(self.stop_requested.set)
