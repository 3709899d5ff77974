"""``pagemill serve``: the three processes on one machine, over ipc sockets in a private folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic_settings import BaseSettings

from pagemill.configuration import as_environment
from pagemill.folder import private_folder
from pagemill.openmp import let_threads_sleep
from pagemill.ready import ready_lines, until_ready, url_of
from pagemill.supervisor import Part, PartError, Supervisor
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.manifest import prepared_folder, read_manifest
from pagemill_shared.settings import GatewaySettings, PrepareSettings, SchedulerSettings, ServeSettings, WorkerSettings

_STOP_MARGIN = 5.0
"""Seconds that a part gets beyond ``shutdown_grace`` before it is killed."""


def serve(settings: ServeSettings) -> int:
    """Runs until Ctrl-C or SIGTERM (exit status 0), or until a part is down for good.

    Raises:
        ConfigurationError: the address cannot be bound.
    """
    with reserved_port(settings.host, settings.port) as port, private_folder() as folder:
        return _serve(settings.model_copy(update={"port": port}), folder)


def _serve(settings: ServeSettings, folder: Path) -> int:
    async def announce() -> None:
        await until_ready(settings.host, settings.port)
        name = settings.served_model_name or read_manifest(prepared_folder(settings.cache_dir, settings.model)).name
        url = url_of(settings.host, settings.port)
        print(
            ready_lines(url, name, with_key=settings.api_key is not None or settings.api_key_file is not None),
            flush=True,
        )

    def report(part: str, line: str) -> None:
        print(labelled(part, line, settings.log_format), file=sys.stderr, flush=True)

    supervisor = Supervisor(stages(settings, folder), first=[_preparation(settings)], report=report)
    try:
        return asyncio.run(supervisor.run(announce))
    except PartError as failure:
        print(f"pagemill serve: {failure}", file=sys.stderr, flush=True)
        return failure.exit_code


def labelled(part: str, line: str, log_format: str) -> str:
    """A line that a part printed, with its name. JSON logs stay JSON: they name their process themselves, and what else
    is printed becomes an event of its own."""
    if log_format == "console":
        return f"{part:9} | {line}"
    return line if line.startswith("{") else json.dumps({"event": line, "process": part})


@contextlib.contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """``port`` if it can be bound now, or a free one for 0. Asked before anything slow begins.

    On Linux it is kept as long as the context lasts: nobody else is given it before the gateway listens there, nor
    while one that has died is started again. The gateway itself can bind it, too, since both say SO_REUSEADDR.

    Raises:
        ConfigurationError: names the address and the reason.
    """
    with contextlib.ExitStack() as kept:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            keeper = kept.enter_context(socket.socket(family, kind, protocol))
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            keeper.bind(address)
            found = int(keeper.getsockname()[1])
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
        if sys.platform != "linux":
            keeper.close()  # elsewhere it would be in the gateway's way
        yield found


def stages(settings: ServeSettings, folder: Path) -> list[list[Part]]:
    """The parts in the order of their start; they stop in the reverse order, the gateway first."""
    endpoints = {"frontend": f"ipc://{folder}/frontend", "backend": f"ipc://{folder}/backend"}
    names = ["worker"] if settings.workers == 1 else [f"worker {number + 1}" for number in range(settings.workers)]
    return [
        [_part("scheduler", "scheduler", SchedulerSettings, settings, endpoints)],
        [_part(name, "worker", WorkerSettings, settings, endpoints) for name in names],
        [_part("gateway", "gateway", GatewaySettings, settings, endpoints)],
    ]


def _preparation(settings: ServeSettings) -> Part:
    return _part("prepare", "prepare", PrepareSettings, settings, {})


def _part(name: str, command: str, cls: type[BaseSettings], settings: ServeSettings, endpoints: dict[str, str]) -> Part:
    values = {**settings.model_dump(), **endpoints}
    own = {field: values[field] for field in cls.model_fields if field in values}
    environment = as_environment(own, os.environ)
    if cls is WorkerSettings:
        let_threads_sleep(environment)
    return Part(
        name,
        (sys.executable, "-P", "-m", "pagemill", command),  # -P: the working directory must not become importable
        environment,
        stop_timeout=settings.shutdown_grace + _STOP_MARGIN,
    )
