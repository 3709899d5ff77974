"""Rows whose output must match a grammar, through a runner over a tiny model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from pagemill_testing.plan_driver import DrivenSequence, PlanDriver
from pagemill_testing.tiny_folder import SPECIAL, write_folder
from pagemill_testing.tiny_models import make_runner
from tokenizers import Tokenizer

from pagemill_shared.messages import GrammarCompiled, IterationPlan, SequenceJoin, WorkerWelcome
from pagemill_shared.sampling import SamplingParams
from pagemill_worker.grammar_compiler import GrammarCompiler
from pagemill_worker.grammar_rows import GrammarRows

EOS = 1
ENDS = np.array([EOS], np.int32)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OBJECT = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
DIGITS = LLMatcher.grammar_from_regex("[0-9]{3,8}")
PROMPT = [10, 20, 30, 40, 50, 60, 70]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=256)


@pytest.fixture(scope="module")
def text(folder: Path) -> Callable[[list[int]], str]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def sampled(grammar: str, **fields: Any) -> SamplingParams:
    fields = {"temperature": 1.0, "seed": 3, "eos_token_ids": ENDS, "max_tokens": 200, **fields}
    return SamplingParams(grammar=grammar, **fields)


def run_to_end(driver: PlanDriver, *sequences: DrivenSequence) -> None:
    """Each sequence ends with its end token, as the scheduler would see to."""
    while not all(s.done for s in sequences):
        driver.step()
        for sequence in sequences:
            if EOS in sequence.outputs:
                sequence.wanted = len(sequence.outputs)


def add(driver: PlanDriver, sampling: SamplingParams, n: int = 1) -> list[DrivenSequence]:
    return driver.add(PROMPT, sampling.max_tokens, sampling, n)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_text_matches_and_then_ends(
    folder: Path, text: Callable[[list[int]], str], temperature: float, seed: int
) -> None:
    driver = PlanDriver(make_runner(folder))
    [constrained] = add(driver, sampled(OBJECT, temperature=temperature, seed=seed))
    [plain] = driver.add(PROMPT, 30)
    [digits] = add(driver, sampled(DIGITS, temperature=temperature, seed=seed))
    run_to_end(driver, constrained, plain, digits)
    found = json.loads(text(constrained.outputs))
    assert set(found) == {"name", "age"}
    assert 0 <= found["age"] <= 99
    assert re.fullmatch("[0-9]{3,8}", text(digits.outputs))
    alone = PlanDriver(make_runner(folder))
    [other] = alone.add(PROMPT, 30)
    alone.run()
    assert plain.outputs == other.outputs, "rows without a grammar are as they were"


def test_forks_go_their_own_ways(folder: Path, text: Callable[[list[int]], str]) -> None:
    driver = PlanDriver(make_runner(folder))
    group = add(driver, sampled(OBJECT), n=4)
    run_to_end(driver, *group)
    texts = [text(sequence.outputs) for sequence in group]
    assert len(set(texts)) > 1
    assert all(set(json.loads(each)) == {"name", "age"} for each in texts)


@pytest.mark.parametrize("step", [1, 2, 5, 9])
def test_a_sequence_that_comes_back_goes_on_as_if_nothing_had_happened(folder: Path, step: int) -> None:
    alone = PlanDriver(make_runner(folder))
    [expected] = add(alone, sampled(OBJECT))
    run_to_end(alone, expected)
    driver = PlanDriver(make_runner(folder), chunk=3)
    [sequence] = add(driver, sampled(OBJECT))
    for number in range(12):
        if number in (step, step + 2) and sequence.slot is not None and not sequence.done:
            driver.recompute(sequence)
        driver.step()
        if EOS in sequence.outputs:
            sequence.wanted = len(sequence.outputs)
    run_to_end(driver, sequence)
    assert sequence.outputs == expected.outputs


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 150},
        {"repetition_penalty": 1.5, "frequency_penalty": 2.0, "presence_penalty": -2.0},
        {"logit_bias_ids": np.arange(264, dtype=np.int32), "logit_bias_values": np.linspace(-100, 100, 264)},
        {"top_k": 1},
        {"top_p": 0.1, "min_p": 0.5},
        {"logprobs": 5},
        {"stop_token_ids": np.arange(100, 140, dtype=np.int32), "min_tokens": 100},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_with_other_parameters(folder: Path, text: Callable[[list[int]], str], fields: dict[str, Any]) -> None:
    if "logit_bias_values" in fields:
        fields["logit_bias_values"] = fields["logit_bias_values"].astype(np.float32)
    driver = PlanDriver(make_runner(folder))
    [sequence] = add(driver, sampled(OBJECT, **fields))
    run_to_end(driver, sequence)
    assert not sequence.failed
    assert set(json.loads(text(sequence.outputs))) == {"name", "age"}


def test_min_tokens_holds_the_end_back_only_while_the_grammar_can_go_on(
    folder: Path, text: Callable[[list[int]], str]
) -> None:
    for wanted in (0, 6, 20):
        driver = PlanDriver(make_runner(folder))
        [sequence] = add(driver, sampled(DIGITS, min_tokens=wanted))
        run_to_end(driver, sequence)
        length = len(text(sequence.outputs))
        assert min(wanted - 1, 8) <= length <= 8


def test_logprobs_are_those_of_the_raw_logits(folder: Path) -> None:
    driver = PlanDriver(make_runner(folder))
    [constrained] = add(driver, sampled(DIGITS, logprobs=20))
    driver.add(PROMPT, 1, SamplingParams(temperature=0.0, logprobs=20))
    result = driver.step()
    assert result.logprobs.counts.tolist() == [21, 21]
    ours, others = result.logprobs.values.reshape(2, 21)
    assert ours[1:].tolist() == pytest.approx(others[1:].tolist(), abs=1e-5), "the same prompt"
    assert result.logprobs.ranks[0] >= 1
    assert constrained.outputs[0] in range(len(SPECIAL), 264)


def test_a_grammar_that_cannot_go_on_fails_its_row_alone(folder: Path) -> None:
    words = " ".join(f"r{i}" for i in range(1000))
    rules = "\n".join(f'r{i}: "a"? "b"? r{(i * 7 + 1) % 1000}?' for i in range(1000))
    driver = PlanDriver(make_runner(folder))
    [bad] = add(driver, sampled(LLMatcher.grammar_from_lark(f"start: {words}\n{rules}")))
    [good] = add(driver, sampled(DIGITS))
    [broken] = add(driver, sampled(LLMatcher.grammar_from_lark("start: nope")))
    run_to_end(driver, bad, good, broken)
    faults = [fault for result in driver.results for fault in result.faults]
    assert [fault.code for fault in faults] == ["grammar_failed"] * 2
    assert "20,000 items" in faults[0].message
    assert "nope" in faults[1].message
    assert bad.failed
    assert broken.failed
    assert not good.failed


def test_a_row_without_its_matcher_fails_alone_and_says_why(folder: Path) -> None:
    runner = make_runner(folder)
    stuck, gate = GrammarCompiler(folder, 264, [EOS]), threading.Event()
    for _ in range(2):  # both threads
        stuck._threads.submit(gate.wait, 60)
    runner._grammars = stuck
    runner.begin(WorkerWelcome(7, 4, 64))
    join = SequenceJoin(0, 0, 2, 0, np.array([5, 6], np.int32), np.array([1], np.int32), sampled(DIGITS))
    result = runner.execute(IterationPlan(7, 1, joined=(join,), prefill_chunks=np.array([[0, 0, 2, 1]], np.int32)))
    assert result.token_ids.tolist() == [-1]
    assert [(f.slot, f.code) for f in result.faults] == [(0, "grammar_timeout")]
    gate.set()


def test_it_is_announced_for_the_join_that_asked(folder: Path) -> None:
    heard: list[GrammarCompiled] = []
    compiler = GrammarCompiler(folder, 264, [EOS])
    rows = GrammarRows(4, 264, compiler, heard.append)
    none = np.zeros(0, np.int32)
    rows.join(2, DIGITS, none, epoch=5, iteration=8)
    rows.join(3, LLMatcher.grammar_from_lark("start: nope"), none, epoch=5, iteration=9)
    compiler._threads.shutdown(wait=True)
    first, second = sorted(heard, key=lambda message: message.slot)
    assert first == GrammarCompiled(5, 8, 2)
    assert (second.epoch, second.iteration, second.slot) == (5, 9, 3)
    assert "nope" in second.error


def test_a_released_slot_asks_for_nothing_more(folder: Path) -> None:
    driver = PlanDriver(make_runner(folder), max_num_seqs=1)
    [first] = add(driver, sampled(DIGITS))
    run_to_end(driver, first)
    driver.step()  # the one that tells of it
    [second] = driver.add(PROMPT, 10)
    driver.run()
    alone = PlanDriver(make_runner(folder))
    [expected] = alone.add(PROMPT, 10)
    alone.run()
    assert second.outputs == expected.outputs
