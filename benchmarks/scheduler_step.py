"""What the scheduler costs per iteration: the real core, driven by a worker that answers at once.

A step is one result taken in (tokens recorded, stop tokens checked, blocks named, deliveries encoded per gateway) and
one plan made (arrivals admitted, blocks handed out, plan encoded): the code path of `pagemill serve`. In every step
about 2 % of the running requests end and as many arrive; lengths are staggered, so that rows cross block borders all
the time.

    python benchmarks/scheduler_step.py [--quick] [--json] [--running 16,64,256,1024,4096]

Columns: schedule (arrivals, plan, encoding it), update (result, encoding deliveries), their sum, p99 of the sum, size
of the median plan, encoding plus decoding one plan. Times are in microseconds, one process, one core.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import dataclass, field

import numpy as np

from pagemill_scheduler.config import CoreConfig
from pagemill_scheduler.core import SchedulerCore
from pagemill_scheduler.events import Peer, Received, Send, Tick
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
ENDING_SHARE = 0.02
GATEWAY, WORKER = Peer("frontend", b"g"), Peer("backend", b"w")


@dataclass
class Load:
    """What runs.

    Attributes:
        prompt: mean prompt length in tokens; lengths are spread evenly between half and one and a half times that.
        samples: parallel samples per request.
        pool_share: blocks in the pool, relative to what the running sequences need on average.
    """

    name: str
    running: int
    prompt: int = 200
    samples: int = 1
    pool_share: float = 2.0


@dataclass
class Times:
    schedule: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    codec: list[float] = field(default_factory=list)
    plan_bytes: list[int] = field(default_factory=list)


class Driver:
    """A gateway that keeps ``load.running`` sequences going and a worker that samples random tokens."""

    def __init__(self, load: Load, seed: int) -> None:
        self.load = load
        self.random = np.random.default_rng(seed)
        longest = 2 * load.prompt + 512
        per_sequence = -(-(load.prompt + 64) // BLOCK_SIZE)
        num_blocks = int(load.running * per_sequence * load.pool_share) + 64
        config = CoreConfig(
            max_num_seqs=load.running, max_num_batched_tokens=max(8192, 4 * load.running), preemption_mode="recompute"
        )
        self.core = SchedulerCore(config, incarnation=1)
        self.now = 0.0
        self.handle_number = 0
        self.number = 0
        self.pending: list[IterationPlan] = []
        self._receive(
            WORKER,
            WorkerHello(
                "w", "m", "m", "none", "none", "none", VOCAB, longest, BLOCK_SIZE, num_blocks, 0, 1, 1000.0, 1e9
            ),
        )
        self._receive(GATEWAY, GatewayHello("g", "m"))
        self.live = 0
        self.preempted = 0

    def _receive(self, peer: Peer, message: Message) -> list[bytes]:
        return self._act(self.core.handle(Received(self.now, peer, message)))

    def _act(self, actions: list[object]) -> list[bytes]:
        """Encode what is to be sent, as the shell does."""
        out = []
        for action in actions:
            if isinstance(action, Send):
                message = action.message
                out.append(encode(message))
                if isinstance(message, IterationPlan):
                    self.pending.append(message)
                elif isinstance(message, GatewayWelcome):
                    self.epoch = message.epoch
                elif isinstance(message, WorkerWelcome):
                    self.worker_epoch = message.epoch
                elif isinstance(message, Delivery):
                    self.delivered = message
                    self.live -= int((message.finishes > 0).sum())
        return out

    def new_request(self) -> SubmitRequest:
        self.handle_number += 1
        self.number += 1
        length = int(self.random.integers(self.load.prompt // 2, self.load.prompt * 3 // 2))
        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=512,
            n=self.load.samples,
            eos_token_ids=np.array([EOS], np.int32),
            stop_token_ids=np.array([3, 4], np.int32),
            seed=self.handle_number,
        )
        prompt = self.random.integers(10, VOCAB, length).astype(np.int32)
        return SubmitRequest(self.epoch, self.number, self.handle_number, "request", prompt, sampling)

    def answer(self, plan: IterationPlan) -> IterationResult:
        count = len(plan.decode_rows) + int(plan.prefill_chunks[:, 3].sum())
        tokens = self.random.integers(10, VOCAB, count).astype(np.int32)
        tokens[self.random.random(count) < ENDING_SHARE] = EOS
        return IterationResult(self.worker_epoch, plan.iteration, tokens)

    def fill(self) -> None:
        """Bring in the load and run until every sequence decodes."""
        while self.live < self.load.running:
            self._receive(GATEWAY, self.new_request())
            self.live += self.load.samples
        for _ in range(2000):
            self._act(self.core.handle(Tick(self.now)))
            plan = self.pending.pop(0)
            result = self.answer(plan)
            result.token_ids[result.token_ids == EOS] = 10
            self._receive(WORKER, result)
            if not len(plan.prefill_chunks) and not len(plan.joined):
                return

    def step(self, times: Times) -> None:
        clock = time.perf_counter
        self.now += 0.02
        arrivals = [self.new_request() for _ in range(max(self.load.running - self.live, 0) // self.load.samples)]
        begin = clock()
        for request in arrivals:
            self._receive(GATEWAY, request)
        self._act(self.core.handle(Tick(self.now)))
        scheduled = clock()
        self.live += len(arrivals) * self.load.samples
        plan = self.pending.pop(0)
        result = self.answer(plan)
        resumed = clock()
        self._receive(WORKER, result)
        updated = clock()
        times.schedule.append(scheduled - begin)
        times.update.append(updated - resumed)
        coded = clock()
        data = encode(plan)
        decode(data)
        times.codec.append(clock() - coded)
        times.plan_bytes.append(len(data))
        if int(self.now / 0.5) != int((self.now - 0.02) / 0.5):
            # Keeps both peers alive; outside of the timed part, as it comes twice a second.
            self._receive(GATEWAY, Heartbeat(self.epoch, self.number, self.delivered.number))
            self._receive(WORKER, Heartbeat(self.worker_epoch, result.iteration, plan.iteration))


def measure(load: Load, steps: int, seed: int) -> dict[str, object]:
    driver = Driver(load, seed)
    driver.fill()
    times = Times()
    for _ in range(20):
        driver.step(Times())
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        driver.step(times)
    gc.unfreeze()
    schedule, update = np.array(times.schedule) * 1e6, np.array(times.update) * 1e6
    metrics = driver.core.snapshot(driver.now)["metrics"]
    return {
        "load": load.name,
        "running": load.running,
        "schedule_us": round(float(np.median(schedule)), 1),
        "update_us": round(float(np.median(update)), 1),
        "total_us": round(float(np.median(schedule + update)), 1),
        "p99_us": round(float(np.percentile(schedule + update, 99)), 1),
        "plan_bytes": int(np.median(times.plan_bytes)),
        "codec_us": round(float(np.median(times.codec) * 1e6), 1),
        "preemptions": metrics["num_preemptions_total"],  # type: ignore[index]
    }


def loads(sizes: list[int], quick: bool) -> list[Load]:
    result = [Load("decode", size) for size in sizes]
    result += [Load("decode, 2,000-token context", size, prompt=2000) for size in sizes if size in (256, 1024)]
    result += [Load("n=4", size, samples=4) for size in sizes if size in (256, 1024)]
    if not quick or 256 in sizes:
        result += [Load("preemption", size, pool_share=0.9) for size in sizes if size in (256, 1024)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--running", default="16,64,256,1024,4096", help="how many sequences run")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.running.split(",")]
    steps = 200 if arguments.quick else 1000
    cases = []
    print(
        f"{'load':28} {'running':>7} {'schedule':>9} {'update':>9} {'total':>9} {'p99':>9} {'bytes':>7} {'codec':>6} {'preempted':>9}"
    )
    for load in loads(sizes, arguments.quick):
        case = measure(load, steps, arguments.seed)
        cases.append(case)
        print(
            f"{case['load']:28} {case['running']:7} {case['schedule_us']:9} {case['update_us']:9} "
            f"{case['total_us']:9} {case['p99_us']:9} {case['plan_bytes']:7} {case['codec_us']:6} {case['preemptions']:9}"
        )
    if arguments.json:
        print(json.dumps({"benchmark": "scheduler_step", "steps": steps, "cases": cases}))


if __name__ == "__main__":
    main()
