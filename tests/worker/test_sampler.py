"""One sampling pass: distributions, mixed rows, penalties, bans, log-probabilities, faults."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers import RepetitionPenaltyLogitsProcessor as RepetitionPenalty

from pagemill_shared.sampling import SamplingParams, uniforms
from pagemill_worker import sampler
from pagemill_worker.grammar_compiler import GrammarCompiler
from pagemill_worker.grammar_rows import GrammarRows
from pagemill_worker.sampler import Sampled, sample
from pagemill_worker.sampling_rows import SamplingRows

CPU = torch.device("cpu")


def no_grammars(count: int, vocab_size: int) -> GrammarRows:
    return GrammarRows(count, vocab_size, GrammarCompiler(Path("nowhere"), vocab_size, []), lambda message: None)


def draw(
    logits: Tensor,
    params: list[SamplingParams],
    *,
    prompts: list[list[int]] | None = None,
    outputs: list[list[int]] | None = None,
    copies: int = 1,
    position: int = 10,
) -> Sampled:
    """Samples ``copies`` tokens from each row, as the sequences 0, 1, … of its request."""
    count, vocab_size = logits.shape
    prompts = prompts or [[0]] * count
    outputs = outputs or [[]] * count
    rows = SamplingRows(count, vocab_size, CPU, no_grammars(count, vocab_size))
    for slot, each in enumerate(params):
        rows.join(slot, each, np.array(prompts[slot], np.int32), np.array(outputs[slot], np.int32))
    batch = rows.select(
        np.arange(count),
        outputs=np.array([len(each) for each in outputs]),
        row_of=np.repeat(np.arange(count), copies),
        sequences=np.tile(np.arange(copies), count),
        positions=np.full(count * copies, position),
        output_of=lambda slot: np.array(outputs[slot], np.int32),
    )
    return sample(logits.clone(), batch, rows)


def random_logits(rows: int, vocab_size: int = 50, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_rows_take_the_largest() -> None:
    logits = random_logits(5)
    assert draw(logits, [SamplingParams(temperature=0.0)] * 5).token_ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("size", [1, 511, 512, 1024, 1500, 49152])
def test_the_largest_is_the_first_of_equals_wherever_it_stands(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randint(-3, 3, (40, size), generator=generator).float()
    logits[torch.arange(20), torch.randint(size, (20,), generator=generator)] = 4.0
    logits[0, -1], logits[1], logits[2], logits[2, -1] = 5.0, -torch.inf, -torch.inf, -7.0
    best, chosen = sampler.largest(logits)
    assert torch.equal(best, logits.amax(-1))
    assert chosen.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]


@pytest.mark.parametrize("column", [0, 700, 1499])
def test_the_largest_is_nan_where_there_is_one(column: int) -> None:
    logits = torch.zeros(3, 1500)
    logits[1, column], logits[1, 600], logits[2] = torch.nan, torch.inf, torch.nan
    best, chosen = sampler.largest(logits)
    assert best.isnan().tolist() == [False, True, True]
    assert ((chosen >= 0) & (chosen < 1500)).all()


@pytest.mark.parametrize(
    "tiny",
    [
        {"temperature": 1e-4}, {"temperature": 1e-6}, {"temperature": 1e-30}, {"temperature": 5e-324},
        {"temperature": 1.0, "top_p": 1e-4}, {"temperature": 1.0, "top_p": 0.0}, {"temperature": 1e4, "top_p": 1e-4},
        {"temperature": 1e-6, "top_p": 1e-4}, {"temperature": 1e4, "top_k": 1},
        {"temperature": 9.9e-4},
    ],
)  # fmt: skip
def test_what_leaves_one_token_equals_greedy(tiny: dict[str, float]) -> None:
    logits = random_logits(20, 2000) * 5
    logits[0, :2] = 100.0  # a tie: the first, as argmax
    params = [SamplingParams(**tiny, seed=seed) for seed in range(20)]  # type: ignore[arg-type]
    assert draw(logits, params).token_ids.tolist() == logits.argmax(-1).tolist()


def expected_distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """By transformers' warpers, min_p first."""
    warpers = LogitsProcessorList()
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    scaled = logits.unsqueeze(0) / params.temperature
    return warpers(torch.zeros(1, 1, dtype=torch.int64), scaled)[0].softmax(-1)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 5}, {"top_k": 10_000}, {"top_p": 0.7}, {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.8}, {"top_p": 0.9, "min_p": 0.05},
        {"top_k": 7, "top_p": 0.95, "min_p": 0.2, "temperature": 1.7},
    ],
)  # fmt: skip
def test_tokens_follow_the_distribution(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "BLOCK", 16)
    monkeypatch.setattr(sampler, "SLAB_ELEMENTS", 700 * 50)
    draws = 4000
    params = SamplingParams(**({"temperature": 1.0} | fields))
    logits = random_logits(1)
    tokens = draw(
        logits.expand(draws, -1),
        [SamplingParams(**({"temperature": 1.0} | fields | {"seed": s})) for s in range(draws)],
    )
    expected = expected_distribution(logits[0], params).double()
    observed = torch.bincount(torch.from_numpy(tokens.token_ids.astype(np.int64)), minlength=50).double()
    assert observed[expected == 0].sum() == 0
    common = expected * draws >= 5
    statistic = ((observed - expected * draws) ** 2 / (expected * draws))[common].sum()
    freedom = int(common.sum()) - 1
    # 5 standard deviations above the mean of a chi-square variable; the seeds are fixed.
    assert statistic < freedom + 5 * math.sqrt(2 * max(freedom, 1))


