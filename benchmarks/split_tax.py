"""What the split costs: recorded plans carried out by direct calls, and by a worker at the other end of a socket.

    python benchmarks/split_tax.py [--quick] [--json] [--running 32] [--prompt 64] [--output 64] [--threads 1]

1. A scheduler core and a model runner in one process serve `running` requests; every plan is kept.
2. "direct": that runner carries the plans out again, one call after another, with nothing between them.
3. "split": a `pagemill worker` gets the same plans over an ipc socket, two in flight, encoded, numbered and answered as
   in service, from a process that has nothing else to do.
4. "server": `pagemill serve` answers as many requests of the same lengths over HTTP; gateway, scheduler, worker and
   the client share the processors.

Rounds alternate between the three; reported are medians of output tokens per second, and ratios to "direct". The
worker has the same number of OpenMP threads everywhere, and the model, weights and kernels are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgpack
import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from pagemill_testing.program import Program
from serving.bundled import model_files
from serving.client import figures, run
from serving.systems import Running, System, pagemill, started
from serving.workloads import Prompts, Workload

from pagemill_scheduler.config import CoreConfig
from pagemill_scheduler.core import SchedulerCore
from pagemill_scheduler.events import Action, Peer, Received, Send, Tick
from pagemill_shared.channel import RouterChannel
from pagemill_shared.codec import decode, encode
from pagemill_shared.messages import (
    GatewayHello,
    GatewayWelcome,
    Heartbeat,
    HelloRequest,
    IterationPlan,
    IterationResult,
    SubmitRequest,
    WorkerHello,
    WorkerWelcome,
)
from pagemill_shared.sampling import SamplingParams
from pagemill_shared.settings import WorkerSettings

WORKER, GATEWAY = Peer("backend", b"w"), Peer("frontend", b"g")
HEARTBEAT_S = 0.5
TOKEN_BUDGET = 2048


@dataclass(frozen=True, slots=True)
class Load:
    running: int
    prompt: int
    output: int
    threads: int

    @property
    def blocks(self) -> int:
        return self.running * -(-(self.prompt + self.output) // 16) + 64


# ------------------------------------------------------------ direct: a process of its own


def direct(load: Load, recording: Path) -> None:
    """Records the plans into a file; then, for each line of standard input, carries them out and prints the seconds."""
    from pagemill_worker.load import load_worker

    settings = WorkerSettings(num_threads=load.threads, num_kv_blocks=load.blocks, num_swap_blocks=0)
    runner, hello = load_worker(settings, lambda text, done: None)
    welcome, plans = record(load, hello, runner)
    recording.write_bytes(msgpack.packb([encode(plan) for plan in plans]))
    print(json.dumps({"welcome": [welcome.max_num_seqs, welcome.max_num_batched_tokens]}), flush=True)
    for _ in sys.stdin:
        runner.begin(welcome)
        begun = time.perf_counter()
        for plan in plans:
            runner.execute(plan)
        print(time.perf_counter() - begun, flush=True)


def record(load: Load, hello: WorkerHello, runner: object) -> tuple[WorkerWelcome, list[IterationPlan]]:
    """Serves the load with a core of its own; what the worker was sent."""
    core = SchedulerCore(CoreConfig(max_num_seqs=load.running, max_num_batched_tokens=TOKEN_BUDGET), incarnation=1)
    sent: list[object] = []
    epoch = 0

    def note(actions: Sequence[Action]) -> None:
        sent.extend(action.message for action in actions if isinstance(action, Send))

    note(core.handle(Received(0.0, WORKER, hello)))
    note(core.handle(Received(0.0, GATEWAY, GatewayHello("g", hello.model))))
    welcome = next(m for m in sent if isinstance(m, WorkerWelcome))
    epoch = next(m.epoch for m in sent if isinstance(m, GatewayWelcome))
    runner.begin(welcome)  # type: ignore[attr-defined]
    random = np.random.default_rng(1)
    sampling = SamplingParams(temperature=0.0, max_tokens=load.output)
    for number in range(1, load.running + 1):
        prompt = random.integers(100, 40_000, load.prompt).astype(np.int32)
        submit = SubmitRequest(epoch, number, number, f"r{number}", prompt, sampling)
        note(core.handle(Received(0.0, GATEWAY, submit)))
    plans: list[IterationPlan] = []
    done = 0
    while True:
        note(core.handle(Tick(0.0)))
        plans = [message for message in sent if isinstance(message, IterationPlan)]
        if done == len(plans):
            return welcome, plans
        note(core.handle(Received(0.0, WORKER, runner.execute(plans[done]))))  # type: ignore[attr-defined]
        done += 1


class Direct:
    """The process of :func:`direct`, from outside."""

    def __init__(self, load: Load, recording: Path) -> None:
        words = [load.running, load.prompt, load.output, load.threads, recording]
        command = [sys.executable, "-P", __file__, "--direct", *map(str, words)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.welcome: list[int] = json.loads(self._line())["welcome"]

    def seconds(self) -> float:
        assert self._process.stdin
        print(file=self._process.stdin, flush=True)
        return float(self._line())

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the process of direct calls ended")
        return line


# ------------------------------------------------------------ split: a worker process behind a socket


class Replay:
    """The scheduler's end of the socket: sends the recorded plans, two in flight, and counts the results."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, welcome: list[int], recording: Path
    ) -> None:
        self._channel = RouterChannel(context, "backend", endpoint, keys=None, allow_insecure_bind=False)
        self._poller = zmq.Poller()
        self._channel.register(self._poller)
        self._welcome = welcome
        self._plans = [decode(data) for data in msgpack.unpackb(recording.read_bytes())]
        self._route = b""
        self._epoch = 0
        self._beat = 0.0

    def seconds(self, depth: int = 2) -> float:
        """One pass over the plans in an epoch of its own."""
        while not self._route:
            self._take()
        self._epoch += 1
        self._send(WorkerWelcome(self._epoch, *self._welcome))
        begun = time.perf_counter()
        sent = received = 0
        while received < len(self._plans):
            while sent < len(self._plans) and sent - received < depth:
                plan = self._plans[sent]
                assert isinstance(plan, IterationPlan)
                self._send(replace(plan, epoch=self._epoch))
                sent += 1
            received += sum(
                isinstance(message, IterationResult) and message.epoch == self._epoch for message in self._take()
            )
            if time.perf_counter() - self._beat > HEARTBEAT_S:
                self._send(Heartbeat(self._epoch, sent, received))
                self._beat = time.perf_counter()
        return time.perf_counter() - begun

    def idle(self) -> None:
        """Keeps the worker from giving the scheduler up while others are measured."""
        if self._route and self._epoch:
            self._take(0)
            self._send(Heartbeat(self._epoch, len(self._plans), len(self._plans)))

    def close(self) -> None:
        self._channel.close()

    def _take(self, timeout_ms: int = 250) -> list[object]:
        self._poller.poll(timeout_ms)
        messages = []
        for route, message in self._channel.receive(64):
            if isinstance(message, WorkerHello):
                self._route = route
            messages.append(message)
        return messages

    def _send(self, message: WorkerWelcome | IterationPlan | Heartbeat | HelloRequest) -> None:
        if not self._channel.send(self._route, message):
            raise SystemExit("the worker is gone")


