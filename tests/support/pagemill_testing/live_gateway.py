"""A gateway without HTTP, over a real socket: submits requests and collects what is delivered."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagemill_shared.channel import Context, DealerChannel
from pagemill_shared.curve import ClientKeys
from pagemill_shared.link import PeerLink
from pagemill_shared.messages import (
    Delivery,
    FinishReason,
    FleetStatus,
    GatewayHello,
    GatewaySync,
    GatewayWelcome,
    StateQuery,
    StateReport,
    SubmitRequest,
)
from pagemill_shared.sampling import SamplingParams
from pagemill_shared.schema import Message
from pagemill_testing.sockets import wait_until


@dataclass
class Answer:
    """One request of one sequence."""

    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason = FinishReason.NOT_FINISHED
    failure: str = ""

    @property
    def done(self) -> bool:
        return self.finish is not FinishReason.NOT_FINISHED or bool(self.failure)


class LiveGateway:
    """Works only while one of its ``until…`` methods waits."""

    def __init__(self, context: Context, endpoint: str, keys: ClientKeys | None = None) -> None:
        self.channel = DealerChannel(context, "frontend", endpoint, keys=keys)
        self.channel.socket.linger = 0
        self.link = PeerLink(GatewayHello("test-gateway", "model"), heartbeat_interval=0.05, peer_timeout=60.0)
        self.fleet = FleetStatus(0, 0, 0, "")
        self.answers: dict[int, Answer] = {}
        self.incarnations: list[int] = []
        self._reports: dict[int, dict[str, Any]] = {}
        self._queries = 0

    def until(self, condition: Any, what: str = "condition") -> None:
        def probe() -> bool:
            self._work()
            return bool(condition())

        wait_until(probe, self.channel.socket, what=what)

    def until_ready(self, workers: int = 1) -> None:
        self.until(lambda: self.link.in_epoch and self.fleet.ready_workers == workers, f"{workers} ready workers")

    def until_done(self, *answers: Answer) -> None:
        self.until(lambda: all(answer.done for answer in answers), "all answers")

    def submit(self, prompt: list[int], sampling: SamplingParams) -> Answer:
        answer = Answer(prompt, sampling)
        handle = len(self.answers) + 1
        self.answers[handle] = answer
        self._submit(handle, answer)
        return answer

    def state(self) -> dict[str, Any]:
        """The scheduler's state."""
        self._queries += 1
        query = self._queries
        assert self.channel.send(StateQuery(query))
        self.until(lambda: query in self._reports, "state report")
        return self._reports.pop(query)

    def _submit(self, handle: int, answer: Answer) -> None:
        epoch, number = self.link.next_number()
        prompt = np.array(answer.prompt, np.int32)
        self.channel.send(SubmitRequest(epoch, number, handle, f"request-{handle}", prompt, answer.sampling))

    def _work(self) -> None:
        now = time.monotonic()
        for message in self.channel.receive(100):
            outcome = self.link.received(now, message)
            self._send(now, outcome.send)
            for item in outcome.apply:
                self._apply(item)
        self._send(now, self.link.tick(now))

    def _send(self, now: float, messages: Sequence[Message]) -> None:
        for message in messages:
            if not self.channel.send(message):
                self.link.unsent(now)

    def _apply(self, message: Message) -> None:
        match message:
            case GatewayWelcome(incarnation=incarnation):
                self.incarnations.append(incarnation)
                live = {handle: answer for handle, answer in self.answers.items() if not answer.done}
                self.channel.send(GatewaySync(*self.link.next_number(), np.array(list(live), np.int32)))
                for handle, answer in live.items():
                    self._submit(handle, answer)
            case FleetStatus():
                self.fleet = message
            case StateReport():
                self._reports[message.query] = json.loads(message.state)
            case Delivery():
                self._deliver(message)

    def _deliver(self, delivery: Delivery) -> None:
        at = 0
        for handle, offset, count, finish in zip(
            delivery.handles, delivery.offsets, delivery.counts, delivery.finishes, strict=True
        ):
            answer = self.answers[int(handle)]
            tokens = delivery.token_ids[at : at + count].tolist()
            at += count
            assert offset <= len(answer.tokens), "tokens were left out"
            overlap = answer.tokens[offset : offset + len(tokens)]
            assert overlap == tokens[: len(overlap)], "tokens changed"
            answer.tokens[offset:] = tokens if offset + len(tokens) >= len(answer.tokens) else answer.tokens[offset:]
            answer.finish = FinishReason(int(finish))
        for failure in delivery.failures:
            self.answers[failure.handle].failure = f"{failure.code}: {failure.message}"
