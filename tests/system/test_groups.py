"""Groups that share blocks, with the real model in three processes: parallel samples, beams, equal prefixes.

Beam search against transformers, and all of them in a pool that is too small: the outputs stay the same, whether groups
are swapped or recomputed, and nothing is left in either pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pagemill_testing.agreement import NEAR_TIE, Agreement
from pagemill_testing.http_calls import Call
from pagemill_testing.live_server import LiveServer, ServeCommand
from pagemill_testing.reference_model import ReferenceModel, ReferenceSearch
from pagemill_testing.sockets import ipc_folder

from pagemill_shared.manifest import prepared_folder

pytestmark = pytest.mark.timeout(400)

TOKENS = 10
TEMPERATURE = 0.8
SCORE_BOUND = 2e-3
"""Sums of log-probabilities in fp32 from batches of other shapes differ less than this."""

QUESTIONS = [
    "What is the capital of France?",
    "What is 2 + 2?",
    "Name a colour.",
    "Say yes.",
    "Is water wet?",
    "What is the opposite of hot?",
    "Wie heißt die Hauptstadt von Österreich?",
    "Translate 'good morning' into Spanish.",
]
TEXTS = [
    "The capital of France is",
    "Once upon a time",
    "In 1969, the first",
    "The quick brown fox",
    "Dear Sir or Madam,\n\n",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nx = np.",
    "SELECT name, age FROM people WHERE",
    "<html>\n  <body>\n    <h1>",
    '{"name": "Alice", "age": 30, "city":',
    "for (int i = 0; i < n; i++) {",
    "日本語日本語日本語",
    "Ein schöner Tag in Zürich: ",
    "Привет, как",
    "3.14159265358979",
    "1, 2, 3, 5, 8, 13,",
    "2 + 2 = 4\n3 + 3 = 6\n4 + 4 =",
    "A",
    "To be or not to be,",
    "Water boils at",
    "The first president of the United States was",
    "Roses are red,",
    "My favourite food is",
    "It was a dark and stormy night",
]
PROMPTS = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in QUESTIONS] + TEXTS
BEAMS: list[dict[str, Any]] = [
    {"beam_width": 4},
    {"beam_width": 4, "length_penalty": 0.2, "early_stopping": True},
    {"beam_width": 3, "length_penalty": 2.0, "early_stopping": "never"},
    {"beam_width": 4, "repetition_penalty": 1.3},
    {"beam_width": 2, "min_tokens": 6},
]
PREFIX = "You are a patient teacher who answers each question in one short sentence, without lists or headings. " * 5
SAMPLED, SEARCHED, PREFIXED = 16, 16, 6
NEEDED = 176
"""Blocks that these requests have in use at once where there is room for all. Not measured in each run: a test that
does not get to run for a while sees fewer."""


@pytest.fixture(scope="module")
def reference(cache: Path) -> Iterator[ReferenceModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield ReferenceModel(prepared_folder(cache, "bundled"))
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Outputs:
    """Of one request: token ids of each sequence, and the scores of beams."""

    tokens: list[list[int]]
    scores: list[float]

    @classmethod
    def of(cls, call: Call) -> Outputs:
        [answer] = call.chunks
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return cls([c["token_ids"] for c in choices], [c["score"] for c in choices if "score" in c])


def start_search(server: LiveServer, prompt: list[int], fields: dict[str, Any], max_tokens: int) -> Call:
    return server.start(
        prompt=prompt, max_tokens=max_tokens, n=fields["beam_width"], use_beam_search=True, logprobs=1, **fields
    )


def compare_search(agreement: Agreement, expected: ReferenceSearch, found: Outputs, what: str) -> None:
    agreement.check_equal(found.tokens == expected.outputs, lambda: expected.least_gap, what)
    if found.tokens == expected.outputs:
        assert found.scores == pytest.approx(expected.scores, abs=SCORE_BOUND), what


def check_searches(
    server: LiveServer, reference: ReferenceModel, cases: list[tuple[int, dict[str, Any]]], max_tokens: int
) -> None:
    """(number of a prompt, settings of its search): all at once in the server."""
    prompts = [reference.tokenizer(text).input_ids for text in PROMPTS]
    calls = [start_search(server, prompts[number], fields, max_tokens) for number, fields in cases]
    expected = expected_searches(reference, prompts, cases, max_tokens)
    server.finish(calls)
    agreement = Agreement("beam search")
    for (number, fields), call, search in zip(cases, calls, expected, strict=True):
        compare_search(agreement, search, Outputs.of(call), f"{PROMPTS[number][:40]!r} with {fields}")
        check_logprobs(call, fields)
    agreement.conclude()
    server.until_idle()
    ends = {tokens[-1] in reference.end_ids for search in expected for tokens in search.outputs}
    assert ends == {True, False}


def check_logprobs(call: Call, fields: dict[str, Any]) -> None:
    """Those of the tokens of each finished beam add up to its score."""
    [answer] = call.chunks
    for choice in answer["choices"]:
        values = choice["logprobs"]["token_logprobs"]
        assert len(values) == len(choice["token_ids"])
        total = sum(values) / len(values) ** fields.get("length_penalty", 1.0)
        assert total == pytest.approx(choice["score"], abs=SCORE_BOUND)


def expected_searches(
    reference: ReferenceModel, prompts: list[list[int]], cases: list[tuple[int, dict[str, Any]]], max_tokens: int
) -> list[ReferenceSearch]:
    """By transformers, in batches of equal settings and, where padding would matter, of equal lengths."""
    batches: dict[str, list[int]] = {}
    for index, (number, fields) in enumerate(cases):
        alike = f"{fields} {len(prompts[number]) if 'repetition_penalty' in fields else len(prompts[number]) // 8}"
        batches.setdefault(alike, []).append(index)
    found: dict[int, ReferenceSearch] = {}
    for indices in batches.values():
        batch = [prompts[cases[index][0]] for index in indices]
        found.update(zip(indices, reference.search(batch, max_tokens, cases[indices[0]][1]), strict=True))
    return [found[index] for index in range(len(cases))]


def test_beam_search_equals_transformers(server: ServeCommand, reference: ReferenceModel) -> None:
    assert len(PROMPTS) >= 30
    cases = [(number, BEAMS[number % len(BEAMS)]) for number in range(len(PROMPTS))]
    check_searches(server, reference, cases, TOKENS)


def test_widths_of_one_three_and_five_side_by_side(server: ServeCommand, reference: ReferenceModel) -> None:
    """Case 77: each row has as many candidates as its own search takes; prompts of different length."""
    texts = [TEXTS[17], TEXTS[0], PROMPTS[0]]
    prompts = [reference.tokenizer(text).input_ids for text in texts]
    assert len({len(prompt) for prompt in prompts}) == 3
    widths = (5, 3, 1)
    calls = [
        start_search(server, prompt, {"beam_width": width}, 20) for prompt, width in zip(prompts, widths, strict=True)
    ]
    server.finish(calls)
    agreement = Agreement("beams of several widths")
    for prompt, width, call in zip(prompts[:2], widths, calls, strict=False):
        [expected] = reference.search([prompt], 20, {"beam_width": width})
        compare_search(agreement, expected, Outputs.of(call), f"width {width}")
    greedy = server.ask(prompt=prompts[2], max_tokens=20)
    one = Outputs.of(calls[2]).tokens[0]
    agreement.check_equal(
        one == greedy.token_ids, lambda: min(reference.greedy_gaps(prompts[2], greedy.token_ids)), "width 1"
    )
    agreement.conclude()
    server.until_idle()


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fields", BEAMS)
def test_long_beam_searches_equal_transformers(
    fields: dict[str, Any], server: ServeCommand, reference: ReferenceModel
) -> None:
    check_searches(server, reference, [(number, fields) for number in range(len(PROMPTS))], 32)


# ---------------------------------------------------------------- a pool that is too small


@dataclass(frozen=True)
class Workload:
    """What the requests gave in a pool with room for all."""

    prompts: list[list[int]]
    outputs: list[Outputs]


def start_all(server: LiveServer, prompts: list[list[int]]) -> list[Call]:
    """First the samples, then the searches, then greedy requests that begin alike."""
    calls = []
    for number, prompt in enumerate(prompts):
        if number < SAMPLED:
            calls.append(
                server.start(prompt=prompt, max_tokens=TOKENS, n=4, seed=seed_of(number), temperature=TEMPERATURE)
            )
        elif number < SAMPLED + SEARCHED:
            calls.append(start_search(server, prompt, BEAMS[0], TOKENS))
        else:
            calls.append(server.start(prompt=prompt, max_tokens=TOKENS))
    return calls


def seed_of(number: int) -> int:
    return 100 + number


def finish(server: LiveServer, calls: list[Call]) -> tuple[list[Outputs], int]:
    """Their outputs, and the most blocks that were seen in use at once."""
    used = [0]

    def done() -> bool:
        used.extend(worker["blocks"]["used"] for worker in server.state()["workers"])
        return all(call.done for call in calls)

    server.until(done, "the end of all requests")
    outputs = [Outputs.of(call.succeeded()) for call in calls]
    server.until_idle()
    return outputs, max(used)


@pytest.fixture(scope="module")
def ample(shared_server: ServeCommand, reference: ReferenceModel) -> Workload:
    shared_server.until_ready()
    encode = reference.tokenizer
    prompts = [encode(text).input_ids for text in PROMPTS]
    prompts += [encode(PREFIX + text).input_ids for text in TEXTS[:PREFIXED]]
    before = shared_server.counter("num_preemptions_total"), shared_server.counter("prefix_hits_total")
    outputs, _ = finish(shared_server, start_all(shared_server, prompts))
    assert shared_server.counter("num_preemptions_total") == before[0]
    hits = shared_server.counter("prefix_hits_total") - before[1]
    assert hits >= (PREFIXED - 1) * (len(encode(PREFIX).input_ids) // 16 - 1) * 16
    return Workload(prompts, outputs)


def compare(workload: Workload, outputs: list[Outputs], reference: ReferenceModel, name: str) -> None:
    """The outputs in an ample pool, but for near ties, which sums in another order may decide otherwise."""
    agreement = Agreement(name)
    for number, (expected, found) in enumerate(zip(workload.outputs, outputs, strict=True)):
        prompt = workload.prompts[number]
        if SAMPLED <= number < SAMPLED + SEARCHED:
            same = found.tokens == expected.tokens
            agreement.check_equal(same, lambda p=prompt: search_gap(reference, p), f"search {number}")  # type: ignore[misc]
            if same:
                assert found.scores == pytest.approx(expected.scores, abs=SCORE_BOUND)
            continue
        assert len(found.tokens) == len(expected.tokens)
        for sequence, (wanted, tokens) in enumerate(zip(expected.tokens, found.tokens, strict=True)):
            agreement.check_equal(
                tokens == wanted,
                lambda n=number, s=sequence, w=wanted, t=tokens: choice_gap(reference, workload, n, s, w, t),  # type: ignore[misc]
                f"sequence {sequence} of request {number}",
            )
    agreement.conclude()


def search_gap(reference: ReferenceModel, prompt: list[int]) -> float:
    [search] = reference.search([prompt], TOKENS, BEAMS[0])
    return search.least_gap


def choice_gap(
    reference: ReferenceModel, workload: Workload, number: int, sequence: int, wanted: list[int], tokens: list[int]
) -> float:
    """How clear the choice was at which the two part."""
    at = next((i for i, pair in enumerate(zip(wanted, tokens, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return math.inf  # one is longer, though they do not differ
    prompt = workload.prompts[number]
    if number < SAMPLED:
        return abs(reference.margins(prompt, wanted, TEMPERATURE, seed_of(number), sequence)[at])
    return reference.greedy_gaps(prompt, wanted)[at]


def test_samples_are_what_their_random_numbers_say(ample: Workload, reference: ReferenceModel) -> None:
    """By transformers' logits: each token covers the uniform number of its sequence and position."""
    for number in (0, 9):
        assert len({tuple(tokens) for tokens in ample.outputs[number].tokens}) > 1
        for sequence, tokens in enumerate(ample.outputs[number].tokens):
            margins = reference.margins(ample.prompts[number], tokens, TEMPERATURE, seed_of(number), sequence)
            assert min(margins) > -NEAR_TIE


