"""What the shared dicts of end tokens say, against the specification."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagemill_scheduler import end_tokens
from pagemill_scheduler.end_tokens import EndTokens
from pagemill_scheduler.request import finish_reason
from pagemill_shared.sampling import SamplingParams

ids = st.lists(st.integers(0, 3), max_size=3)


def sampling(eos: list[int], stop: list[int], ignore_eos: bool) -> SamplingParams:
    return SamplingParams(
        eos_token_ids=np.array(eos, np.int32), stop_token_ids=np.array(stop, np.int32), ignore_eos=ignore_eos
    )


@given(st.lists(st.builds(sampling, ids, ids, st.booleans()), min_size=1, max_size=8))
def test_each_request_hears_of_its_own_end_tokens(requests: list[SamplingParams]) -> None:
    ends = EndTokens()
    for one in requests:
        reasons = {token: finish_reason(one, token, output_length=1) for token in range(4)}
        assert ends.of(one) == {token: reason for token, reason in reasons.items() if reason}


def test_equal_ones_are_one_dict_and_too_many_are_forgotten() -> None:
    ends, plenty = EndTokens(), end_tokens.MAX_KNOWN + 1
    first = ends.of(sampling([1], [2], False))
    assert ends.of(sampling([1], [2], False)) is first
    for token in range(plenty):
        ends.of(sampling([], [token], False))
    assert ends.of(sampling([1], [2], False)) is not first
    assert ends.of(sampling([1], [2], False)) == first
