"""A scheduler client without sockets, whose scheduler the test plays by hand, and requests whose tokens are letters."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill_gateway.choice import Choice
from pagemill_gateway.client import SchedulerClient
from pagemill_gateway.detokenizer import Detokenizer
from pagemill_gateway.output import Output
from pagemill_gateway.prompt import Prompt
from pagemill_gateway.requests import GatewayRequest
from pagemill_gateway.stops import StopStrings
from pagemill_shared.link import PeerLink
from pagemill_shared.messages import Delivery, FleetStatus, GatewayHello, GatewayWelcome, RequestFailure
from pagemill_shared.sampling import SamplingParams
from pagemill_shared.schema import Message

FLEET = FleetStatus(1, 100, 50, "print")
NO_FLEET = FleetStatus(0, 0, 0, "")


class Letters(Detokenizer):
    """Token 0 is "a", 1 is "b", …"""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id)

    def finish(self) -> str:
        return ""


class Record:
    """Latencies that were reported."""

    def __init__(self) -> None:
        self.reported: list[tuple[Any, ...]] = []

    def first_token(self, seconds: float) -> None:
        self.reported.append(("first", seconds))

    def next_token(self, seconds: float) -> None:
        self.reported.append(("next", seconds))

    def finished(self, seconds: float, reason: str) -> None:
        self.reported.append((reason, seconds))


def request(
    stop: str | None = None, streaming: bool = True, timing: Record | None = None, n: int = 1, min_tokens: int = 0
) -> GatewayRequest:
    stops = StopStrings([stop], False) if stop else None
    choices = [Choice(i, [1, 2], Letters(), stops.finder() if stops else None, min_tokens, False) for i in range(n)]
    return GatewayRequest(
        request_id="r",
        prompt=Prompt([1, 2]),
        sampling=SamplingParams(n=n),
        priority=0,
        cache_salt="",
        choices=choices,
        shown=n,
        output=Output(choices, streaming),
        timing=timing or Record(),
        arrived=0.0,
        field_names={"n": "best_of"},
    )


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


class Bench:
    """A client with a scheduler that is played by hand."""

    def __init__(self, no_worker_timeout: float = 5.0) -> None:
        hello = GatewayHello("g", "print")
        self.link = PeerLink(hello, heartbeat_interval=0.5, peer_timeout=3.0)
        self.client = SchedulerClient(self.link, "print", no_worker_timeout, 0.0)
        self.number = 0
        self.now = 0.0

    def welcome(self, epoch: int, incarnation: int = 1, fleet: FleetStatus = FLEET) -> list[Message]:
        self.number = 0
        sent = self.client.received(self.now, GatewayWelcome(epoch, incarnation))
        assert not self.client.received(self.now, fleet)
        return sent

    def deliver(
        self,
        handle: int,
        offset: int,
        tokens: list[int],
        finish: int = 0,
        failures: tuple[RequestFailure, ...] = (),
        sequence: int = 0,
    ) -> list[Message]:
        rows = [(handle, sequence, offset, tokens, finish)] if handle else []
        return self.deliver_rows(rows, failures)

    def deliver_rows(
        self, rows: list[tuple[int, int, int, list[int], int]], failures: tuple[RequestFailure, ...] = ()
    ) -> list[Message]:
        """Rows are (handle, sequence, offset, tokens, finish)."""
        self.number += 1
        delivery = Delivery(
            self.link.epoch,
            self.number,
            handles=ints(*(handle for handle, *_ in rows)),
            sequences=ints(*(sequence for _, sequence, *_ in rows)),
            offsets=ints(*(offset for _, _, offset, _, _ in rows)),
            counts=ints(*(len(tokens) for *_, tokens, _ in rows)),
            finishes=ints(*(finish for *_, finish in rows)),
            cached_tokens=ints(*(0 for _ in rows)),
            scores=np.zeros(len(rows), np.float32),
            token_ids=ints(*(token for *_, tokens, _ in rows for token in tokens)),
            failures=failures,
        )
        return self.client.received(self.now, delivery)


def kinds(messages: list[Message]) -> list[type[Message]]:
    return [type(message) for message in messages]


def text_of(request: GatewayRequest, sequence: int = 0) -> str:
    return request.choices[sequence].take()[0]
