"""Whole servers with a real model: as ``pagemill serve`` starts them, or process by process, to be killed, frozen …"""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from pagemill_testing.http_calls import Call, Caller
from pagemill_testing.processes import children
from pagemill_testing.program import DEADLINE, Program, T, until
from pagemill_testing.stepping import SteppedWorker

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class LiveServer:
    """What tests ask of a server, however it was started."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = list(programs)
        self.url = ""
        self._callers: list[Caller] = []
        self._clients: list[httpx.Client] = []

    def connect(self, url: str) -> None:
        """Requests go to ``url`` from now on; those that are open stay where they are."""
        self.url = url
        self._callers.append(Caller(url))
        self._clients.append(httpx.Client(base_url=url, timeout=DEADLINE, trust_env=False))

    def close(self) -> None:
        for caller in self._callers:
            caller.close()
        for client in self._clients:
            client.close()
        for program in self.programs:
            program.close()

    # ------------------------------------------------------------ requests

    def start(self, path: str = COMPLETIONS, headers: dict[str, str] | None = None, **body: Any) -> Call:
        """Sends a request and goes on; greedy, and with token ids, unless ``body`` says otherwise."""
        return self._callers[-1].start(path, {"temperature": 0, "return_token_ids": True, **body}, headers)

    def stream(self, **body: Any) -> Call:
        return self.start(stream=True, **body)

    def drop(self, call: Call) -> None:
        self._callers[-1].drop(call)

    def drop_all(self) -> None:
        """Drops whatever is still open."""
        for caller in self._callers:
            caller.drop_all()

    def ask(self, path: str = COMPLETIONS, **body: Any) -> Call:
        """Sends a request and waits for its good end."""
        return self.finish([self.start(path, **body)])[0]

    def finish(self, calls: Sequence[Call]) -> list[Call]:
        """Waits until all calls have ended well."""
        self.until(lambda: all(call.done for call in calls), "the end of all requests")
        return [call.succeeded() for call in calls]

    def get(self, path: str) -> httpx.Response:
        return self._clients[-1].get(path)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self._clients[-1].post(path, json=body)

    def status(self, path: str) -> int | None:
        """Status code of a GET; None when nobody answers."""
        try:
            return self.get(path).status_code
        except httpx.TransportError:
            return None

    # ------------------------------------------------------------ its state

    def state(self) -> dict[str, Any]:
        """The scheduler's; one that stands still for a moment, or has only just come up, is waited for."""

        def reported() -> httpx.Response | None:
            response = self.get("/v1/pagemill/state")
            assert response.status_code in (200, 503), response.text
            return response if response.status_code == 200 else None

        response = self.until(reported, "the scheduler tells its state")
        assert response is not None
        state: dict[str, Any] = response.json()
        return state

    def counter(self, name: str) -> int:
        return int(self.state()["metrics"][name])

    def request(self, request_id: str) -> dict[str, Any] | None:
        """What the state tells of one request; None when it is not there (any more)."""
        return next((r for r in self.state()["requests"] if r["request_id"] == request_id), None)

    def until(self, probe: Callable[[], T], what: str) -> T:
        """Waits for a condition; a failure shows what the processes have printed."""
        try:
            return until(probe, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tails()}") from None

    def until_state(self, condition: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        """Waits until the state meets ``condition``; that state."""

        def probe() -> dict[str, Any] | None:
            state = self.state()
            return state if condition(state) else None

        return self.until(probe, what)  # type: ignore[return-value]

    def until_ready(self, workers: int = 1) -> None:
        self.until(lambda: self.status("/ready") == 200, "/ready is 200")
        self.until_state(lambda state: state["ready_workers"] == workers, f"{workers} workers are ready")

    def until_idle(self) -> None:
        """Waits until no request is left, which must leave every block free (cached ones can be taken at any time), and
        until each worker has done what it was told for those that have left early."""
        state = self.until_state(lambda state: state["requests_total"] == 0, "no request is left")
        for worker in state["workers"]:
            assert worker["blocks"]["used"] == 0, worker
            assert worker["blocks"]["free"] == worker["blocks"]["total"], worker
            assert worker["swap_blocks"]["free"] == worker["swap_blocks"]["total"], worker
        assert [gateway["requests"] for gateway in state["gateways"]] == [0] * len(state["gateways"])
        self.until_state(lambda state: not any(w["plans_in_flight"] for w in state["workers"]), "no plan is under way")

    def assert_alive(self) -> None:
        """A plain request is answered."""
        assert self.get("/health").status_code == 200
        assert self.ask(prompt="The capital of France is", max_tokens=4).text.strip().startswith("Paris")

    def tails(self) -> str:
        return "\n".join(program.tail() for program in self.programs)


class ServeCommand(LiveServer):
    """``pagemill serve``, on a free port.

    Nobody takes a process for lost that only stands still for a while: other tests keep the machine busy, and some hold
    the worker.
    """

    def __init__(self, folder: Path, name: str, **settings: object) -> None:
        self.folder = folder
        self.serve = Program(folder, name, "serve", **{"port": 0, "num_threads": 1, "peer_timeout": 20, **settings})
        super().__init__([self.serve])

    def until_started(self) -> None:
        def lines() -> list[str]:
            return self.serve.out.read_text().splitlines()

        self.until(lambda: len(lines()) >= 2 or not self.serve.alive, "the ready line")
        assert self.serve.alive, self.tails()
        self.curl = shlex.split(lines()[1])
        self.connect(self.curl[1].partition("/v1/")[0])

    def endpoints(self) -> dict[str, str]:
        """The inner sockets."""
        return {side: f"ipc://{next(self.folder.glob(f'pagemill-*/{side}'))}" for side in ("frontend", "backend")}

    def parts(self) -> dict[str, int]:
        """Process ids by command."""
        return {command: pid for pid, command in children(self.serve.pid).items()}

    @contextmanager
    def worker_held(self) -> Iterator[None]:
        """The worker stands still: what runs runs on, what waits goes on waiting. For less than peer_timeout."""
        worker = self.parts()["worker"]
        os.kill(worker, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(worker, signal.SIGCONT)

    @contextmanager
    def arriving_together(self, requests: int) -> Iterator[None]:
        """What is sent within meets an idle worker at once, however slowly it is sent and however fast the worker is.

        Otherwise the first requests may have ended before the last arrive, and a small pool is under no pressure.

        Args:
            requests: how many arrive; the worker stands still until the scheduler has them all.
        """
        with self.worker_held():
            yield
            self.until_state(lambda state: state["requests_total"] == requests, f"{requests} requests have arrived")

    def memory_peaks(self) -> dict[str, int]:
        """The most memory that each process has had so far, in bytes."""
        peaks = {}
        for name, pid in self.parts().items():
            lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            peaks[name] = int(lines["VmHWM"].split()[0]) * 1024
        return peaks


class SeparateProcesses(LiveServer):
    """``pagemill scheduler``, ``worker`` and ``gateway``, each started by itself, over ipc in ``folder``."""

    def __init__(self, folder: Path, cache: Path) -> None:
        super().__init__([])
        self.folder, self.cache = folder, cache
        self._frontend, self._backend = f"ipc://{folder}/frontend", f"ipc://{folder}/backend"
        self._started = 0

    def start_scheduler(self, **settings: object) -> Program:
        endpoints = {"frontend": self._frontend, "backend": self._backend}
        return self._start("scheduler", check_invariants=True, **endpoints, **settings)

    def start_worker(self, **settings: object) -> SteppedWorker:
        own = {"backend": self._backend, "cache_dir": self.cache, "num_threads": 1, "log_format": "json"}
        worker = SteppedWorker(self.folder, self._next_name("worker"), **own, **settings)
        self.programs.append(worker)
        return worker

    def start_gateway(self, **settings: object) -> Program:
        """Starts one and sends all further requests to it."""
        gateway = self._start("gateway", frontend=self._frontend, cache_dir=self.cache, port=0, **settings)
        self.until(lambda: _url_in(gateway.err) or not gateway.alive, "the gateway listens")
        assert gateway.alive, gateway.tail()
        self.connect(_url_in(gateway.err))
        return gateway

    def _start(self, command: str, **settings: object) -> Program:
        program = Program(self.folder, self._next_name(command), command, log_format="json", **settings)
        self.programs.append(program)
        return program

    def _next_name(self, command: str) -> str:
        self._started += 1
        return f"{command}-{self._started}"

    def stepped_until(self, workers: Sequence[SteppedWorker], condition: Callable[[dict[str, Any]], object]) -> None:
        """Lets ``workers``, which are held, do as much as makes the scheduler's state meet ``condition``, and hardly
        more: one plan each between two looks, of those two or three that the scheduler has sent ahead."""

        def met() -> bool:
            if condition(self.state()):
                return True
            for worker in workers:
                worker.step()
            return False

        self.until(met, "the workers have done so much")

    def worker_state(self, worker: Program) -> dict[str, Any] | None:
        """What the scheduler's state tells of a worker; None when it does not count on it."""
        return next((w for w in self.state()["workers"] if f"-{worker.pid}-" in w["identity"]), None)

    def freeze(self, program: Program) -> None:
        program.send(signal.SIGSTOP)

    def thaw(self, program: Program) -> None:
        program.send(signal.SIGCONT)


def _url_in(log: Path) -> str:
    """Where a gateway listens, by its log; empty before it does."""
    for line in log.read_text().splitlines(keepends=True):
        if '"event": "listening"' in line and line.endswith("\n"):
            return str(json.loads(line)["url"])
    return ""
