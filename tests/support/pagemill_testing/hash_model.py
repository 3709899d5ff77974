"""A model that is a hash: the next token is a function of all tokens before it. So what a request must produce is known
without any batch, block or schedule, and a wrong token anywhere before shows in all that come after."""

from __future__ import annotations

import hashlib

import numpy as np

from pagemill_scheduler.beams import BeamSearch, Candidates
from pagemill_shared.sampling import Pooling, SamplingParams

_MODULUS = 2**61 - 1
_BASE = 0x1F3D5B79A8C6E4D
START = 1
"""The hash of no token."""


def extend(prefix: int, token: int) -> int:
    """The hash of a sequence that goes on with ``token`` after one whose hash is ``prefix``."""
    return (prefix * _BASE + token + 1) % _MODULUS


def prefix_hash(tokens: list[int]) -> int:
    value = START
    for token in tokens:
        value = extend(value, token)
    return value


def _draw(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def next_token(prefix: int, sampling: SamplingParams, sequence: int, vocab_size: int) -> int:
    """The choice after a prefix: greedy at temperature 0, otherwise also a function of seed and sequence."""
    draw = (sampling.seed, sequence) if sampling.temperature > 0 else (0, 0)
    return _draw(prefix, draw) % vocab_size


def best_candidates(prefix: int, count: int, vocab_size: int) -> Candidates:
    """The ``count`` most likely continuations of a beam, best first."""
    found: dict[int, None] = {}
    attempt = 0
    while len(found) < count:
        found[_draw(prefix, attempt) % vocab_size] = None
        attempt += 1
    steps = [1 + _draw(prefix, token, "value") % 64 for token in found]
    values = -np.cumsum(np.array(steps, np.float32)) / np.float32(64)
    return Candidates(np.array(list(found), np.int32), values.astype(np.float32))


def prompt_logprob(prefix: int) -> float:
    """Of the prompt token that follows the prefix."""
    return -float(_draw(prefix, "prompt") % 64)


def position_state(prefix: int) -> float:
    """The hidden state of the last token of the prefix, a whole number."""
    return float(_draw(prefix, "state") % 1000)


def expected_prompt_logprobs(prompt: list[int]) -> list[float]:
    """Of all its tokens but the first."""
    return [prompt_logprob(prefix_hash(prompt[:i])) for i in range(1, len(prompt))]


def expected_pooled(prompt: list[int], pooling: int) -> float:
    """The last position's state, or the sum over all."""
    states = [position_state(prefix_hash(prompt[: i + 1])) for i in range(len(prompt))]
    return states[-1] if pooling == Pooling.LAST else sum(states)


def expected_output(prompt: list[int], sampling: SamplingParams, vocab_size: int, sequence: int = 0) -> list[int]:
    """What a sampled sequence must produce, whatever happens to it on the way."""
    prefix = prefix_hash(prompt)
    output: list[int] = []
    ends = set(sampling.end_token_ids.tolist())
    while len(output) < sampling.max_tokens:
        token = next_token(prefix, sampling, sequence, vocab_size)
        output.append(token)
        prefix = extend(prefix, token)
        if token in ends and len(output) >= sampling.min_tokens:
            break
    return output


def expected_outputs(prompt: list[int], sampling: SamplingParams, vocab_size: int) -> list[list[int]]:
    """What every sequence of a request must produce: parallel samples, or the hypotheses of a beam search."""
    if not sampling.beam_width:
        return [expected_output(prompt, sampling, vocab_size, index) for index in range(sampling.n)]
    beams = BeamSearch(sampling)
    outputs = [np.zeros(0, np.int32)]
    start = prefix_hash(prompt)
    prefixes = [start]
    while not beams.done:
        candidates = [best_candidates(prefix, sampling.num_candidates, vocab_size) for prefix in prefixes]
        steps = beams.advance(candidates, outputs, [[] for _ in outputs])
        outputs = [np.append(outputs[step.parent], np.int32(step.token)).astype(np.int32) for step in steps]
        prefixes = [extend(prefixes[step.parent], step.token) for step in steps]
    return [hypothesis.tokens.tolist() for hypothesis in beams.hypotheses[: sampling.n]]
