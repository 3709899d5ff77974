"""Log-probabilities of prompts and pooled hidden states over chunks of any size, compared with transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pagemill_testing.plan_driver import PlanDriver
from pagemill_testing.tiny_models import VOCAB, make_runner, save, tiny_llama

from pagemill_shared.codec import decode, encode
from pagemill_shared.errors import ProtocolError
from pagemill_shared.messages import IterationPlan, IterationResult, PromptReport, SequenceJoin, WorkerWelcome
from pagemill_shared.sampling import Pooling, SamplingParams
from pagemill_worker import prompt_reports
from pagemill_worker.runner import NON_FINITE, Runner

REFERENCE = tiny_llama()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(REFERENCE, tmp_path_factory.mktemp("tiny"))


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reported(driver: PlanDriver, slot: int = 0) -> list[PromptReport]:
    return [report for result in driver.results for report in result.reports if report.owner == slot]


def run(runner: Runner, ids: list[int], chunk: int, **asks: object) -> list[PromptReport]:
    """The reports of one prompt beside others that ask for nothing, or for something else."""
    driver = PlanDriver(runner, chunk=chunk)
    driver.add(ids, 3, SamplingParams(temperature=0.0, **asks))  # type: ignore[arg-type]
    driver.add(prompt(7, 1), 9)
    driver.add(prompt(5, 2), 4, SamplingParams(temperature=0.0, prompt_logprobs=2))
    driver.run()
    assert driver.sequences[0].prompt == ids
    return reported(driver)


@pytest.mark.parametrize("length", [1, 2, 9, 33])
@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
def test_logprobs_equal_the_log_softmax_of_transformers(folder: Path, length: int, chunk: int) -> None:
    ids = prompt(length)
    reports = run(make_runner(folder), ids, chunk, prompt_logprobs=3)
    assert [report.start for report in reports] == list(range(0, length, chunk))
    assert [report.end for report in reports] == [min(start + chunk, length) for start in range(0, length, chunk)]
    for report in reports:
        assert report.logprobs.rows.tolist() == list(range(min(report.end, length - 1) - report.start))
    with torch.inference_mode():
        wanted = REFERENCE(torch.tensor([ids])).logits[0].log_softmax(-1)
    values = np.concatenate([report.logprobs.values for report in reports]).reshape(-1, 4)
    token_ids = np.concatenate([report.logprobs.token_ids for report in reports]).reshape(-1, 4)
    ranks = np.concatenate([report.logprobs.ranks for report in reports])
    assert token_ids[:, 0].tolist() == ids[1:]
    for position in range(length - 1):
        row = wanted[position]
        np.testing.assert_allclose(values[position], row[token_ids[position]].numpy(), atol=1e-4)
        np.testing.assert_allclose(values[position, 1:], row.topk(3).values.numpy(), atol=1e-4)
        assert ranks[position] == int((row > row[ids[position + 1]]).sum()) + 1


@pytest.mark.parametrize("chunk", [3, 8, 100])
@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_pooled_states_equal_those_of_transformers(folder: Path, chunk: int, pooling: Pooling) -> None:
    ids = prompt(20)
    reports = run(make_runner(folder), ids, chunk, pooling=pooling)
    with torch.inference_mode():
        states = REFERENCE.model(torch.tensor([ids])).last_hidden_state[0]
    wanted = states[-1] if pooling == Pooling.LAST else states.sum(0)
    found = sum(report.pooled for report in reports if len(report.pooled))
    np.testing.assert_allclose(found, wanted.numpy(), atol=2e-3)
    assert sum(len(report.pooled) > 0 for report in reports) == (1 if pooling == Pooling.LAST else len(reports))


def test_however_long_the_chunk_few_logits_are_held_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 82: only what is asked for leaves the slab."""
    monkeypatch.setattr(prompt_reports, "SLAB_ELEMENTS", 8 * VOCAB)
    runner = make_runner(folder)
    seen: list[int] = []
    logits = runner.model.logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.shape[0])
        return logits(hidden)

    monkeypatch.setattr(runner.model, "logits", watched)
    ids = prompt(100)
    [report] = run(runner, ids, 100, prompt_logprobs=5)
    assert max(seen) == 8
    assert len(report.logprobs.values) == 99 * 6


def test_a_resumed_sequence_reports_no_outputs(folder: Path) -> None:
    driver = PlanDriver(make_runner(folder), chunk=6)
    [sequence] = driver.add(prompt(10), 12, SamplingParams(temperature=0.0, prompt_logprobs=0))
    for _ in range(6):
        driver.step()
    before = len(driver.results)
    driver.recompute(sequence)
    driver.run()
    again = [(r.start, r.end) for result in driver.results[before:] for r in result.reports]
    assert again == [(0, 6), (6, 10)]  # the second chunk goes on into the outputs


def test_numbers_that_are_not_finite_fail_the_row_alone(folder: Path) -> None:
    broken = tiny_llama()
    broken.model.embed_tokens.weight.data[5] = torch.nan
    runner = make_runner(save(broken, folder.parent / "broken"))
    driver = PlanDriver(runner, chunk=4)
    [bad] = driver.add([3, 4, 5, 6, 7, 8, 9], 2, SamplingParams(temperature=0.0, prompt_logprobs=1))
    [good] = driver.add(prompt(6, 3), 2, SamplingParams(temperature=0.0, pooling=Pooling.MEAN))
    driver.step()
    [first] = driver.results
    assert [(fault.slot, fault.code) for fault in first.faults] == [(bad.slot, NON_FINITE)]
    assert [report.owner for report in first.reports] == [bad.slot, good.slot]
    assert not len(first.reports[0].logprobs.values)
    assert np.isfinite(first.reports[1].pooled).all()
    assert isinstance(decode(encode(first)), IterationResult)


def test_plans_that_ask_for_reports_of_nothing_are_refused(folder: Path) -> None:
    runner = make_runner(folder)
    runner.begin(WorkerWelcome(7, 8, 4096))
    ids, table = np.array(prompt(6), np.int32), np.array([1, 2], np.int32)
    join = SequenceJoin(0, 0, 4, 0, ids, table, SamplingParams(prompt_logprobs=1))
    chunk = np.array([[0, 0, 4, 0]], np.int32)
    with pytest.raises(ProtocolError, match="computes no chunk"):
        runner.execute(IterationPlan(7, 1, joined=(join,), prefill_chunks=chunk, reporting=np.array([1], np.int32)))
    runner.begin(WorkerWelcome(8, 8, 4096))
    runner.execute(IterationPlan(8, 1, joined=(join,), prefill_chunks=chunk))
    late = np.array([[0, 4, 2, 1]], np.int32)
    with pytest.raises(ProtocolError, match="nothing of its prompt"):
        runner.execute(IterationPlan(8, 2, prefill_chunks=late, reporting=np.array([0], np.int32)))
