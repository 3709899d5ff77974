"""What the whole server tells of prompts, against transformers over the same weights (cases 18, 20, 82)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pagemill_testing.live_server import COMPLETIONS, ServeCommand
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagemill_shared.manifest import prepared_folder

pytestmark = pytest.mark.timeout(600)

NEAR = 2e-3
"""How far log-probabilities may differ: float sums in other orders."""
LONG = "The history of the town begins with a river, a bridge, and the people who crossed it every morning. " * 20


class Reference:
    def __init__(self, cache: Path) -> None:
        folder = prepared_folder(cache, "bundled")
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(self, ids: list[int]) -> list[float]:
        """[P - 1] of each token but the first."""
        with torch.inference_mode():
            table = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        values: list[float] = table.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).tolist()
        return values


@pytest.fixture(scope="module")
def reference(cache: Path) -> Reference:
    return Reference(cache)


def echo(server: ServeCommand, prompt: Any, **body: Any) -> dict[str, Any]:
    call = server.ask(COMPLETIONS, prompt=prompt, echo=True, **{"max_tokens": 0, "logprobs": 1, **body})
    choice: dict[str, Any] = call.chunks[0]["choices"][0]
    return choice


@pytest.mark.parametrize("text", ["Your answer: Yes", "\n1. Carl has 20", "日本語 🙂 and <|im_start|> as it is", LONG])
def test_echoed_logprobs_are_those_of_transformers(server: ServeCommand, reference: Reference, text: str) -> None:
    """The long one goes through several chunks; all of it stands in the prefix cache when it is asked for."""
    server.ask(COMPLETIONS, prompt=text, max_tokens=1)
    for _ in range(2):
        choice = echo(server, text)
        assert choice["text"] == text
        lists = choice["logprobs"]
        assert "".join(lists["tokens"]) == text
        assert lists["token_logprobs"][0] is None
        ids = list(reference.tokenizer(text).input_ids)
        assert lists["token_logprobs"][1:] == pytest.approx(reference.logprobs(ids), abs=NEAR)


def test_prompt_and_output_have_one_scale(server: ServeCommand, reference: Reference) -> None:
    """Asked for as a prompt, a greedy answer has the log-probabilities that it was generated with."""
    call = server.ask(COMPLETIONS, prompt="The capital of France is", echo=True, max_tokens=12, logprobs=2)
    choice = call.chunks[0]["choices"][0]
    again = echo(server, choice["prompt_token_ids"] + choice["token_ids"], logprobs=2)
    assert again["text"] == choice["text"]
    assert again["logprobs"]["token_logprobs"][1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=NEAR)


def test_a_long_prompt_with_logprobs_takes_little_memory(server: ServeCommand) -> None:
    """Case 82. What the KV cache takes is touched before."""
    words = (LONG * 12).split(" ")
    ids = server.post("/tokenize", prompt=" ".join(words)).json()["tokens"][:4000]
    assert len(ids) == 4000
    for shift in (0, 1):
        server.ask(COMPLETIONS, prompt=ids[shift:] + ids[:shift], max_tokens=1)
    before = server.memory_peaks()
    choice = echo(server, ids, logprobs=5)
    assert len(choice["logprobs"]["token_logprobs"]) == 4000
    grown = {name: server.memory_peaks()[name] - size for name, size in before.items()}
    assert sum(grown.values()) < 300 * 2**20, grown
