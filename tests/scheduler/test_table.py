"""What the table of running sequences counts, so that nobody need search its rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagemill_scheduler.end_tokens import EndTokens
from pagemill_scheduler.events import Peer
from pagemill_scheduler.gateway import GatewayState
from pagemill_scheduler.request import Request, Sequence, finish_reason
from pagemill_scheduler.table import SlotTable
from pagemill_shared.messages import FinishReason
from pagemill_shared.sampling import SamplingParams

GATEWAY = GatewayState("g", "model", 1, Peer("frontend", b"g"), 0.0)
ENDS = EndTokens()
PROMPT, CAPACITY = np.array([5, 5, 5], np.int32), 4
ALIKE = 4096
"""An end token with the low bits of 0."""

ids = st.lists(st.sampled_from([0, 1, 2, 3, ALIKE]), max_size=4)
ends = st.tuples(ids, ids, st.booleans(), st.integers(0, 2), st.integers(-2, 2))


def sequence(eos: list[int], stop: list[int], ignore_eos: bool, min_tokens: int, priority: int) -> Sequence:
    sampling = SamplingParams(
        eos_token_ids=np.array(eos, np.int32),
        stop_token_ids=np.array(stop, np.int32),
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
    )
    return Sequence(
        Request(GATEWAY, 1, "r", PROMPT, sampling, ENDS.of(sampling), priority, 1, 0.0, key=0, cache_salt=""), 0, PROMPT
    )


def reason(one: Sequence, token: int) -> FinishReason:
    """That of a sequence whose first output token is ``token``, and whose length is no matter."""
    return finish_reason(replace(one.request.sampling, max_tokens=100), token, 1)


@given(st.lists(st.tuples(ends, st.booleans()), min_size=1, max_size=8), st.data())
def test_a_token_ends_the_rows_that_it_is_an_end_token_of(steps: list[tuple[tuple, bool]], data: st.DataObject) -> None:
    table, rows = SlotTable(CAPACITY, 32, 4), list[Sequence]()
    for fields, leaves in steps:
        if len(rows) == CAPACITY:
            break
        rows.append(sequence(*fields))
        table.join(rows[-1], np.array([1], np.int32), 0, 0, 0)
        if leaves:
            gone = rows.pop(0)
            table.leave(np.array([gone.slot]))
    assert table.lowest_priority == max((row.request.priority for row in rows), default=-(2**31))
    assert table.top >= max((row.slot + 1 for row in rows), default=0)
    if not rows:
        assert table.top == 0
        return
    tokens = [data.draw(st.sampled_from([0, 1, 2, 5, ALIKE])) for _ in rows]
    slots = np.array([row.slot for row in rows])
    length = table.append(slots, np.array(tokens, np.int32))
    reasons = [reason(row, token) for row, token in zip(rows, tokens, strict=True)]
    expected = [(i, reason) for i, reason in enumerate(reasons) if reason]
    assert table.stopped(slots, np.array(tokens, np.int32), length) == expected
