"""A runner against the model of transformers whose checkpoint it runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagemill_testing.plan_driver import PlanDriver
from pagemill_testing.tiny_models import VOCAB, greedy
from pagemill_worker.runner import Runner


class LogitsLog:
    """Keeps the logits that a runner computes."""

    def __init__(self, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[Tensor] = []
        compute = runner.model.logits

        def noted(hidden: Tensor) -> Tensor:
            logits = compute(hidden)
            self.steps.append(logits.clone())
            return logits

        monkeypatch.setattr(runner.model, "logits", noted)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_equality(reference: PreTrainedModel, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and greedy tokens, in whole prompts and in chunks, with other rows and without."""
    expected_outputs = [greedy(reference, ids, 6) for ids in (prompt(37), prompt(3, 1))]
    for chunk in (1000, 7):
        driver = PlanDriver(runner, chunk=chunk)
        [first] = driver.add(prompt(37), 6)
        [second] = driver.add(prompt(3, 1), 6)
        log = LogitsLog(runner, monkeypatch)
        driver.run()
        with torch.inference_mode():
            expected = {s: reference(torch.tensor([s.tokens])).logits[0] for s in (first, second)}
        computed = torch.cat(log.steps)
        # Every row of logits that was computed is one of these, and all of them were.
        for sequence in (first, second):
            for position in range(len(sequence.prompt) - 1, len(sequence.tokens) - 1):
                distance = (computed - expected[sequence][position]).abs().amax(-1).min()
                assert distance < 1e-4
        assert computed.shape[0] == 12
        assert [first.outputs, second.outputs] == expected_outputs
