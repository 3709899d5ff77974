"""Beam search against a search that keeps every hypothesis as a plain list. tests/worker/test_beam_equality.py compares
it with transformers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagemill_testing.single import beams as beam_params
from pagemill_testing.single import greedy, ids, single

from pagemill_scheduler.beams import BeamSearch, Candidates, entry_of
from pagemill_shared.messages import FinishReason
from pagemill_shared.sampling import EarlyStopping, SamplingParams

VOCAB = 6


def logits(seed: int, prefix: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities of every token after ``prefix``; a random function of it."""
    values = np.random.default_rng([seed, len(prefix), *prefix]).normal(size=VOCAB) * 2
    return (values - np.log(np.exp(values).sum())).astype(np.float32)


def candidates_of(seed: int, prefix: tuple[int, ...], count: int) -> Candidates:
    values = logits(seed, prefix)
    best = np.argsort(-values, kind="stable")[:count]
    return Candidates(best.astype(np.int32), values[best])


def run(seed: int, sampling: SamplingParams) -> BeamSearch:
    search = BeamSearch(sampling)
    outputs = [np.zeros(0, np.int32)]
    while not search.done:
        candidates = [candidates_of(seed, tuple(output.tolist()), sampling.num_candidates) for output in outputs]
        steps = search.advance(candidates, outputs, [[] for _ in outputs])
        outputs = [np.append(outputs[s.parent], np.int32(s.token)).astype(np.int32) for s in steps]
    return search


def plain_search(seed: int, sampling: SamplingParams) -> list[tuple[float, tuple[int, ...]]]:
    """Beam search over whole vocabularies. At each step all continuations of all beams are ranked; of the best
    ``width``, those that end become hypotheses; the best ``width`` that do not end go on."""
    width, ends = sampling.beam_width, set(sampling.end_token_ids.tolist())
    beams: list[tuple[np.float32, tuple[int, ...]]] = [(np.float32(0), ())]
    done: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, sampling.max_tokens + 1):
        ranked = sorted(
            (
                (np.float32(score + value), index, token, (*prefix, token))
                for index, (score, prefix) in enumerate(beams)
                for token, value in enumerate(logits(seed, prefix))
            ),
            key=lambda entry: (-entry[0], entry[1], entry[2]),
        )
        last = length == sampling.max_tokens
        full = len(done) == width
        if not (full and sampling.early_stopping == EarlyStopping.WHEN_FULL):
            for total, _, token, output in ranked[:width]:
                if last or token in ends:
                    done.append((float(np.float32(total / np.float32(length**sampling.length_penalty))), output))
            done = sorted(done, key=lambda entry: -entry[0])[:width]
        beams = [(total, output) for total, _, token, output in ranked if token not in ends and not last][:width]
        if not beams:
            break
        if len(done) == width:
            if sampling.early_stopping == EarlyStopping.WHEN_FULL:
                break
            never = sampling.early_stopping == EarlyStopping.NEVER and sampling.length_penalty > 0
            reach = sampling.max_tokens if never else length
            if not beams[0][0] / np.float32(reach**sampling.length_penalty) > np.float32(done[-1][0]):
                break
    return done


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 4),
    max_tokens=st.integers(1, 7),
    ends=st.sets(st.integers(0, VOCAB - 1), max_size=2),
    penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    stopping=st.sampled_from(list(EarlyStopping)),
)
def test_against_a_plain_search(
    seed: int, width: int, max_tokens: int, ends: set[int], penalty: float, stopping: EarlyStopping
) -> None:
    sampling = beam_params(
        width,
        max_tokens,
        length_penalty=penalty,
        early_stopping=stopping,
        eos_token_ids=np.array(sorted(ends), np.int32),
    )
    found = [(float(h.score), tuple(h.tokens.tolist())) for h in run(seed, sampling).hypotheses]
    assert found == plain_search(seed, sampling)


def test_a_width_that_holds_every_sequence_finds_the_best_of_all() -> None:
    for seed in range(20):
        top = run(seed, beam_params(VOCAB**2, 2, length_penalty=0.0)).hypotheses[0]
        pairs = [(a, b) for a in range(VOCAB) for b in range(VOCAB)]
        score, best = max((logits(seed, ())[a] + logits(seed, (a,))[b], (a, b)) for a, b in pairs)
        assert tuple(top.tokens.tolist()) == best
        assert float(top.score) == pytest.approx(float(score))


def test_finish_reasons() -> None:
    for seed in range(30):
        sampling = beam_params(3, 5, eos_token_ids=np.array([1], np.int32), stop_token_ids=np.array([2], np.int32))
        for hypothesis in run(seed, sampling).hypotheses:
            last = int(hypothesis.tokens[-1])
            expected = {1: FinishReason.EOS, 2: FinishReason.STOP_TOKEN}.get(last, FinishReason.LENGTH)
            assert hypothesis.finish is expected


def test_an_ignored_end_token_is_an_ordinary_one() -> None:
    sampling = beam_params(2, 6, eos_token_ids=np.arange(VOCAB, dtype=np.int32), ignore_eos=True)
    assert {len(h.tokens) for h in run(1, sampling).hypotheses} == {6}


def test_log_probabilities_name_the_token_first_then_the_best() -> None:
    entry = entry_of(Candidates(np.array([4, 2, 9], np.int32), np.array([-1, -2, -3], np.float32)), 9, 2)
    assert (entry.rank, entry.token_ids.tolist(), entry.values.tolist()) == (3, [9, 4, 2], [-3, -1, -2])


@pytest.mark.parametrize("n", [1, 3])
def test_beams_are_delivered_at_the_end_with_scores_and_log_probabilities(n: int) -> None:
    core = single(block_size=4, num_blocks=40)
    handle = core.submit(ids(7), greedy(6, beam_width=3, n=n, logprobs=0))
    other = core.submit(ids(7, 2), greedy(3))
    while not core.answer(other).done:
        assert core.answer(handle).tokens == {}
        core.step()
    core.run()
    core.check(handle)
    answer = core.answer(handle)
    assert sorted(answer.finishes) == list(range(n))
    scores = [answer.scores[index] for index in range(n)]
    assert scores == sorted(scores, reverse=True)
    for index in range(n):
        total = sum(answer.logprobs[index])
        assert total / len(answer.tokens[index]) == pytest.approx(scores[index], rel=1e-5)
