"""The bundled model against transformers over the same prepared weights: greedy tokens, logits, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pagemill_testing.plan_driver import DrivenSequence, PlanDriver
from pagemill_testing.run_files import bundled_cache
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagemill_shared.manifest import prepared_folder
from pagemill_shared.sampling import SamplingParams
from pagemill_shared.settings import WorkerSettings
from pagemill_worker.load import load_worker
from pagemill_worker.runner import Runner

TOKENS = 20
NEAR = 1e-3
"""Logits closer than this may change places: batches of other shapes sum floats in other orders."""
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "日本語日本語日本語",
    "A",
    "Once upon a time, in a land far away, there lived a young queen who " * 12,
]


class Bundled:
    """The runner and transformers' model, loaded once for all tests here."""

    def __init__(self, cache: Path) -> None:
        settings = WorkerSettings(model="bundled", cache_dir=cache, num_threads=1, num_kv_blocks=400)
        self.runner: Runner = load_worker(settings, lambda step, share: None)[0]
        folder = prepared_folder(cache, "bundled")
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text).input_ids)

    def check_greedy(self, sequence: DrivenSequence) -> None:
        """Every token is transformers' choice for what stands before it, or as good as it."""
        with torch.inference_mode():
            logits = self.reference(torch.tensor([sequence.tokens])).logits[0, len(sequence.prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(sequence.outputs).unsqueeze(1)).squeeze(1)
        assert float((logits.max(-1).values - chosen).max()) < NEAR
        assert len(sequence.outputs) == sequence.wanted


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Bundled:
    return Bundled(bundled_cache(tmp_path_factory))


def test_greedy_tokens_in_chunks_and_mixed_batches(bundled: Bundled) -> None:
    driver = PlanDriver(bundled.runner, chunk=48)
    sequences = [driver.add(bundled.ids(text), TOKENS)[0] for text in PROMPTS]
    driver.run()
    for sequence in sequences:
        bundled.check_greedy(sequence)
    assert "Paris" in bundled.tokenizer.decode(sequences[2].outputs)


def test_tokens_equal_generate(bundled: Bundled) -> None:
    driver = PlanDriver(bundled.runner)
    ids = bundled.ids(PROMPTS[0])
    [sequence] = driver.add(ids, TOKENS)
    driver.run()
    prompt = torch.tensor([ids])
    result = bundled.reference.generate(
        prompt, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=2
    )
    assert sequence.outputs == result[0, len(ids) :].tolist()


def test_recomputed_sequences_keep_their_tokens(bundled: Bundled) -> None:
    driver = PlanDriver(bundled.runner, chunk=16)
    sequences = [driver.add(bundled.ids(text), TOKENS)[0] for text in PROMPTS[:3]]
    for step in range(8):
        if step == 6:
            driver.recompute(sequences[1])
        driver.step()
    driver.run()
    for sequence in sequences:
        bundled.check_greedy(sequence)


def test_parallel_samples_are_repeatable_and_differ(bundled: Bundled) -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=42)
    texts = []
    for mates in (0, 3):
        driver = PlanDriver(bundled.runner)
        group = driver.add(bundled.ids(PROMPTS[0]), 12, sampling, n=3)
        for text in PROMPTS[1 : 1 + mates]:
            driver.add(bundled.ids(text), 12)
        driver.run()
        texts.append([bundled.tokenizer.decode(sequence.outputs) for sequence in group])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_logprobs_equal_transformers(bundled: Bundled) -> None:
    driver = PlanDriver(bundled.runner)
    [sequence] = driver.add(bundled.ids(PROMPTS[1]), 3, SamplingParams(temperature=0.0, logprobs=4))
    driver.run()
    with torch.inference_mode():
        logits = bundled.reference(torch.tensor([sequence.tokens])).logits[0, len(sequence.prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    for step, result in enumerate(driver.results):
        ids = torch.from_numpy(result.logprobs.token_ids.astype(np.int64))
        torch.testing.assert_close(torch.from_numpy(result.logprobs.values), expected[step, ids], atol=NEAR, rtol=0)
        assert result.logprobs.ranks.tolist() == [1]
