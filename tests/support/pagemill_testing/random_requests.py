"""Requests of every kind, as hypothesis draws them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from pagemill_shared.sampling import Pooling, SamplingParams


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    beam_width = draw(st.sampled_from([0, 0, 0, 1, 2, 3]))
    width = beam_width or draw(st.sampled_from([1, 1, 1, 2, 3, 4]))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 5)),
        max_tokens=draw(st.integers(int(beam_width or width > 1), 16 if width == 1 else 8)),
        min_tokens=0 if beam_width else draw(st.integers(0, 4)),
        ignore_eos=draw(st.booleans()),
        eos_token_ids=np.arange(draw(st.sampled_from([0, 5, 100])), dtype=np.int32),
        stop_token_ids=np.array(draw(st.lists(st.integers(100, 300), max_size=12)), np.int32),
        logprobs=draw(st.sampled_from([None, None, 0])),
        n=draw(st.integers(1, beam_width)) if beam_width else width,
        beam_width=beam_width,
        length_penalty=draw(st.sampled_from([0.0, 1.0, -1.0, 2.0])),
        early_stopping=draw(st.integers(0, 2)),
        grammar="" if beam_width else draw(st.sampled_from(["", "", "g"])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
        pooling=draw(st.sampled_from([0, 0, 0, Pooling.LAST, Pooling.MEAN])),
    )


# Many begin alike, so that they meet in the prefix cache.
prompts = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
    st.builds(lambda length, end: [7] * length + end, st.integers(1, 16), st.lists(st.integers(0, 3), max_size=4)),
)

requests = st.tuples(prompts, sampling_params(), st.integers(-1, 1), st.sampled_from(["", "", "pepper"]))
"""Prompt, sampling, priority, salt."""
