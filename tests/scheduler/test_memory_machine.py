"""Random sequences of all that can happen, with shrinking: no invariant breaks, nothing is lost, all is freed."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_test
from pagemill_testing.hash_model import expected_outputs, expected_pooled, expected_prompt_logprobs
from pagemill_testing.plain_count import plain_waste
from pagemill_testing.random_requests import requests
from pagemill_testing.simulation import Answer, FakeGateway, Simulation, WorkerPeer

from pagemill_scheduler import compiled, planner, waste
from pagemill_scheduler.request import Request
from pagemill_scheduler.state import State
from pagemill_scheduler.worker import WorkerState
from pagemill_shared.messages import AbortRequest, SequenceFinished, SubmitRequest
from pagemill_shared.sampling import SamplingParams

VOCAB = 1000
POOLS = ((4, 9), (4, 11), (4, 14), (4, 18), (8, 6), (3, 16))
"""(block size, blocks) of workers: so few that groups of every kind are preempted in every phase."""
TROUBLES = (
    "time passes",
    "unknown request",
    "delivery lost",
    "gateway's message lost",
    "gateway reconnects",
    "gateway silent",
    "row fails",
    "worker leaves",
    "worker dies",
    "plan lost",
    "result lost",
    "result repeated",
)
KINDS = {"single", "parallel", "beams"}


@dataclass
class Totals:
    """What all examples of a run have seen.

    Attributes:
        preemptions: all of them, by the log.
        preempted: preemptions by (kind of request, phase in which it was), on plain Python: the compiled core cannot be
            made to tell.
    """

    events: int = 0
    examples: int = 0
    preemptions: int = 0
    preempted: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def lacks_a_kind(self) -> bool:
        """Whether one is not among those preempted, as far as can be told."""
        return not self.preemptions or (not compiled.in_use() and {kind for kind, _ in self.preempted} != KINDS)

    def saw(self, worker: WorkerState, victim: Request) -> None:
        table = worker.table
        kind = "beams" if victim.beams else "parallel" if victim.width > 1 else "single"
        slots = [s.slot for s in victim.sequences if s.slot >= 0]
        if (table.gate[slots] >= 0).any():
            phase = "gated"
        elif (table.planned[slots] - table.computed[slots] > 1).any():
            phase = "prefill"
        else:
            phase = "in flight" if (table.planned[slots] > table.length[slots]).any() else "decode"
        self.preempted[kind, phase] += 1


class MemoryMachine(RuleBasedStateMachine):
    """The simulation checks every invariant after every event, the fake worker every plan, the fake gateway every
    delivery; after every step the figures are compared with a plain count."""

    totals: Totals

    def __init__(self) -> None:
        super().__init__()
        self.expected: dict[tuple[str, int], list[list[int]]] = {}
        self.cut: set[tuple[str, int, int]] = set()
        self.joined = 0
        self.pools: set[tuple[int, int]] = set()
        self.all_workers: list[WorkerPeer] = []

    @initialize(
        pool=st.sampled_from(POOLS),
        depth=st.integers(1, 2),
        seats=st.integers(1, 12),
        budget=st.integers(3, 24),
        watermark=st.sampled_from([0.0, 0.2]),
        swap_blocks=st.sampled_from([0, 3, 30]),
        mode=st.sampled_from(["auto", "swap", "swap", "recompute"]),
        caching=st.booleans(),
        aging=st.sampled_from([0.0, 1.0]),
    )
    def start(
        self,
        pool: tuple[int, int],
        depth: int,
        seats: int,
        budget: int,
        watermark: float,
        swap_blocks: int,
        mode: str,
        caching: bool,
        aging: float,
    ) -> None:
        self.swap_blocks, self.seats = swap_blocks, min(seats, budget)
        self.simulation = Simulation(
            pipeline_depth=depth,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            watermark=watermark,
            preemption_mode=mode,
            prefix_caching=caching,
            priority_aging=aging,
            max_deaths=10_000,
            no_worker_timeout=1e9,
        )
        self.gateways = [self.simulation.add_gateway("a"), self.simulation.add_gateway("b")]
        self.add_worker(pool)

    def workers(self) -> list[WorkerPeer]:
        return list(self.simulation.workers.values())

    @precondition(lambda self: len(self.simulation.workers) < 3)
    @rule(pool=st.sampled_from(POOLS))
    def add_worker(self, pool: tuple[int, int]) -> None:
        self.joined += 1
        block_size, num_blocks = pool
        self.pools.add(pool)
        worker = self.simulation.add_worker(
            f"w{self.joined}", num_blocks=num_blocks, num_swap_blocks=self.swap_blocks, block_size=block_size
        )
        self.all_workers.append(worker)

    @rule(which=st.integers(0, 1), requests=st.lists(requests, min_size=1, max_size=4))
    def submit(self, which: int, requests: list[tuple[list[int], SamplingParams, int, str]]) -> None:
        gateway = self.gateways[which]
        for prompt, sampling, priority, salt in requests:
            handle = gateway.submit(prompt, sampling, priority, salt)
            self.expected[gateway.name, handle] = expected_outputs(prompt, sampling, VOCAB)

    @rule(which=st.integers(0, 1), pick=st.integers(0, 1000), abort=st.booleans())
    def end_early(self, which: int, pick: int, abort: bool) -> None:
        """An abort, or a stop string in a sequence."""
        gateway = self.gateways[which]
        running = [h for h, answer in gateway.answers.items() if not answer.done]
        if not running:
            return
        handle = running[pick % len(running)]
        answer = gateway.answers[handle]
        if abort:
            gateway.abort(handle)
            del self.expected[gateway.name, handle]
        elif 0 not in answer.finishes and not answer.submit.sampling.beam_width:
            gateway.stop_string(handle, 0)
            self.cut.add((gateway.name, handle, 0))

    @rule(rounds=st.integers(1, 6))
    def run_a_little(self, rounds: int) -> None:
        for _ in range(rounds):
            self.simulation.tick()
            for worker in self.workers():
                worker.step()

    @rule(pick=st.integers(0, 2))
    def step(self, pick: int) -> None:
        self.simulation.tick()
        workers = self.workers()
        if workers:
            workers[pick % len(workers)].step()

    @rule(which=st.integers(0, 1), pick=st.integers(0, 1000), trouble=st.sampled_from(TROUBLES))
    def trouble(self, which: int, pick: int, trouble: str) -> None:
        gateway = self.gateways[which]
        workers = self.workers()
        worker = workers[pick % len(workers)] if workers else None
        match trouble:
            case "time passes":
                self.simulation.beat()
            case "unknown request":
                self.ask_for_an_unknown_request(gateway, pick)
            case "delivery lost":
                gateway.lose_next_delivery = True
            case "gateway's message lost":
                gateway.outgoing.next()
            case "gateway reconnects":
                gateway.hello()
            case "gateway silent":
                for _ in range(8):
                    self.simulation.beat(silent=[gateway.peer])
                self.simulation.beat()
            case _ if worker is not None:
                self.worker_trouble(worker, pick, trouble)

    def worker_trouble(self, worker: WorkerPeer, pick: int, trouble: str) -> None:
        match trouble:
            case "row fails":
                worker.worker.sound_samples = pick % 7
            case "worker leaves":
                worker.leave()
                self.simulation.tick()
            case "worker dies":
                self.simulation.kill(worker)
                self.simulation.tick()
            case _ if worker.plans and not worker.leaving:
                self.lose_message(worker, trouble)

    def lose_message(self, worker: WorkerPeer, trouble: str) -> None:
        before = worker.welcomes
        if trouble == "plan lost":
            worker.incoming.received -= 1  # as if the last plan had never come
            worker.plans.pop()
        else:
            result = worker.result()
            assert result is not None
            worker.sent = result.iteration
            if trouble == "result repeated":
                self.simulation.receive(worker.peer, result)
                self.simulation.receive(worker.peer, result)
        self.simulation.beat()
        self.simulation.beat()
        assert worker.welcomes == before + 1, "one fault leads to exactly one resend"

    def ask_for_an_unknown_request(self, gateway: FakeGateway, pick: int) -> None:
        epoch, number = gateway.outgoing.epoch, gateway.outgoing.next()
        handle = 2**30 + pick
        known = AbortRequest(epoch, number, handle)
        self.simulation.receive(gateway.peer, known if pick % 2 else SequenceFinished(epoch, number, handle, pick, 1))

    @invariant()
    def figures_are_right(self) -> None:
        if not hasattr(self, "simulation"):
            return
        json.dumps(self.simulation.snapshot(), allow_nan=False)
        for worker in self.simulation.state.workers.values():
            assert waste.measure(worker) == plain_waste(worker)

    def always_fits(self, submit: SubmitRequest) -> bool:
        """The plain sum, for all sizes of pools: full prompt blocks shared, the rest of each sequence its own."""
        prompt, width = len(submit.prompt_token_ids), submit.sampling.width
        limit = prompt + submit.sampling.max_tokens
        if width > self.seats:
            return False
        for size, num_blocks in self.pools:
            shared = prompt // size if width > 1 else 0
            if shared + width * (-(-limit // size) - shared) > num_blocks:
                return False
        return True

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        for peer in self.all_workers:
            peer.worker.sound_samples = None
        self.simulation.beat()  # notices dead workers
        if not self.simulation.snapshot()["ready_workers"]:
            self.add_worker(max(self.pools))
        for _ in range(3):
            self.simulation.run()
            self.simulation.beat()
            self.simulation.beat()
        self.totals.examples += 1
        self.totals.events += self.simulation.events
        self.totals.preemptions += sum(log.event == "preempted" for log in self.simulation.logs)
        assert not self.simulation.snapshot()["requests"], "a request was starved"
        failed_rows = 0
        for gateway in self.gateways:
            for handle, answer in gateway.answers.items():
                if answer.failure is not None and answer.failure.code == "nan":
                    failed_rows += 1
                elif not answer.stopped:
                    self.check_answer(gateway.name, handle, answer)
        assert failed_rows <= sum(peer.worker.faults for peer in self.all_workers)
        self.simulation.assert_free()

    def check_answer(self, gateway: str, handle: int, answer: Answer) -> None:
        if answer.failure is not None:
            assert answer.failure.code in ("context_length_exceeded", "too_many_sequences"), answer.failure
            assert not self.always_fits(answer.submit)
            return
        sampling, prompt = answer.submit.sampling, answer.submit.prompt_token_ids.tolist()
        if not any((gateway, handle, index) in self.cut for index in range(sampling.n)):
            if sampling.prompt_logprobs is not None:
                assert answer.prompt_logprobs == expected_prompt_logprobs(prompt)
            if sampling.pooling:
                assert answer.pooled == expected_pooled(prompt, sampling.pooling)
        assert answer.finishes.keys() == set(range(sampling.n))
        for index, tokens in enumerate(self.expected[gateway, handle]):
            if (gateway, handle, index) in self.cut:
                have = answer.tokens.get(index, [])
                assert have == tokens[: len(have)]
                continue
            assert answer.tokens[index] == tokens
            if sampling.logprobs is not None:
                assert len(answer.logprobs[index]) == len(tokens)


AT_MOST = 5
"""How many times as many events as asked for, until each kind of request was preempted."""


def run_machine(events: int, capsys: pytest.CaptureFixture[str], steps: int = 40) -> Totals:
    """Run examples until the core has seen ``events`` events, and requests of each kind were preempted.

    A failure says with which ``PAGEMILL_TEST_SEED`` it comes again at once.
    """
    number = int(os.environ.get("PAGEMILL_TEST_SEED") or secrets.randbelow(2**32))
    totals = Totals()
    original = planner.preempt_for

    def preempt_for(state: State, worker: WorkerState, victim: Request, why: str) -> None:
        totals.saw(worker, victim)
        original(state, worker, victim, why)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "preempt_for", preempt_for)
        while totals.events < events or (totals.lacks_a_kind and totals.events < AT_MOST * events):
            machine = type("MemoryMachine", (MemoryMachine,), {"totals": totals})
            current = number + totals.events
            try:
                run_test(
                    seed(current)(machine),
                    settings=settings(
                        max_examples=50,
                        stateful_step_count=steps,
                        deadline=None,
                        database=None,
                        suppress_health_check=list(HealthCheck),
                        print_blob=True,
                    ),
                )
            except BaseException as error:
                error.add_note(f"PAGEMILL_TEST_SEED={current} begins with this failure")
                raise
    with capsys.disabled():
        found = ", ".join(f"{kind} {phase} {count}" for (kind, phase), count in sorted(totals.preempted.items()))
        line = f"{totals.events} events in {totals.examples} examples from seed {number}"
        line += f"; {totals.preemptions} preempted: {found}"
        sys.stderr.write(f"\ntest_memory_machine: {line}\n")
    return totals


@pytest.mark.timeout(600)
def test_random_events_break_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    totals = run_machine(int(os.environ.get("PAGEMILL_TEST_EVENTS", "20000")), capsys)
    assert totals.preemptions
    if not compiled.in_use():
        assert {kind for kind, _ in totals.preempted} == KINDS


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_random_events_break_nothing_in_a_long_run(capsys: pytest.CaptureFixture[str]) -> None:
    totals = run_machine(200_000, capsys, steps=60)
    assert totals.preemptions
    if not compiled.in_use():
        kinds, phases = ("single", "parallel", "beams"), ("prefill", "decode", "in flight")
        assert set(totals.preempted) >= {(kind, phase) for kind in kinds for phase in phases}
        assert any(phase == "gated" for _, phase in totals.preempted), "none was preempted while it was recomputed"
