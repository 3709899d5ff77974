"""Random sequences of all that can happen, with shrinking: no invariant breaks, nothing is lost, all is freed."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from pagemill_testing.fake_worker import expected_outputs
from pagemill_testing.simulation import Simulation, WorkerPeer

from pagemill_shared.messages import SubmitRequest
from pagemill_shared.sampling import SamplingParams

VOCAB = 1000
BLOCK = 4


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    beam_width = draw(st.sampled_from([0, 0, 0, 1, 2, 3]))
    width = beam_width or draw(st.sampled_from([1, 1, 1, 2, 3, 4]))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 5)),
        max_tokens=draw(st.integers(1, 16 if width == 1 else 8)),
        min_tokens=0 if beam_width else draw(st.integers(0, 4)),
        ignore_eos=draw(st.booleans()),
        eos_token_ids=np.arange(draw(st.sampled_from([0, 5, 100])), dtype=np.int32),
        stop_token_ids=np.array(draw(st.lists(st.integers(100, 300), max_size=12)), np.int32),
        logprobs=draw(st.sampled_from([None, None, 0])),
        n=draw(st.integers(1, beam_width)) if beam_width else width,
        beam_width=beam_width,
        length_penalty=draw(st.sampled_from([0.0, 1.0, -1.0, 2.0])),
        early_stopping=draw(st.integers(0, 2)),
    )


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=20)


class MemoryMachine(RuleBasedStateMachine):
    """Pools of a few blocks of four tokens. The simulation checks every invariant after every event, the fake worker
    every plan, the fake gateway every delivery."""

    def __init__(self) -> None:
        super().__init__()
        self.expected: dict[tuple[str, int], list[list[int]]] = {}
        self.cut: set[tuple[str, int, int]] = set()
        self.joined = 0

    @initialize(
        num_blocks=st.integers(9, 16),
        depth=st.integers(1, 2),
        seats=st.integers(1, 6),
        budget=st.integers(6, 24),
        watermark=st.sampled_from([0.0, 0.2]),
        swap_blocks=st.sampled_from([0, 3, 30]),
        mode=st.sampled_from(["auto", "swap", "swap", "recompute"]),
        caching=st.booleans(),
        aging=st.sampled_from([0.0, 1.0]),
    )
    def start(
        self,
        num_blocks: int,
        depth: int,
        seats: int,
        budget: int,
        watermark: float,
        swap_blocks: int,
        mode: str,
        caching: bool,
        aging: float,
    ) -> None:
        self.num_blocks, self.swap_blocks, self.seats = num_blocks, swap_blocks, min(seats, budget)
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
        self.add_worker()

    def workers(self) -> list[WorkerPeer]:
        return list(self.simulation.workers.values())

    @precondition(lambda self: len(self.simulation.workers) < 3)
    @rule()
    def add_worker(self) -> None:
        self.joined += 1
        self.simulation.add_worker(
            f"w{self.joined}", num_blocks=self.num_blocks, num_swap_blocks=self.swap_blocks, block_size=BLOCK
        )

    @rule(
        which=st.integers(0, 1),
        prompt=prompts,
        sampling=sampling_params(),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "pepper"]),
    )
    def submit(self, which: int, prompt: list[int], sampling: SamplingParams, priority: int, salt: str) -> None:
        gateway = self.gateways[which]
        handle = gateway.submit(prompt, sampling, priority, salt)
        self.expected[gateway.name, handle] = expected_outputs(prompt, sampling, VOCAB)

    @rule(which=st.integers(0, 1), pick=st.integers(0, 1000))
    def abort(self, which: int, pick: int) -> None:
        gateway = self.gateways[which]
        if gateway.answers:
            handle = list(gateway.answers)[pick % len(gateway.answers)]
            gateway.abort(handle)
            del self.expected[gateway.name, handle]

    @rule(which=st.integers(0, 1), pick=st.integers(0, 1000))
    def stop_string(self, which: int, pick: int) -> None:
        gateway = self.gateways[which]
        running = [
            h
            for h, answer in gateway.answers.items()
            if not answer.done and 0 not in answer.finishes and not answer.submit.sampling.beam_width
        ]
        if running:
            handle = running[pick % len(running)]
            gateway.stop_string(handle, 0)
            self.cut.add((gateway.name, handle, 0))

    @rule()
    def tick(self) -> None:
        self.simulation.tick()

    @rule(pick=st.integers(0, 2))
    def step(self, pick: int) -> None:
        workers = self.workers()
        if workers:
            workers[pick % len(workers)].step()

    @rule(rounds=st.integers(1, 4))
    def run_a_little(self, rounds: int) -> None:
        for _ in range(rounds):
            self.simulation.tick()
            for worker in self.workers():
                worker.step()

    @rule()
    def time_passes(self) -> None:
        self.simulation.beat()

    @precondition(lambda self: self.simulation.workers)
    @rule(pick=st.integers(0, 2), leaves=st.booleans())
    def worker_goes(self, pick: int, leaves: bool) -> None:
        workers = self.workers()
        worker = workers[pick % len(workers)]
        if leaves:
            worker.leave()
        else:
            self.simulation.kill(worker)
        self.simulation.tick()

    @precondition(lambda self: self.simulation.workers)
    @rule(pick=st.integers(0, 2), what=st.sampled_from(["plan", "result", "repeat"]))
    def worker_message_goes_wrong(self, pick: int, what: str) -> None:
        workers = self.workers()
        worker = workers[pick % len(workers)]
        if not worker.plans or worker.leaving:
            return
        before = worker.welcomes
        if what == "plan":
            worker.incoming.received -= 1  # as if the last plan had never come
            worker.plans.pop()
        elif what == "result":
            worker.result()
            worker.sent += 1
        else:
            result = worker.result()
            assert result is not None
            worker.sent = result.iteration
            self.simulation.receive(worker.peer, result)
            self.simulation.receive(worker.peer, result)
        self.simulation.beat()
        self.simulation.beat()
        assert worker.welcomes == before + 1, "one fault leads to exactly one resend"

    @rule(which=st.integers(0, 1))
    def delivery_is_lost(self, which: int) -> None:
        self.gateways[which].lose_next_delivery = True

    @rule(which=st.integers(0, 1))
    def gateway_reconnects(self, which: int) -> None:
        self.gateways[which].hello()

    def can_ever_fit(self, submit: SubmitRequest) -> bool:
        """The plain sum: full prompt blocks shared, the rest of each sequence its own."""
        prompt, width = len(submit.prompt_token_ids), submit.sampling.width
        limit = prompt + submit.sampling.max_tokens
        shared = prompt // BLOCK if width > 1 else 0
        need = shared + width * (-(-limit // BLOCK) - shared)
        return limit <= self.num_blocks * BLOCK and width <= self.seats and need <= self.num_blocks

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        self.simulation.beat()  # notices dead workers
        if not self.simulation.snapshot()["ready_workers"]:
            self.add_worker()
        for _ in range(3):
            self.simulation.run()
            self.simulation.beat()
            self.simulation.beat()
        assert not self.simulation.snapshot()["requests"], "a request was starved"
        for gateway in self.gateways:
            for handle, answer in gateway.answers.items():
                if answer.stopped:
                    continue
                if answer.failure is not None:
                    assert answer.failure.code in ("context_length_exceeded", "too_many_sequences"), answer.failure
                    assert not self.can_ever_fit(answer.submit)
                    continue
                sampling = answer.submit.sampling
                assert answer.finishes.keys() == set(range(sampling.n))
                for index, tokens in enumerate(self.expected[gateway.name, handle]):
                    if (gateway.name, handle, index) in self.cut:
                        have = answer.tokens.get(index, [])
                        assert have == tokens[: len(have)]
                        continue
                    assert answer.tokens[index] == tokens
                    if sampling.logprobs is not None:
                        assert len(answer.logprobs[index]) == len(tokens)
        self.simulation.assert_free()


def run_machine(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        MemoryMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


def test_random_events_break_nothing() -> None:
    run_machine(examples=int(os.environ.get("PAGEMILL_TEST_EXAMPLES", "150")), steps=40)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_random_events_break_nothing_in_a_long_run() -> None:
    run_machine(examples=4000, steps=60)