def test_number_is_looked_up_in_the_order_of_token_ids() -> None:
    logits = random_logits(8, 300)
    params = [SamplingParams(temperature=0.7, seed=100 + row) for row in range(8)]
    cumulative = (logits.double() / 0.7).softmax(-1).cumsum(-1)
    numbers = uniforms([p.seed for p in params], np.zeros(8), np.full(8, 33))
    expected = [int((cumulative[row] <= numbers[row]).sum()) for row in range(8)]
    assert draw(logits, params, position=33).token_ids.tolist() == expected


@pytest.mark.parametrize("fields", [{}, {"min_p": 1.0}, {"top_p": 0.3}, {"top_k": 2}])
def test_tokens_that_tie_are_equally_likely(fields: dict[str, Any]) -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, **fields) for seed in range(2000)]
    counts = np.bincount(draw(torch.zeros(2000, 8), params).token_ids, minlength=8)
    assert counts.min() > 180


def test_near_equal_logits_do_not_swap_tokens() -> None:
    """A sorted order would turn over with the noise between these two; the order of ids does not."""
    logits = torch.zeros(2, 64)
    logits[1, ::2] += 1e-6
    params = [SamplingParams(temperature=1.0, top_p=0.999, top_k=64, seed=9)] * 2
    first, second = draw(logits, params).token_ids.tolist()
    assert first == second


def test_ends_of_the_distribution_have_weight() -> None:
    """A number on an edge must not find a token that was left out."""
    weights = torch.zeros(1, 700)
    weights[0, [130, 131, 400, 640]] = torch.tensor([1.0, 1.0, 2.0, 4.0])
    numbers = torch.tensor([0.0, 0.125, 0.25, 0.5, math.nextafter(1, 0), 1.0], dtype=torch.float64)
    found = sampler._inverse(weights, torch.zeros(6, dtype=torch.int64), numbers)
    assert found.tolist() == [130, 131, 400, 640, 640, 640]


def test_several_tokens_from_one_row() -> None:
    logits = random_logits(3)
    params = [
        SamplingParams(temperature=1.0, seed=4),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=5),
    ]
    together = draw(logits, params, copies=6).token_ids.reshape(3, 6)
    assert len(set(together[0].tolist())) > 1
    assert together[1].tolist() == [int(logits[1].argmax())] * 6
    cumulative = logits.double().softmax(-1).cumsum(-1)
    for row in (0, 2):
        numbers = uniforms([params[row].seed] * 6, range(6), [10] * 6)
        assert together[row].tolist() == [int((cumulative[row] <= u).sum()) for u in numbers]


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_k=5, seed=1),
    SamplingParams(temperature=1.0, top_p=0.5, seed=2, logprobs=3),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, logprobs=0),
    SamplingParams(temperature=1.3, min_p=0.1, frequency_penalty=0.5, presence_penalty=-0.3, seed=3),
    SamplingParams(
        temperature=0.0, logit_bias_ids=np.array([7], np.int32), logit_bias_values=np.array([100.0], np.float32)
    ),
    SamplingParams(temperature=1.0, seed=8, min_tokens=5, eos_token_ids=np.array([3, 4], np.int32)),
    SamplingParams(temperature=2.0, seed=6),
]


def test_each_row_of_a_mixed_batch_is_as_alone() -> None:
    logits = random_logits(len(MIXED), 3000)
    prompts = [[1, 2, 3, 9]] * len(MIXED)
    outputs = [[5, 5, 6]] * len(MIXED)
    together = draw(logits, MIXED, prompts=prompts, outputs=outputs)
    position = 0
    for row, params in enumerate(MIXED):
        alone = draw(logits[row : row + 1], [params], prompts=prompts[:1], outputs=outputs[:1])
        assert alone.token_ids[0] == together.token_ids[row]
        if params.logprobs is not None:
            index = together.logprobs.rows.tolist().index(row)
            count = int(together.logprobs.counts[index])
            assert count == alone.logprobs.counts[0]
            part = slice(position, position + count)
            assert together.logprobs.token_ids[part].tolist() == alone.logprobs.token_ids.tolist()
            np.testing.assert_allclose(together.logprobs.values[part], alone.logprobs.values, atol=1e-5)
            position += count


