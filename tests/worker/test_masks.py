"""Masks of grammars in the sampler: which rows they change, and that those they would not change go without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from pagemill_shared.sampling import SamplingParams
from pagemill_worker import sampler
from pagemill_worker.grammar_compiler import GrammarCompiler
from pagemill_worker.grammar_rows import GrammarRows
from pagemill_worker.sampler import sample
from pagemill_worker.sampling_rows import SampleBatch, SamplingRows

VOCAB = 61  # the last byte of a mask has bits to spare
GREEDY = SamplingParams(temperature=0.0)
NONE = np.zeros(0, np.int32)


def batch_of(params: list[SamplingParams], allowed: npt.NDArray[np.bool_]) -> tuple[SampleBatch, SamplingRows]:
    """Rows with ``params``; each may sample what is True in its row of ``allowed``."""
    count = len(params)
    grammars = GrammarRows(count, VOCAB, GrammarCompiler(Path("nowhere"), VOCAB, []), lambda message: None)
    rows = SamplingRows(count, VOCAB, torch.device("cpu"), grammars)
    for slot, each in enumerate(params):
        rows.join(slot, each, np.array([1], np.int32), NONE)
    slots = np.arange(count)
    batch = rows.select(
        slots,
        outputs=np.zeros(count, np.int64),
        row_of=slots,
        sequences=np.zeros(count, np.int64),
        positions=np.ones(count, np.int64),
        output_of=lambda slot: NONE,
    )
    return replace(batch, plain=False, constrained=slots, masks=np.packbits(allowed, axis=1, bitorder="little")), rows


def random_rows(count: int) -> tuple[Tensor, npt.NDArray[np.bool_]]:
    """Logits, and tokens that are allowed: in every other row the most likely one is among them."""
    generator = np.random.default_rng(count)
    logits = torch.from_numpy(generator.normal(size=(count, VOCAB)).astype(np.float32))
    allowed = generator.random((count, VOCAB)) < 0.3
    allowed[np.arange(count), logits.argmax(-1).numpy()] = np.arange(count) % 2 == 0
    allowed[np.arange(count), np.arange(count) % VOCAB] = True  # something always is
    return logits, allowed


def test_greedy_rows_take_the_most_likely_of_what_is_allowed() -> None:
    logits, allowed = random_rows(80)
    batch, rows = batch_of([GREEDY] * 80, allowed)
    expected = logits.where(torch.from_numpy(allowed), -torch.inf).argmax(-1)
    assert sample(logits.clone(), batch, rows).token_ids.tolist() == expected.tolist()


def test_only_rows_that_it_changes_pay_for_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    masked: list[int] = []
    mask = sampler._mask

    def recorded(logits: Tensor, batch: SampleBatch) -> None:
        masked.extend(batch.constrained.tolist())
        mask(logits, batch)

    monkeypatch.setattr(sampler, "_mask", recorded)
    logits, allowed = random_rows(40)
    likely = allowed[np.arange(40), logits.argmax(-1).numpy()]
    sample(logits.clone(), *batch_of([GREEDY] * 40, allowed))
    assert masked == np.flatnonzero(~likely).tolist()
    masked.clear()
    sample(logits[likely].clone(), *batch_of([GREEDY] * likely.sum(), allowed[likely]))
    assert masked == []


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.0, logprobs=5),
        SamplingParams(temperature=0.0, presence_penalty=1.5),
        SamplingParams(
            temperature=0.0, logit_bias_ids=np.array([5], np.int32), logit_bias_values=np.array([9], np.float32)
        ),
        SamplingParams(temperature=0.0, min_tokens=3, eos_token_ids=np.arange(30, dtype=np.int32)),
    ],
    ids=["temperature", "logprobs", "penalty", "bias", "min_tokens"],
)
def test_other_rows_are_as_with_every_mask(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, allowed = random_rows(60)
    batch, rows = batch_of([params, GREEDY] * 30, allowed)
    found = sample(logits.clone(), batch, rows)
    monkeypatch.setattr(sampler, "_without_idle_masks", lambda batch, chosen, rows: batch)
    expected = sample(logits.clone(), batch, rows)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert allowed[np.arange(60), found.token_ids].all()
    assert found.logprobs.values.tolist() == expected.logprobs.values.tolist()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_fails_whatever_is_allowed(wrong: float) -> None:
    logits, allowed = random_rows(6)
    logits[2, 7], logits[3, 7] = wrong, wrong
    allowed[2], allowed[3, 7] = True, False
    tokens = sample(logits, *batch_of([GREEDY] * 6, allowed)).token_ids
    assert (tokens < 0).tolist() == [False, False, True, True, False, False]


def test_a_row_that_may_sample_nothing_fails() -> None:
    logits, allowed = random_rows(4)
    allowed[1] = False
    tokens = sample(logits, *batch_of([GREEDY] * 4, allowed)).token_ids
    assert (tokens < 0).tolist() == [False, True, False, False]
