"""The queue of evictable blocks against an ordered dict."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill_scheduler.lru_queue import LruQueue

NUM_BLOCKS = 7

steps = st.tuples(st.sampled_from(["add", "remove", "take"]), st.lists(st.integers(1, NUM_BLOCKS), unique=True))


@given(st.lists(steps, max_size=100))
@settings(max_examples=200, deadline=None)
def test_blocks_leave_in_the_order_in_which_they_came(history: list[tuple[str, list[int]]]) -> None:
    queue, model = LruQueue(NUM_BLOCKS), dict[int, None]()
    for step, blocks in history:
        if step == "add":
            new = [block for block in blocks if block not in model]
            queue.add(np.array(new, np.int32))
            model |= dict.fromkeys(new)
        elif step == "remove":
            known = [block for block in blocks if block in model]
            queue.remove(np.array(known, np.int32))
            for block in known:
                del model[block]
        elif count := min(len(blocks), len(model)):
            oldest = list(model)[:count]
            assert queue.take(count).tolist() == oldest
            for block in oldest:
                del model[block]
        assert queue.blocks().tolist() == list(model)
        assert len(queue) == len(model)
