"""Greedy tokens of the whole server against transformers' generate() over the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pagemill_testing.agreement import Agreement, GreedyRun
from pagemill_testing.http_calls import Call
from pagemill_testing.live_server import LiveServer, ServeCommand
from pagemill_testing.sockets import ipc_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagemill_shared.manifest import prepared_folder

pytestmark = pytest.mark.timeout(300)

TOKENS = 16
END = 2
STREAMS = 32


def chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS = [
    chat("What is the capital of France?"),
    chat("Write a haiku about the sea."),
    chat("List three prime numbers."),
    chat("Wie heißt die Hauptstadt von Österreich?"),
    chat("Translate 'good morning' into Spanish."),
    "The capital of France is",
    "Once upon a time",
    "In 1969, the first",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "Dear Sir or Madam,\n\n",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nx = np.",
    "SELECT name, age FROM people WHERE",
    "<html>\n  <body>\n    <h1>",
    '{"name": "Alice", "age": 30, "city":',
    "for (int i = 0; i < n; i++) {",
    "日本語日本語日本語",
    "Ein schöner Tag in Zürich: ",
    "🙂🙂🙂🙂",
    "Привет, как",
    "3.14159265358979",
    "1, 2, 3, 5, 8, 13,",
    "2 + 2 = 4\n3 + 3 = 6\n4 + 4 =",
    "A",
    "The history of the town begins with a river, a bridge, and the people who crossed it every morning. " * 29,
]
CROWD = [number % len(PROMPTS) for number in range(STREAMS)]


class Reference:
    """transformers over the prepared folder, fp32; short prompts in one batch, as it would take a minute otherwise."""

    def __init__(self, cache: Path) -> None:
        folder = prepared_folder(cache, "bundled")
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.prompts: list[list[int]] = [self.tokenizer(text).input_ids for text in PROMPTS]
        self.runs = [*self.generate(self.prompts[:-1]), *self.generate(self.prompts[-1:])]

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[GreedyRun]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[END] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            result = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.stack(result.logits, dim=1).topk(2, dim=-1).values
        gaps = (best[..., 0] - best[..., 1]).tolist()
        return [
            GreedyRun(up_to_end(tokens), gap)
            for tokens, gap in zip(result.sequences[:, longest:].tolist(), gaps, strict=True)
        ]


def up_to_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


@pytest.fixture(scope="module")
def reference(cache: Path) -> Reference:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Reference(cache)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def crowded_server(cache: Path) -> Iterator[ServeCommand]:
    """One whose pool holds little more than the longest prompt."""
    with ipc_folder() as folder:
        server = ServeCommand(
            folder,
            "crowded",
            cache_dir=cache,
            num_kv_blocks=42,
            enable_prefix_caching=False,  # what is preempted is computed again, all of it
            preemption_mode="recompute",
            peer_timeout=60,
            check_invariants=True,
        )
        try:
            server.until_started()
            yield server
        finally:
            server.close()


def test_the_prompts_are_varied(reference: Reference) -> None:
    lengths = [len(prompt) for prompt in reference.prompts]
    assert len(PROMPTS) >= 20
    assert 1 in lengths
    assert 550 < max(lengths) < 650
    assert {run.token_ids[-1] == END for run in reference.runs} == {True, False}  # some end by themselves, some do not


def test_each_alone(server: ServeCommand, reference: Reference) -> None:
    agreement = Agreement("alone")
    for text, prompt, run in zip(PROMPTS, reference.prompts, reference.runs, strict=True):
        answer = server.ask(prompt=text, max_tokens=TOKENS)
        assert answer.choices()[0]["prompt_token_ids"] == prompt
        agreement.check(run, answer.token_ids, repr(text[:20]))
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] == END else "length")
        assert answer.usage["completion_tokens"] == len(answer.token_ids)
        assert answer.text == reference.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    agreement.conclude()
    server.until_idle()


def test_all_at_once(server: ServeCommand, reference: Reference) -> None:
    check_crowd(server, reference, start_crowd(server, reference), "32 streams")


def test_all_at_once_in_a_pool_that_is_too_small(crowded_server: ServeCommand, reference: Reference) -> None:
    crowded_server.until_ready()
    with crowded_server.arriving_together(STREAMS):
        calls = start_crowd(crowded_server, reference)
    check_crowd(crowded_server, reference, calls, "32 streams under pressure")
    assert crowded_server.counter("num_preemptions_total") > 0
    assert crowded_server.counter("recomputed_tokens_total") > 0


def start_crowd(server: LiveServer, reference: Reference) -> list[Call]:
    """32 streams at once; some prompts come twice."""
    return [server.stream(prompt=reference.prompts[number], max_tokens=TOKENS) for number in CROWD]


def check_crowd(server: LiveServer, reference: Reference, calls: list[Call], name: str) -> None:
    server.finish(calls)
    agreement = Agreement(name)
    for number, call in zip(CROWD, calls, strict=True):
        agreement.check(reference.runs[number], call.token_ids, repr(PROMPTS[number][:20]))
        check_stream(reference, call)
    agreement.conclude()
    server.until_idle()


def check_stream(reference: Reference, call: Call) -> None:
    """The joined pieces are the text of the tokens."""
    assert call.text == reference.tokenizer.decode(call.token_ids, skip_special_tokens=True)
    assert not any("\ufffd" in piece["text"] for piece in call.choices()[:-2])