def test_a_batch_that_needs_nothing_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_edit", "_draw", "_logprobs"):
        monkeypatch.setattr(sampler, name, lambda *_: pytest.fail("not needed"))
    draw(random_logits(3), [SamplingParams(temperature=0.0)] * 3)


def test_presence_and_frequency_count_outputs_alone() -> None:
    logits = random_logits(1)
    logits[0, [3, 4]] = torch.tensor([9.0, 8.9])
    penalties = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert draw(logits, [penalties], prompts=[[3] * 5]).token_ids.tolist() == [3]
    assert draw(logits, [penalties], prompts=[[3]], outputs=[[3]]).token_ids.tolist() == [4]
    frequency = SamplingParams(temperature=0.0, frequency_penalty=0.04)
    assert draw(logits, [frequency], outputs=[[3, 3]]).token_ids.tolist() == [3]
    assert draw(logits, [frequency], outputs=[[3, 3, 3]]).token_ids.tolist() == [4]
    presence = SamplingParams(temperature=0.0, presence_penalty=0.09)
    assert draw(logits, [presence], outputs=[[3, 3, 3, 3]]).token_ids.tolist() == [3]


def test_repetition_penalty_is_transformers_rule() -> None:
    logits = random_logits(200)
    ids = torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(1))
    expected = RepetitionPenalty(1.7)(ids.expand(200, -1), logits).argmax(-1)
    params = [SamplingParams(temperature=0.0, repetition_penalty=1.7)] * 200
    prompts, outputs = [ids[0, :8].tolist()] * 200, [ids[0, 8:].tolist()] * 200
    tokens = draw(logits, params, prompts=prompts, outputs=outputs).token_ids
    assert tokens.tolist() == expected.tolist() != logits.argmax(-1).tolist()


def bias(values: dict[int, float], **fields: Any) -> SamplingParams:
    return SamplingParams(
        logit_bias_ids=np.array(list(values), np.int32),
        logit_bias_values=np.array(list(values.values()), np.float32),
        **({"temperature": 0.0} | fields),
    )


def test_logit_bias_bans_and_forces() -> None:
    logits = random_logits(3)
    best = logits.argmax(-1).tolist()
    second = logits[0].topk(2).indices[1].item()
    params = [bias({best[0]: -100.0}), bias({17: 100.0, 18: 3.0}), bias({17: 100.0}, temperature=1.0)]
    assert draw(logits, params).token_ids.tolist() == [second, 17, 17]
    assert draw(logits, [bias({99: 5.0, 50: 5.0})] * 3).token_ids.tolist() == best  # beyond the vocabulary: no effect


def test_min_tokens_bans_end_and_stop_tokens() -> None:
    logits = torch.zeros(1, 10)
    logits[0, [2, 3, 4]] = torch.tensor([9.0, 8.0, 7.0])
    ends = {"eos_token_ids": np.array([2], np.int32), "stop_token_ids": np.array([3, 99], np.int32)}
    params = SamplingParams(temperature=0.0, min_tokens=2, **ends)  # type: ignore[arg-type]
    assert [draw(logits, [params], outputs=[[5] * n]).token_ids[0] for n in range(4)] == [4, 4, 2, 2]
    ordinary = SamplingParams(temperature=0.0, min_tokens=2, ignore_eos=True, **ends)  # type: ignore[arg-type]
    assert draw(logits, [ordinary]).token_ids.tolist() == [2]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(3)
    params = [
        bias({5: 50.0}, logprobs=4),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=0),
    ]
    result = draw(logits, params).logprobs
    assert result.rows.tolist() == [0, 2]
    assert result.counts.tolist() == [5, 1]
    expected = logits.log_softmax(-1)
    top = logits[0].topk(4).indices.tolist()
    assert result.token_ids.tolist() == [5, *top, int(logits[2].argmax())]
    np.testing.assert_allclose(result.values[:5], expected[0, [5, *top]], atol=1e-5)
    np.testing.assert_allclose(result.values[5], expected[2].max(), atol=1e-5)
    assert result.ranks.tolist() == [int((logits[0] > logits[0, 5]).sum()) + 1, 1]


def test_more_logprobs_than_tokens() -> None:
    result = draw(random_logits(1, 6), [SamplingParams(temperature=0.0, logprobs=20)]).logprobs
    assert result.counts.tolist() == [7]


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_rows_that_are_not_finite_fail_alone(wrong: float) -> None:
    logits = random_logits(len(MIXED), 3000)
    good = draw(logits, MIXED).token_ids
    for row in range(len(MIXED)):
        broken = logits.clone()
        broken[row, 11] = wrong
        result = draw(broken, MIXED)
        assert result.token_ids[row] == -1
        assert row not in result.logprobs.rows
        others = [other for other in range(len(MIXED)) if other != row]
        assert result.token_ids[others].tolist() == good[others].tolist()