@contextmanager
def split(load: Load, welcome: list[int], recording: Path, folder: Path) -> Iterator[Replay]:
    endpoint = f"ipc://{folder}/backend"
    settings = {"num_threads": load.threads, "num_kv_blocks": load.blocks, "num_swap_blocks": 0, "peer_timeout": 600}
    with zmq.Context() as context:
        replay = Replay(context, endpoint, welcome, recording)
        worker = Program(folder, "worker", "worker", backend=endpoint, **settings)
        try:
            yield replay
        finally:
            worker.close()
            replay.close()


# ------------------------------------------------------------ server: everything, with HTTP and a client


def whole(load: Load) -> System:
    settings = {"num-threads": load.threads, "num-kv-blocks": load.blocks, "max-num-seqs": load.running}
    return pagemill(settings=[word for name, value in settings.items() for word in (f"--{name}", str(value))])


def server_rate(running: Running, load: Load, prompts: Prompts, seed: str) -> float:
    workload = Workload("short", load.running, load.running, load.prompt, load.output)
    answers = asyncio.run(run(running.url, workload, prompts.make(workload, seed), {"ignore_eos": True}))
    return figures(answers, workload).output_tokens_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--direct", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.direct:
        direct(Load(*map(int, arguments.direct[:4])), Path(arguments.direct[4]))
        return
    load = Load(arguments.running, arguments.prompt, arguments.output, arguments.threads)
    rounds = 3 if arguments.quick else 8
    rates: dict[str, list[float]] = {"direct": [], "split": [], "split depth 1": [], "server": []}
    tokens = load.running * load.output
    print(f"{os.cpu_count()} CPUs, load before {os.getloadavg()[0]:.2f}; {load}")
    prompts = Prompts(model_files()[0] / "tokenizer.json")
    with tempfile.TemporaryDirectory(prefix="pm-") as name:
        folder = Path(name)
        process = Direct(load, folder / "plans")
        with (
            split(load, process.welcome, folder / "plans", folder) as replay,
            started(whole(load), folder / "server.log") as running,
        ):
            replay.seconds()  # warms up, as the recording has warmed the other
            server_rate(running, load, prompts, "warm-up")
            for number in range(rounds):
                rates["direct"].append(tokens / process.seconds())
                replay.idle()
                rates["split"].append(tokens / replay.seconds())
                rates["split depth 1"].append(tokens / replay.seconds(depth=1))
                rates["server"].append(server_rate(running, load, prompts, str(number)))
                replay.idle()
        process.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    # Of each round, whose parts ran right after one another; the machine may change between rounds.
    ratios = {
        name: statistics.median(value / base for value, base in zip(values, rates["direct"], strict=True))
        for name, values in rates.items()
    }
    print(f"{'':14} {'tokens/s':>9} {'of direct':>10}   each round")
    for name, value in medians.items():
        print(f"{name:14} {value:9.1f} {ratios[name]:10.3f}   {' '.join(f'{rate:.0f}' for rate in rates[name])}")
    if arguments.json:
        print(
            json.dumps(
                {
                    "benchmark": "split_tax",
                    "load": [load.running, load.prompt, load.output],
                    "threads": load.threads,
                    "tokens_per_s": medians,
                    "of_direct": ratios,
                    "rounds": rates,
                }
            )
        )


if __name__ == "__main__":
    main()
