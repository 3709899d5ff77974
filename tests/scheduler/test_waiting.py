"""The order of those that wait."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_scheduler.events import Peer
from pagemill_scheduler.gateway import GatewayState
from pagemill_scheduler.request import Request
from pagemill_scheduler.waiting import WaitingQueue
from pagemill_shared.sampling import SamplingParams

GATEWAY = GatewayState("g", "model", 1, Peer("frontend", b"g"), 0.0)


def request(key: int, arrival: int) -> Request:
    prompt = np.ones(3, np.int32)
    return Request(GATEWAY, arrival, f"r{arrival}", prompt, SamplingParams(), {}, 0, arrival, 0.0, key, cache_salt="")


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), max_size=30))
def test_lower_keys_first_then_earlier_arrivals_whatever_comes_and_goes(steps: list[tuple[int, bool]]) -> None:
    queue, known = WaitingQueue(), []
    for arrival, (key, takes) in enumerate(steps):
        known.append(request(key, arrival))
        queue.add(known[-1])
        if takes:
            gone = known.pop(len(known) // 2)
            queue.remove(gone)
            assert gone not in queue
        assert list(queue) == sorted(known, key=lambda r: (r.key, r.arrival))
        assert len(queue) == len(known)


def test_one_that_does_not_wait_cannot_be_taken_out() -> None:
    queue = WaitingQueue()
    queue.add(request(0, 1))
    with pytest.raises(RuntimeError, match="request r2 is not in the waiting queue"):
        queue.remove(request(0, 2))
