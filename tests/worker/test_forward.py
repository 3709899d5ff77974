"""The forward pass over rows on the device computes what it computes from the host's arrays, recorded or not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from pagemill_testing.beam_driver import BeamDriver
from pagemill_testing.no_waiting import NoWaiting
from pagemill_testing.plan_driver import DrivenSequence, PlanDriver
from pagemill_testing.shapes_alone import ShapesAlone
from pagemill_testing.tiny_models import VOCAB, make_runner, save, tiny_llama

from pagemill_kernels.reference import TorchKernels
from pagemill_shared.messages import IterationPlan, SequenceJoin, WorkerWelcome
from pagemill_shared.sampling import SamplingParams
from pagemill_worker.cache import KVCache
from pagemill_worker.forward import FIRST_LINES, ResidentForward
from pagemill_worker.grammar_compiler import GrammarCompiler
from pagemill_worker.graphs import graph_sizes, run_again
from pagemill_worker.models.registry import load_model
from pagemill_worker.runner import Runner

MIXED = SamplingParams(temperature=0.8, seed=3, top_p=0.9, repetition_penalty=1.2, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(), tmp_path_factory.mktemp("tiny"))


def drive(runner: Runner, seed: int) -> list[DrivenSequence]:
    """Requests that come, fork, are swapped out and in, recomputed and end, in an order that ``seed`` makes."""
    rng = random.Random(seed)
    driver = PlanDriver(runner, max_num_seqs=6, chunk=5)
    everybody: list[DrivenSequence] = []
    out: list[DrivenSequence] = []
    for _ in range(28):
        running = [s for s in driver.sequences if s.slot is not None and not s.done and s.outputs and not s.forks]
        if len(driver.free_slots) >= 3 and len([s for s in everybody if not s.done]) < 4 and rng.random() < 0.6:
            prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 13))]
            sampling = rng.choice([SamplingParams(temperature=0.0), MIXED])
            everybody += driver.add(prompt, rng.randint(2, 12), sampling, n=rng.choice([1, 1, 2]))
        elif running and rng.random() < 0.2:
            driver.recompute(rng.choice(running))
        elif running and rng.random() < 0.3 and len(driver.free_host) >= 8:
            alone = [s for s in running if all(driver.references[block] == 1 for block in s.table)]
            if alone:
                out.append(rng.choice(alone))
                driver.swap_out(out[-1])
        pairs = driver.swap_in(out.pop()) if out and rng.random() < 0.3 else []
        driver.step(pairs)
        check_rows(runner)
    return everybody


def check_rows(runner: Runner) -> None:
    if not isinstance(runner.forward, ResidentForward):
        return
    host, device = cast(Any, runner._rows), runner.forward.rows
    for slot in np.flatnonzero(host.lengths).tolist():
        length, blocks = int(host.lengths[slot]), int(host.table_lengths[slot])
        assert (int(device.lengths[slot]), int(device.newest[slot])) == (length, host.tokens[slot, length - 1])
        assert device.tables[slot, :blocks].tolist() == host.tables[slot, :blocks].tolist()


@pytest.mark.parametrize("seed", range(3))  # among them: joins, forks, copies, swaps out and in, recomputed rows
def test_tokens_are_those_of_arrays_from_the_host(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagemill_worker.forward.FIRST_LINES", 6)
    runs = [
        drive(
            make_runner(folder, num_swap_blocks=20, kernels=TorchKernels(), is_resident=resident, record=record), seed
        )
        for resident, record in ((False, None), (True, None), (True, run_again))
    ]
    for run in runs:
        assert sum(len(sequence.outputs) for sequence in run) > 40
    expected = [sequence.outputs for sequence in runs[0]]
    assert [sequence.outputs for sequence in runs[1]] == expected
    assert [sequence.outputs for sequence in runs[2]] == expected


def test_beams_go_on_with_the_tokens_that_are_chosen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagemill_worker.forward.FIRST_LINES", 8)
    outputs, scores = [], []
    for resident in (False, True):
        record = run_again if resident else None
        runner = make_runner(folder, kernels=TorchKernels(), is_resident=resident, record=record)
        driver = BeamDriver(runner)
        sampling = SamplingParams(beam_width=3, n=3, max_tokens=9, eos_token_ids=np.array([2], np.int32))
        search = driver.add_search([5, 9, 20, 33, 4, 50, 7], sampling)
        while not search.done:
            driver.step_beams()
            check_rows(runner)
        outputs.append(search.outputs)
        scores.append(search.scores)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 3
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)  # sums over padded rows may run in another order


def test_decode_rows_alone_take_the_smallest_recording(folder: Path) -> None:
    sizes: list[int] = []

    def record(run: Any) -> Any:
        repeat, size = run_again(run), run.args[0]

        def counted() -> torch.Tensor:
            sizes.append(size)
            return cast(torch.Tensor, repeat())

        return counted

    runner = make_runner(folder, is_resident=True, record=record)
    runner.begin(WorkerWelcome(7, 8, 100))
    joins = tuple(join(slot, [slot + 3], SamplingParams(temperature=0.0)) for slot in range(7))
    slots = np.arange(7, dtype=np.int32)
    runner.execute(IterationPlan(7, 1, joined=joins[:6], decode_rows=slots[:3]))
    before = runner.cache.pool[7:].clone()
    runner.execute(IterationPlan(7, 2, decode_rows=slots[:3]))  # one row of padding
    assert sizes == [4, 4]
    assert torch.equal(runner.cache.pool[7:], before)
    assert runner.cache.pool[0].any()  # where padding writes
    runner.execute(IterationPlan(7, 3, decode_rows=slots[5:6]))
    assert sizes == [4, 4, 1]
    chunk = np.array([[6, 0, 1, 1]], np.int32)
    runner.execute(IterationPlan(7, 4, joined=joins[6:], decode_rows=slots[:2], prefill_chunks=chunk))
    assert sizes == [4, 4, 1]


def test_recordings_outlive_an_epoch_unless_there_are_more_slots(folder: Path) -> None:
    made: list[int] = []

    def record(run: Any) -> Any:
        made.append(run.args[0])
        return run_again(run)

    runner = make_runner(folder, is_resident=True, record=record)
    runner.begin(WorkerWelcome(7, 2, 100))
    assert made == graph_sizes(FIRST_LINES)[::-1]
    runner.begin(WorkerWelcome(8, FIRST_LINES, 100))
    assert len(made) == len(graph_sizes(FIRST_LINES))
    runner.begin(WorkerWelcome(9, FIRST_LINES + 1, 100))
    assert made[len(graph_sizes(FIRST_LINES))] == FIRST_LINES + 1


@pytest.mark.parametrize("recorder", [None, lambda: run_again])
def test_nothing_waits_for_the_device_before_the_read_of_the_tokens(recorder: Any, folder: Path) -> None:
    device = torch.device("meta")
    config = json.loads((folder / "config.json").read_text())
    model = load_model(folder, config, 64, torch.float32, device, ShapesAlone())
    cache = KVCache(model.cache, 4, 20, 0, torch.float32, device)
    forward = ResidentForward(model, cache, ShapesAlone(), device, 64, recorder)
    grammars = GrammarCompiler(folder, model.vocab_size, [])
    runner = Runner(model, cache, ShapesAlone(), 64, device, grammars, forward=forward)
    runner.begin(WorkerWelcome(7, 4, 100))
    plans = (
        IterationPlan(
            7,
            1,
            joined=(join(0, [5, 6, 7], MIXED), join(1, [8] * 6, SamplingParams(temperature=0.0))),
            forks=np.array([[0, 2, 1]], np.int32),
            new_blocks=np.array([[2, 1, 9]], np.int32),
            decode_rows=np.array([1], np.int32),
            prefill_chunks=np.array([[0, 0, 3, 2]], np.int32),
        ),
        IterationPlan(7, 2, decode_rows=np.array([0, 1, 2], np.int32)),
    )
    for plan in plans:
        # The read is refused by the device itself, and that it is the read and nothing else is what is tested.
        with NoWaiting(), pytest.raises(NotImplementedError, match="meta") as caught:
            runner.execute(plan)
        assert next(entry.name for entry in caught.traceback if entry.path.name == "transfer.py") == "download"
        slots = np.array([1, 0, 2] if plan.iteration == 1 else [0, 1, 2])
        with torch.inference_mode():
            cast(Any, runner._rows).record(slots, np.array([1, 2, 3], np.int32))


def join(slot: int, tokens: list[int], sampling: SamplingParams) -> SequenceJoin:
    """With two blocks."""
    return SequenceJoin(
        slot=slot,
        sequence=0,
        prompt_length=len(tokens),
        computed=0,
        token_ids=np.array(tokens, np.int32),
        block_table=np.array([2 * slot + 1, 2 * slot + 2], np.int32),
        sampling=sampling,
    )
