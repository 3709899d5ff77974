"""The sampler on a device: nothing waits before the read, and what is computed in another way there is the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagemill_testing.no_waiting import NoWaiting

from pagemill_shared.sampling import SamplingParams
from pagemill_worker import sampler
from pagemill_worker.grammar_compiler import GrammarCompiler
from pagemill_worker.grammar_rows import GrammarRows
from pagemill_worker.nucleus import nucleus_by_halving, nucleus_by_sorting
from pagemill_worker.sampler import draw, sample
from pagemill_worker.sampling_rows import SampleBatch, SamplingRows


def sampling_rows(params: list[SamplingParams], vocab_size: int, device: str) -> SamplingRows:
    """A slot for each of ``params``, all with the same few tokens behind them."""
    count = len(params)
    grammars = GrammarRows(count, vocab_size, GrammarCompiler(Path("nowhere"), vocab_size, []), lambda message: None)
    rows = SamplingRows(count, vocab_size, torch.device(device), grammars)
    for slot, each in enumerate(params):
        rows.join(slot, each, np.array([1, 2], np.int32), np.array([3, 5, 5], np.int32))
    return rows


def select(rows: SamplingRows, slots: list[int], copies: int = 1) -> SampleBatch:
    """``copies`` tokens for each of ``slots``."""
    count = len(slots)
    return rows.select(
        np.array(slots),
        outputs=np.full(count, 3),
        row_of=np.repeat(np.arange(count), copies),
        sequences=np.tile(np.arange(copies), count),
        positions=np.full(count * copies, 9),
        output_of=lambda slot: np.array([3, 5, 5], np.int32),
    )


def test_nothing_waits_for_the_device_before_what_was_drawn_is_read() -> None:
    device, vocab_size, count = torch.device("meta"), 200, 8
    everything = {
        "temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2,
        "presence_penalty": 0.4, "frequency_penalty": 0.3, "logprobs": 3, "min_tokens": 5, "seed": 4,
        "logit_bias_ids": np.array([4, 9], np.int32), "logit_bias_values": np.array([1.0, -2.0], np.float32),
        "stop_token_ids": np.array([7], np.int32),
    }  # fmt: skip
    params = [SamplingParams(**everything), SamplingParams(temperature=0.0), SamplingParams(beam_width=2, n=2)]
    rows = sampling_rows([params[slot % 3] for slot in range(count)], vocab_size, "meta")
    plain, batch, several = select(rows, [1, 4, 7]), select(rows, list(range(count))), select(rows, [0, 1, 3], 2)
    masks = np.full((2, -(-vocab_size // 8)), 255, np.uint8)
    batch = replace(batch, constrained=np.array([0, 1]), masks=masks)
    with NoWaiting():
        assert draw(torch.empty(3, vocab_size, device=device), plain, rows).tokens.shape == (3,)
        assert draw(torch.empty(3, vocab_size, device=device), several, rows).tokens.shape == (6,)
        drawn = draw(torch.empty(count, vocab_size, device=device), batch, rows)
        rows.counts.count(np.arange(count), np.zeros(count, np.int32))
    assert (drawn.tokens.shape, drawn.tokens.device) == ((count,), device)
    assert drawn.logprobs is not None
    assert drawn.candidates is not None
    with pytest.raises(NotImplementedError, match="meta"):
        drawn.read()


def test_waiting_is_noticed() -> None:
    device = torch.device("meta")
    with NoWaiting(), pytest.raises(AssertionError, match="nonzero"):
        (torch.zeros(3) > 0).nonzero()
    with NoWaiting(), pytest.raises(AssertionError, match="scalar"):
        bool(torch.zeros(1).any())
    with NoWaiting(), pytest.raises(AssertionError, match="mask"):
        torch.zeros(3)[torch.zeros(3) > 0]
    with NoWaiting(), pytest.raises(AssertionError, match="waited for"):
        torch.zeros(3).to(device)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.floats(0, 0.9999), st.sampled_from([0.1, 1.0, 8.0]), st.booleans())
def test_halving_finds_the_nucleus_that_sorting_finds(seed: int, top_p: float, spread: float, ties: bool) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(seed)) * spread
    if ties:
        logits = logits.round()
    weights = (logits - logits.max(-1, keepdim=True).values).exp()
    weights[0, 1:] = 0
    weights[0, 0] = 1
    mass = torch.full((6,), top_p, dtype=torch.float64)
    edge, single = nucleus_by_sorting(weights, mass)
    halved, is_first = nucleus_by_halving(weights, mass)
    wanted, slack = weights.sum(-1, dtype=torch.float64) * mass, 1e-9 * weights.sum(-1)  # sums in another order differ
    for found in (edge, halved):
        held = torch.where(weights >= found[:, None], weights, 0).sum(-1, dtype=torch.float64)
        above = torch.where(weights > found[:, None], weights, 0).sum(-1, dtype=torch.float64)
        assert bool((held >= wanted - slack).all())
        assert bool((above < wanted + slack).all())
        assert bool((weights == found[:, None]).any(-1).all())
    assert torch.equal(single, is_first)


def test_penalties_of_a_device_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [
        SamplingParams(
            temperature=0.0, repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.7, logprobs=0
        ),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, frequency_penalty=1.5),
    ]
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 2
    edited, drawn = [], []
    for device in ("cpu", "another"):
        monkeypatch.setattr(sampler, "HOST", device)
        rows = sampling_rows(params, 50, "cpu")
        edited.append(sampler._edit(logits.clone(), select(rows, [0, 1, 2]), rows))
        drawn.append(sample(logits.clone(), select(rows, [0, 1, 2]), rows).token_ids.tolist())
    assert not torch.equal(edited[0], logits)
    assert torch.equal(*edited)
    assert drawn[0] == drawn[1]
