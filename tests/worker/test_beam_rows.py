"""Rows of beam searches in a runner: candidates in, chosen tokens out, equal to transformers' generate()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pagemill_testing.beam_driver import BeamDriver, candidates_of
from pagemill_testing.plan_driver import GREEDY, PlanDriver
from pagemill_testing.tiny_models import VOCAB, make_runner, save, tiny_llama

from pagemill_shared.codec import decode, encode
from pagemill_shared.errors import ProtocolError
from pagemill_shared.messages import IterationPlan, SequenceJoin, WorkerWelcome
from pagemill_shared.sampling import EarlyStopping, SamplingParams
from pagemill_worker.runner import Runner

REFERENCE = tiny_llama(initializer_range=0.12)
ENDS = [2, 7, 31]
EARLY = {EarlyStopping.HEURISTIC: False, EarlyStopping.WHEN_FULL: True, EarlyStopping.NEVER: "never"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(REFERENCE, tmp_path_factory.mktemp("tiny"))


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(32, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"beam_width": 4, "max_tokens": 12, "eos_token_ids": np.array(ENDS, np.int32)} | fields))


def reference(ids: list[int], sampling: SamplingParams) -> tuple[list[list[int]], list[float]]:
    """Outputs and sequences_scores of transformers, best first."""
    tensor = torch.tensor([ids])
    result = REFERENCE.generate(
        tensor,
        attention_mask=torch.ones_like(tensor),
        num_beams=sampling.beam_width,
        num_return_sequences=sampling.beam_width,
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens or None,
        length_penalty=sampling.length_penalty,
        early_stopping=EARLY[EarlyStopping(sampling.early_stopping)],
        repetition_penalty=sampling.repetition_penalty,
        do_sample=False,
        eos_token_id=sampling.eos_token_ids.tolist(),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return [up_to_end(line) for line in result.sequences[:, len(ids) :].tolist()], result.sequences_scores.tolist()


def up_to_end(tokens: list[int]) -> list[int]:
    ends = [index for index, token in enumerate(tokens) if token in ENDS]
    return tokens[: ends[0] + 1] if ends else tokens


SETTINGS = [
    {"beam_width": 2},
    {"beam_width": 3, "early_stopping": EarlyStopping.WHEN_FULL},
    {"beam_width": 4, "early_stopping": EarlyStopping.NEVER},
    {"beam_width": 4, "length_penalty": 2.0, "early_stopping": EarlyStopping.NEVER},
    {"beam_width": 8, "length_penalty": 0.0},
    {"beam_width": 5, "length_penalty": -1.0, "early_stopping": EarlyStopping.WHEN_FULL},
    {"beam_width": 4, "repetition_penalty": 1.4},
    {"beam_width": 4, "repetition_penalty": 0.7, "length_penalty": 0.5},
    {"beam_width": 3, "min_tokens": 6, "early_stopping": EarlyStopping.WHEN_FULL},
    {"beam_width": 4, "min_tokens": 4, "repetition_penalty": 1.2, "max_tokens": 20},
    {"beam_width": 4, "max_tokens": 1},
]


@pytest.mark.parametrize("fields", SETTINGS)
def test_searches_equal_transformers(fields: dict[str, Any], folder: Path) -> None:
    driver = BeamDriver(make_runner(folder, num_blocks=200), max_num_seqs=48)
    sampling = params(**fields)
    searches = [driver.add_search(prompt(length, length), sampling) for length in (1, 8, 13)]
    driver.run()
    for search in searches:
        outputs, scores = reference(search.prompt, sampling)
        assert search.outputs == outputs
        assert search.scores == pytest.approx(scores, rel=1e-5)
    assert sorted(driver.free_blocks) == list(range(1, 201))


def test_the_settings_matter(folder: Path) -> None:
    """What the comparison above runs through: beams that end early and at max_tokens, forks, drops, copies."""
    driver = BeamDriver(make_runner(folder, num_blocks=200), max_num_seqs=48)
    found = {}
    for number, fields in enumerate(SETTINGS):
        search = driver.add_search(prompt(7, 7), params(**fields))
        driver.run()
        found[number] = str(search.outputs)
    assert len(set(found.values())) >= 8
    lengths = {len(output) for search in driver.searches for output in search.outputs}
    assert len(lengths) > 4
    assert any(plan.forks.size and plan.released.size for plan in driver.plans)
    assert any(plan.block_copies.size for plan in driver.plans)


def test_recomputed_searches_go_on_as_if_nothing_had_happened(folder: Path) -> None:
    sampling = params(repetition_penalty=1.3, min_tokens=8, max_tokens=16)
    driver = BeamDriver(make_runner(folder, num_blocks=200), max_num_seqs=16)
    search, other = driver.add_search(prompt(9), sampling), driver.add_search(prompt(6, 1), sampling)
    for step in range(30):
        if step in (2, 5, 6) and not search.done:
            driver.recompute_beams(search)
        if search.done and other.done:
            break
        driver.step_beams()
    for each in (search, other):
        outputs, scores = reference(each.prompt, sampling)
        assert each.outputs == outputs
        assert each.scores == pytest.approx(scores, rel=1e-5)


def test_beams_and_sampled_rows_share_plans(folder: Path) -> None:
    """A batch of a beam, a greedy row, a random row and a row with log-probabilities gives each what it gets alone."""
    rows = [
        (params(), prompt(5, 1)),
        (GREEDY, prompt(6, 2)),
        (SamplingParams(temperature=1.0, seed=3), prompt(7, 3)),
        (SamplingParams(temperature=0.0, logprobs=2, repetition_penalty=1.3), prompt(4, 4)),
        (params(beam_width=2, logprobs=20), prompt(8, 5)),
        (params(beam_width=3, repetition_penalty=1.5), prompt(3, 6)),
    ]
    together = one_plan(make_runner(folder), rows)
    assert decode(encode(together)) == together
    assert together.candidates.rows.tolist() == [0, 4, 5]
    assert together.candidates.counts.tolist() == [16, 20, 12]
    assert together.logprobs.rows.tolist() == [3]
    found = candidates_of(together)
    for index, row in enumerate(rows):
        alone = one_plan(make_runner(folder), [row])
        assert together.token_ids[index] == alone.token_ids[0]
        if index in found:
            best = candidates_of(alone)[0]
            assert found[index].token_ids.tolist() == best.token_ids.tolist()
            assert found[index].values == pytest.approx(best.values, abs=1e-5)


def one_plan(runner: Runner, rows: list[tuple[SamplingParams, list[int]]]) -> Any:
    """Every row joins and computes its prompt."""
    runner.begin(WorkerWelcome(7, 8, 1000))
    joined = tuple(join(slot, ids, sampling) for slot, (sampling, ids) in enumerate(rows))
    chunks = np.array([[slot, 0, len(ids), 1] for slot, (_, ids) in enumerate(rows)], np.int32)
    return runner.execute(IterationPlan(7, 1, joined=joined, prefill_chunks=chunks))


def join(slot: int, ids: list[int], sampling: SamplingParams) -> SequenceJoin:
    blocks = range(1 + 4 * slot, 5 + 4 * slot)
    return SequenceJoin(slot, 0, len(ids), 0, np.array(ids, np.int32), np.array(blocks, np.int32), sampling)


def test_candidates_are_log_probabilities_with_processors(folder: Path) -> None:
    ids = prompt(6)
    with torch.no_grad():
        values = REFERENCE(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    bias = SamplingParams(
        beam_width=8,
        min_tokens=1,
        repetition_penalty=1.5,
        logit_bias_ids=np.array([40, ids[0]], np.int32),
        logit_bias_values=np.array([3.0, 1.0], np.float32),
        eos_token_ids=np.array(ENDS, np.int32),
    )
    values[[40, ids[0]]] += torch.tensor([3.0, 1.0])
    seen = torch.tensor(sorted(set(ids)))
    values[seen] = torch.where(values[seen] > 0, values[seen] / 1.5, values[seen] * 1.5)
    values[ENDS] = -torch.inf
    expected = values.topk(32)
    [found] = candidates_of(one_plan(make_runner(folder), [(bias, ids)])).values()
    assert found.token_ids.tolist() == expected.indices.tolist()
    assert found.values == pytest.approx(expected.values.numpy(), abs=1e-5)


def test_a_small_vocabulary_gives_all_it_has(folder: Path) -> None:
    wide = params(beam_width=128)
    assert wide.num_candidates > VOCAB
    [found] = candidates_of(one_plan(make_runner(folder), [(wide, prompt(4))])).values()
    assert sorted(found.token_ids.tolist()) == list(range(VOCAB))
    assert np.exp(found.values.astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)


def test_a_beam_does_not_grow_by_itself(folder: Path) -> None:
    runner = make_runner(folder)
    first = one_plan(runner, [(params(), prompt(5))])
    # The same token is computed again, as nothing was chosen, and again after a choice.
    again = runner.execute(IterationPlan(7, 2, decode_rows=np.array([0], np.int32)))
    assert again.candidates.token_ids.tolist() == first.candidates.token_ids.tolist()
    assert again.candidates.values == pytest.approx(first.candidates.values, abs=1e-5)
    chosen = np.array([[0, 55]], np.int32)
    grown = runner.execute(IterationPlan(7, 3, chosen=chosen, decode_rows=np.array([0], np.int32)))
    fresh = one_plan(make_runner(folder), [(params(), [*prompt(5), 55])])
    assert grown.candidates.token_ids.tolist() == fresh.candidates.token_ids.tolist()


def test_a_forked_beam_starts_as_its_parents_twin(folder: Path) -> None:
    runner = make_runner(folder)
    sampling = params(repetition_penalty=1.5)
    one_plan(runner, [(sampling, prompt(4))])
    plan = IterationPlan(
        7,
        2,
        forks=np.array([[0, 1, 1]], np.int32),
        new_blocks=np.array([[0, 1, 20], [1, 1, 21]], np.int32),
        chosen=np.array([[0, 60], [1, 61]], np.int32),
        decode_rows=np.array([0, 1], np.int32),
    )
    found = candidates_of(runner.execute(plan))
    for index, token in enumerate((60, 61)):
        prompt_and_output = SequenceJoin(
            0, 0, 4, 0, np.array([*prompt(4), token], np.int32), np.array([1, 2], np.int32), sampling
        )
        fresh = make_runner(folder)
        fresh.begin(WorkerWelcome(7, 8, 1000))
        chunk = np.array([[0, 0, 5, 1]], np.int32)
        [expected] = candidates_of(
            fresh.execute(IterationPlan(7, 1, joined=(prompt_and_output,), prefill_chunks=chunk))
        ).values()
        assert found[index].token_ids.tolist() == expected.token_ids.tolist()
        assert found[index].values == pytest.approx(expected.values, abs=1e-5)


def test_a_beam_with_logits_that_are_not_finite_fails_alone(folder: Path) -> None:
    runner = make_runner(folder)
    one_plan(runner, [(params(), prompt(5)), (params(), prompt(6, 1))])
    runner.cache.pool[1, 0, 0, 1] = torch.nan
    both = np.array([0, 1], np.int32)
    chosen = np.array([[0, 50], [1, 51]], np.int32)
    result = runner.execute(IterationPlan(7, 2, chosen=chosen, decode_rows=both))
    assert result.token_ids[0] == -1
    assert [fault.slot for fault in result.faults] == [0]
    assert list(candidates_of(result)) == [1]
    assert decode(encode(result)) == result
    forked = IterationPlan(7, 3, forks=np.array([[0, 2, 1]], np.int32), decode_rows=np.array([2], np.int32))
    assert runner.execute(forked).token_ids.tolist() == [-1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chosen": [[8, 5]]}, "slot 8 is given a token, but there are 8 slots"),
        ({"chosen": [[3, 5]]}, "token 5 was chosen for slot 3, which is free"),
        ({"chosen": [[1, 5]]}, "token 5 was chosen for slot 1, which is no beam"),
        ({"chosen": [[0, 5], [0, 6]]}, "token 5 was chosen for slot 0, which is given two"),
        ({"chosen": [[0, VOCAB]]}, f"token {VOCAB} was chosen for slot 0, which knows a vocabulary of {VOCAB}"),
        ({"forks": [[0, 2, 1]], "prefill_chunks": [[0, 4, 1, 2]]}, "slot 0 is a beam and cannot sample several"),
    ],
)
def test_plans_that_contradict_what_is_known_are_refused(
    fields: dict[str, list[list[int]]], message: str, folder: Path
) -> None:
    runner = make_runner(folder)
    one_plan(runner, [(params(), prompt(5)), (GREEDY, prompt(5))])
    arrays: dict[str, Any] = {name: np.array(value, np.int32) for name, value in fields.items()}
    with pytest.raises(ProtocolError, match=message):
        runner.execute(IterationPlan(7, 2, **arrays))


def test_plans_without_rows_compute_nothing(folder: Path) -> None:
    runner = make_runner(folder, num_swap_blocks=4)
    runner.begin(WorkerWelcome(7, 8, 1000))
    pairs = np.array([[1, 0], [2, 3]], np.int32)
    for number, fields in enumerate(
        [
            {},
            {"joined": (join(0, prompt(5), GREEDY), join(1, prompt(6), params()))},
            {"swap_out": pairs, "released": np.array([0, 1], np.int32)},
            {"swap_in": pairs[:, ::-1].copy(), "joined": (join(1, prompt(6), params()),)},
            {"forks": np.array([[1, 2, 1]], np.int32)},
            {"block_copies": np.array([[1, 30]], np.int32)},
            {"chosen": np.array([[1, 5], [2, 6]], np.int32)},
            {"released": np.array([1, 2], np.int32)},
        ]
    ):
        result = runner.execute(IterationPlan(7, number + 1, **fields))  # type: ignore[arg-type]
        assert result.iteration == number + 1
        assert result.token_ids.size == result.logprobs.rows.size == result.candidates.rows.size == 0
        assert result.faults == ()
        assert decode(encode(result)) == result
    assert not any(runner.kernels.calls[name] for name in ("attention", "rotate_and_write"))
    driver = PlanDriver(runner)
    [sequence] = driver.add(prompt(5), 3)
    driver.run()
    assert sequence.done