def test_minus_infinity_is_a_ban_unless_nothing_is_left() -> None:
    logits = random_logits(2)
    logits[0, logits[0].argmax()] = -math.inf
    logits[1] = -math.inf
    assert draw(logits, [SamplingParams(temperature=0.0)] * 2).token_ids.tolist() == [int(logits[0].argmax()), -1]
    only = torch.full((1, 4), -math.inf)
    only[0, 2] = 1.0
    banned = SamplingParams(temperature=1.0, min_tokens=1, eos_token_ids=np.array([2], np.int32))
    assert draw(only, [banned]).token_ids.tolist() == [-1]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_parameters_give_a_token_that_may_be_drawn(data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(1, 40))
    count = data.draw(st.integers(1, 5))
    scale = data.draw(st.sampled_from([0.0, 1.0, 50.0, 1e30]))
    logits = random_logits(count, vocab_size, data.draw(st.integers(0, 99))) * scale
    params = [
        SamplingParams(
            temperature=data.draw(st.floats(0, 1e4)),
            top_k=data.draw(st.integers(0, 50)),
            top_p=data.draw(st.floats(0, 1)),
            min_p=data.draw(st.floats(0, 1)),
            repetition_penalty=data.draw(st.floats(1e-4, 1e4)),
            presence_penalty=data.draw(st.floats(-2, 2)),
            frequency_penalty=data.draw(st.floats(-2, 2)),
            seed=data.draw(st.integers(0, 2**63 - 1)),
            logprobs=data.draw(st.none() | st.integers(0, 20)),
        )
        for _ in range(count)
    ]
    outputs = [data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=4)) for _ in range(count)]
    result = draw(logits, params, outputs=outputs, position=data.draw(st.integers(0, 2**31)))
    again = draw(logits, params, outputs=outputs, position=10)
    assert result.token_ids.shape == (count,)
    finite = scale < 1e30
    assert all(0 <= token < vocab_size or (not finite and token == -1) for token in result.token_ids.tolist())
    for row, each in enumerate(params):
        if each.top_k and again.token_ids[row] >= 0 and each.repetition_penalty == 1 and not outputs[row]:
            limit = logits[row].topk(min(each.top_k, vocab_size)).values[-1]
            assert logits[row, again.token_ids[row]] >= limit


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


def test_only_allowed_tokens_are_sampled_and_others_are_told_as_they_were() -> None:
    logits = random_logits(3)
    worst = logits.argsort(-1)[:, :3]
    params = [
        SamplingParams(temperature=0.0, allowed_token_ids=ints(*worst[0].tolist()), logprobs=2),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=5.0, seed=3, allowed_token_ids=ints(*worst[2].tolist())),
    ]
    result = draw(logits, params)
    assert result.token_ids[0] == worst[0, 2]
    assert result.token_ids[1] == logits[1].argmax()
    assert result.token_ids[2] in worst[2].tolist()
    assert result.logprobs.token_ids[1] == logits[0].argmax()  # log-probabilities are those of the raw logits


def test_a_bad_word_is_never_completed() -> None:
    logits = random_logits(4)
    best, second = logits[0].argsort(descending=True)[:2].tolist()
    logits[1:] = logits[0]
    words = {"bad_word_ids": ints(7, 8, best, best, 9, best), "bad_word_lengths": ints(3, 1, 2)}
    single = {"bad_word_ids": ints(7, 8, best), "bad_word_lengths": ints(3)}
    params = [SamplingParams(temperature=0.0, **fields) for fields in (words, single, single, single)]  # type: ignore[arg-type]
    result = draw(logits, params, outputs=[[], [1, 7, 8], [7, 8, 1], [8]])
    assert result.token_ids.tolist() == [second, second, best, best]


def test_limits_follow_forks_and_leave_with_the_slot() -> None:
    rows = SamplingRows(3, 50, CPU, no_grammars(3, 50))
    rows.join(
        0,
        SamplingParams(allowed_token_ids=ints(3, 49), bad_word_ids=ints(4), bad_word_lengths=ints(1)),
        ints(1),
        ints(),
    )
    rows.fork(0, 2)
    rows.release(0)
    assert rows.limits.allowing.tolist() == rows.limits.worded.tolist() == [False, False, True]
    bits = np.unpackbits(rows.limits.masks(np.array([2])), axis=1, bitorder="little")
    assert np.flatnonzero(bits).tolist() == [3, 49]
    assert rows.limits.banned(2, ints()).tolist() == [4]
