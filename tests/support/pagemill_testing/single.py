"""One gateway and one worker with a core, for tests that look at single requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagemill_shared.messages import IterationPlan, SequenceFinished
from pagemill_shared.sampling import SamplingParams
from pagemill_testing.hash_model import expected_outputs
from pagemill_testing.simulation import Answer, FakeGateway, Simulation, WorkerPeer

VOCAB = 1000
WORKER_FIELDS = {"block_size", "num_blocks", "num_swap_blocks", "max_model_len", "prefill_tokens_per_s"}


def greedy(max_tokens: int, **fields: object) -> SamplingParams:
    """No end tokens: exactly ``max_tokens`` come."""
    return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens} | fields))  # type: ignore[arg-type]


def samples(n: int, max_tokens: int, **fields: object) -> SamplingParams:
    return greedy(max_tokens, temperature=1.0, n=n, seed=7, **fields)


def beams(width: int, max_tokens: int, **fields: object) -> SamplingParams:
    return greedy(max_tokens, beam_width=width, n=width, **fields)


def ids(length: int, first: int = 1) -> list[int]:
    """A prompt unlike those with another ``first``."""
    return [(first * 131 + i * 7) % VOCAB for i in range(length)]


@dataclass
class Single:
    """
    Attributes:
        plans: all that the worker has carried out.
    """

    simulation: Simulation
    gateway: FakeGateway
    worker: WorkerPeer
    plans: list[IterationPlan]

    def submit(self, prompt: list[int], sampling: SamplingParams, priority: int = 0, salt: str = "") -> int:
        return self.gateway.submit(prompt, sampling, priority, salt)

    def answer(self, handle: int) -> Answer:
        return self.gateway.answers[handle]

    def count(self, handle: int) -> int:
        """Tokens that the first sequence of a request has so far."""
        return len(self.answer(handle).tokens.get(0, []))

    def finish(self, handle: int, sequence: int, kept: int = 1) -> None:
        """The gateway found a stop string in one sequence."""
        link = self.gateway.outgoing
        message = SequenceFinished(link.epoch, link.next(), handle, sequence, kept)
        self.simulation.receive(self.gateway.peer, message)

    def step(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            self.simulation.tick()
            self.worker.step()

    def run(self) -> int:
        return self.simulation.run()

    def info(self, handle: int) -> dict[str, object]:
        """What the state endpoint says of a live request."""
        name = f"{self.gateway.name}-{handle}"
        [found] = [r for r in self.simulation.snapshot()["requests"] if r["request_id"] == name]  # type: ignore[attr-defined]
        return found  # type: ignore[no-any-return]

    def metric(self, name: str) -> float:
        return float(self.simulation.snapshot()["metrics"][name])  # type: ignore[index]

    def preemptions(self, handle: int) -> int:
        """How often a request was preempted, from the log."""
        name = f"{self.gateway.name}-{handle}"
        logs = self.simulation.logs
        return sum(1 for log in logs if log.event == "preempted" and log.fields["request_id"] == name)

    def ended(self, handle: int) -> dict[str, object]:
        """What the log says at the end of a request."""
        name = f"{self.gateway.name}-{handle}"
        logs = [log for log in self.simulation.logs if log.event == "request ended"]
        [fields] = [log.fields for log in logs if log.fields["request_id"] == name]
        return fields

    def check(self, *handles: int) -> None:
        """Every answer is what the request would get alone."""
        for handle in handles:
            answer = self.answer(handle)
            assert answer.failure is None, answer.failure
            wanted = expected_outputs(answer.submit.prompt_token_ids.tolist(), answer.submit.sampling, VOCAB)
            assert [answer.tokens[i] for i in range(len(wanted))] == wanted

    def rows(self, name: str) -> np.ndarray:
        """One array of all plans, put together."""
        return np.concatenate([getattr(plan, name) for plan in self.plans])


def single(**fields: object) -> Single:
    """Fields of the worker's hello or of the core's configuration; block_size 16 and no swap space by default."""
    worker = {"block_size": 16, "num_swap_blocks": 0, "max_model_len": 4096}
    worker |= {name: value for name, value in fields.items() if name in WORKER_FIELDS}  # type: ignore[misc]
    simulation = Simulation(**{name: value for name, value in fields.items() if name not in WORKER_FIELDS})
    gateway = simulation.add_gateway()
    peer = simulation.add_worker(**worker)
    peer.worker.plans = plans = []
    return Single(simulation, gateway, peer, plans)