def test_cached_prefixes_change_nothing(ample: Workload, server: ServeCommand, reference: ReferenceModel) -> None:
    """All prompts again: whatever full blocks they have are cached now, those of samples and beams among them."""
    calls = start_all(server, ample.prompts)
    outputs, _ = finish(server, calls)
    compare(ample, outputs, reference, "cached prefixes")
    for prompt, call in zip(ample.prompts, calls, strict=True):
        cached = call.usage["prompt_tokens_details"]["cached_tokens"]  # type: ignore[index]
        assert cached == (len(prompt) - 1) // 16 * 16


@pytest.mark.parametrize(
    ("mode", "space"),
    [
        ("swap", 2.0),
        ("recompute", 2.0),
        pytest.param("auto", 2.0, marks=pytest.mark.full),
        pytest.param("swap", 0.1, marks=pytest.mark.full),
        pytest.param("swap", 0.0, marks=pytest.mark.full),
    ],
)
def test_half_of_the_blocks_that_are_needed(
    mode: str, space: float, ample: Workload, cache: Path, reference: ReferenceModel
) -> None:
    """Groups are preempted, and give what they give in an ample pool; then both pools are empty.

    ``space`` is that of the host pool, in device pools: where there is too little, groups are recomputed.
    """
    blocks = NEEDED // 2
    with ipc_folder() as folder:
        server = ServeCommand(
            folder,
            mode,
            cache_dir=cache,
            num_kv_blocks=blocks,
            num_swap_blocks=int(space * blocks),
            preemption_mode=mode,
            max_num_batched_tokens=256,
            peer_timeout=60,
            check_invariants=True,
        )
        try:
            server.until_started()
            server.until_ready()
            with server.arriving_together(len(ample.prompts)):
                calls = start_all(server, ample.prompts)
            outputs, peak = finish(server, calls)
            metrics = server.state()["metrics"]
        finally:
            server.close()
    assert peak <= blocks
    assert metrics["num_preemptions_total"] > 0
    if mode == "swap" and space:
        assert metrics["swapped_out_blocks_total"] > 0
        assert metrics["swapped_in_blocks_total"] > 0
    if mode == "recompute" or not space:
        assert metrics["swapped_out_blocks_total"] == 0
    if mode == "recompute" or space < 1:
        assert metrics["recomputed_tokens_total"] > 0
    compare(ample, outputs, reference, f"half of the blocks, {mode}")
