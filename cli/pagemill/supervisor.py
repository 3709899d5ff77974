"""Starts the parts of a server as child processes, starts dead ones again, and stops all in order.

Knows nothing of what the parts do: a part is a command line. Each child leads its own process group, so that Ctrl-C in
a terminal reaches the supervisor alone, which then stops the stages in reverse order of their start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from pagemill.restarts import RestartBudget
from pagemill_shared.errors import PagemillError

_log = structlog.get_logger("pagemill.supervisor")

EXIT_FAILURE = 1
EXIT_CONFIGURATION = 2
EXIT_KILLED = 130
_LONGEST_LINE = 64 * 1024
_HURRY_S = 10.0
"""Seconds that are left after a second signal: enough to tell clients on a busy machine; a third one does not wait."""

Report = Callable[[str, str], None]
"""Takes the name of a part and one line that it printed."""


@dataclass(frozen=True, slots=True)
class Part:
    """A child process to keep running.

    Attributes:
        environment: the whole environment of the child.
        stop_timeout: seconds between SIGTERM and SIGKILL.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    stop_timeout: float


class PartError(PagemillError):
    """A part is down for good."""

    def __init__(self, message: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(message)


class Supervisor:
    """Runs each of ``first`` to its end, then ``stages`` of parts until it is told to stop or a part is down for good.

    A part that ends without being told to is started again within its RestartBudget. One that ends with status 2 (it
    refused its configuration) is not: the next start would end the same way.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Part]],
        *,
        first: Sequence[Part] = (),
        report: Report,
        new_budget: Callable[[], RestartBudget] = RestartBudget,
    ) -> None:
        self._first = first
        self._stages = stages
        self._report = report
        self._new_budget = new_budget
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._told: set[str] = set()
        self._killed = False

    def stop(self) -> None:
        """The first call asks for an orderly stop. The second one hurries the parts that are stopping, so that they can
        still tell their clients, and kills whatever is left soon after; a third one kills at once."""
        if not self._stopping.is_set():
            self._stopping.set()
        elif not self._killed:
            self._killed = True
            for name in self._told & self._running.keys():
                _terminate(self._running[name])
            asyncio.get_running_loop().call_later(_HURRY_S, self._kill_all)
        else:
            self._kill_all()

    def _kill_all(self) -> None:
        for process in self._running.values():
            _kill_group(process)

    async def run(self, started: Callable[[], Awaitable[None]]) -> int:
        """Exit status: 0 after an orderly stop, 130 after a second signal.

        Args:
            started: runs beside the parts once all are started, and is cancelled when they are to stop.

        Raises:
            PartError: a part is down for good; the others have been stopped.
        """
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        try:
            return await self._run(started)
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def _run(self, started: Callable[[], Awaitable[None]]) -> int:
        stop_told = asyncio.create_task(self._stopping.wait())
        try:
            for part in self._first:
                await self._run_first(part, stop_told)
            if not self._stopping.is_set():
                await self._run_stages(started, stop_told)
        finally:
            self._stopping.set()
            await stop_told
        return EXIT_KILLED if self._killed else 0

    async def _run_first(self, part: Part, stop_told: asyncio.Task[Any]) -> None:
        running = asyncio.create_task(self._run_once(part))
        await asyncio.wait([running, stop_told], return_when=asyncio.FIRST_COMPLETED)
        if self._stopping.is_set():
            await self._stop_part(part, running)
        elif status := running.result():
            raise PartError(f"{part.name} failed ({_in_words(status)})", status if status > 0 else EXIT_FAILURE)

    async def _run_stages(self, started: Callable[[], Awaitable[None]], stop_told: asyncio.Task[Any]) -> None:
        keepers = [[asyncio.create_task(self._keep(part)) for part in stage] for stage in self._stages]
        announcing = asyncio.ensure_future(started())
        pending: set[asyncio.Future[Any]] = {stop_told, announcing, *(task for stage in keepers for task in stage)}
        try:
            while not self._stopping.is_set():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises what ended it
                if done - {announcing}:
                    return
        finally:
            self._stopping.set()
            announcing.cancel()
            await asyncio.wait([announcing])
            for stage, tasks in zip(reversed(self._stages), reversed(keepers), strict=True):
                await self._stop_stage(stage, tasks)

    async def _keep(self, part: Part) -> None:
        """Runs a part again and again until the supervisor stops.

        Raises:
            PartError: it refused its configuration, or died too often.
        """
        budget = self._new_budget()
        while not self._stopping.is_set():
            status = await self._run_once(part)
            if self._stopping.is_set():
                return
            ending = _in_words(status)
            if status == EXIT_CONFIGURATION:
                raise PartError(f"the {part.name} refused to start (its reason stands above)", EXIT_CONFIGURATION)
            pause = budget.died(time.monotonic())
            if pause is None:
                raise PartError(
                    f"the {part.name} ended more than {budget.limit} times within {budget.window:g} s "
                    f"(last: {ending}); giving up",
                    EXIT_FAILURE,
                )
            _log.warning("a part ended and is started again", part=part.name, ending=ending, pause_s=pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def _run_once(self, part: Part) -> int:
        """Starts the part, passes on what it prints, and gives its exit status (negative: the signal)."""
        read_end, write_end = os.pipe()
        try:
            # -P: the working directory must not become importable.
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "pagemill.tether", str(os.getpid()), *part.command),
                env=dict(part.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                process_group=0,
            )
        except OSError:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._running[part.name] = process
        if self._stopping.is_set():  # told to while it was being started
            _terminate(process)
        printing = asyncio.create_task(self._pass_on(part.name, read_end))
        try:
            status = await process.wait()
        finally:
            del self._running[part.name]
        _kill_group(process)  # what the part has started ends with it
        # A grandchild in a group of its own may still hold the pipe; what the part itself printed is there already.
        await asyncio.wait([printing], timeout=1.0)
        printing.cancel()
        await asyncio.gather(printing, return_exceptions=True)
        return status

    async def _pass_on(self, name: str, read_end: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
        )
        rest = b""
        try:
            while chunk := await reader.read(_LONGEST_LINE):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > _LONGEST_LINE:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._report(name, line.decode(errors="replace"))
            if rest:
                self._report(name, rest.decode(errors="replace"))
        finally:
            transport.close()

    async def _stop_stage(self, stage: Sequence[Part], keepers: Sequence[asyncio.Task[None]]) -> None:
        await asyncio.gather(*(self._stop_part(part, keeper) for part, keeper in zip(stage, keepers, strict=True)))

    async def _stop_part(self, part: Part, keeper: asyncio.Task[Any]) -> None:
        """SIGTERM, then SIGKILL if it takes longer than it may; returns when the part's task has ended."""
        if process := self._running.get(part.name):
            self._told.add(part.name)
            _terminate(process)
        _, late = await asyncio.wait([keeper], timeout=part.stop_timeout)
        if late and (process := self._running.get(part.name)):
            _log.warning("a part did not end in time and is killed", part=part.name, timeout_s=part.stop_timeout)
            _kill_group(process)
        await asyncio.wait([keeper])


def _terminate(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


def _kill_group(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _in_words(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
