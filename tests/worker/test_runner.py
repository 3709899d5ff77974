"""Plans carried out by a runner over a tiny model, driven by a simple scheduler and compared with transformers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from pagemill_testing.cpu_kernels import isa_names, loaded
from pagemill_testing.plan_driver import GREEDY, DrivenSequence, PlanDriver
from pagemill_testing.tiny_models import VOCAB, greedy, make_runner, save, tiny_llama

from pagemill_kernels.cpu.kernels import CpuKernels
from pagemill_shared.codec import decode, encode
from pagemill_shared.errors import ProtocolError
from pagemill_shared.messages import IterationPlan, IterationResult, SequenceJoin, WorkerWelcome
from pagemill_shared.sampling import SamplingParams, uniforms
from pagemill_worker.runner import Runner

REFERENCE = tiny_llama()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(REFERENCE, tmp_path_factory.mktemp("tiny"))


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_greedy_tokens_equal_transformers(folder: Path) -> None:
    driver = PlanDriver(make_runner(folder), chunk=6)
    lengths = [1, 3, 4, 5, 8, 17, 30]
    sequences = [driver.add(prompt(n, n), 12)[0] for n in lengths]
    driver.run()
    for sequence in sequences:
        assert sequence.outputs == greedy(REFERENCE, sequence.prompt, 12)


def test_requests_that_come_and_go_reuse_blocks_and_slots(folder: Path) -> None:
    driver = PlanDriver(make_runner(folder, num_blocks=14), max_num_seqs=3, chunk=5)
    waiting = [(prompt(3 + 2 * n, n), 3 + n % 5) for n in range(9)]
    done = []
    while waiting or any(not s.done for s in driver.sequences):
        if waiting and len(driver.free_slots) and sum(not s.done for s in driver.sequences) < 3:
            ids, wanted = waiting.pop(0)
            done += driver.add(ids, wanted)
        driver.step()
    assert len(done) == 9
    for sequence in done:
        assert sequence.outputs == greedy(REFERENCE, sequence.prompt, sequence.wanted)
    assert sorted(driver.free_blocks) == list(range(1, 15))


def test_recomputed_sequences_go_on_as_if_nothing_had_happened(folder: Path) -> None:
    sampling = SamplingParams(
        temperature=0.9, seed=5, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2
    )
    alone = PlanDriver(make_runner(folder))
    [expected] = alone.add(prompt(9), 20, sampling)
    alone.run()
    driver = PlanDriver(make_runner(folder), chunk=4)
    [sequence] = driver.add(prompt(9), 20, sampling)
    [other] = driver.add(prompt(14, 1), 30)
    for step in range(40):
        if step in (1, 6, 13) and sequence.slot is not None:
            driver.recompute(sequence)
        driver.step()
        if sequence.done and other.done:
            break
    assert sequence.outputs == expected.outputs
    assert other.outputs == greedy(REFERENCE, other.prompt, 30)


@pytest.mark.parametrize("chunk", [4, 7, 100])
@pytest.mark.parametrize("isa", isa_names())
def test_what_is_computed_again_has_the_same_bits(
    isa: str, chunk: int, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The prompt's last chunk is a single token where chunks have 4 or 7."""
    sampling = SamplingParams(temperature=1.2, seed=3, logprobs=2)
    ids = prompt(29)

    def logprobs(driver: PlanDriver, again: tuple[int, ...]) -> np.ndarray:
        [sequence] = driver.add(ids, 40, sampling)
        while not sequence.done:
            if len(sequence.outputs) in again and sequence.computed > len(ids):
                driver.recompute(sequence)
                again = again[1:]
            driver.step()
        return np.concatenate([result.logprobs.values for result in driver.results])

    def driver(chunk: int) -> PlanDriver:
        return PlanDriver(make_runner(folder, kernels=CpuKernels(loaded(isa, tmp_path_factory), isa)), chunk=chunk)

    assert np.array_equal(logprobs(driver(chunk), (2, 17, 30)), logprobs(driver(1000), ()))


def test_swapped_sequences_come_back(folder: Path) -> None:
    driver = PlanDriver(make_runner(folder, num_blocks=16, num_swap_blocks=6), chunk=100)
    [sequence] = driver.add(prompt(10), 16)
    [other] = driver.add(prompt(7, 1), 24)
    for _ in range(5):
        driver.step()
    driver.swap_out(sequence)
    [newcomer] = driver.add(prompt(12, 2), 6)  # takes the freed blocks in the very plan that swaps them out
    freed = set(driver.free_blocks)
    for _ in range(6):
        driver.step()
    assert newcomer.done
    assert freed & set(driver.plans[5].new_blocks[:, 2].tolist())
    assert len(driver.plans[5].swap_out) == 4
    driver.step(driver.swap_in(sequence))
    driver.run()
    for each in (sequence, other, newcomer):
        assert each.outputs == greedy(REFERENCE, each.prompt, each.wanted)


@pytest.mark.parametrize("length", [7, 8])
def test_forks_share_the_prompt_and_copy_on_write(length: int, folder: Path) -> None:
    sampling = SamplingParams(temperature=1.0, seed=11)
    driver = PlanDriver(make_runner(folder), chunk=4)
    group = driver.add(prompt(length), 10, sampling, n=3)
    [mate] = driver.add(prompt(5, 3), 10)
    driver.run()
    copies = sum(len(plan.block_copies) for plan in driver.plans)
    assert copies == (2 if length % 4 else 0)
    assert len({tuple(sequence.outputs) for sequence in group}) == 3
    for sequence in group:  # each as alone, with its own random numbers
        alone = PlanDriver(make_runner(folder))
        single = alone.add(prompt(length), 10, sampling)[0]
        single.index = sequence.index
        alone.run()
        assert single.outputs == sequence.outputs
    assert mate.outputs == greedy(REFERENCE, mate.prompt, 10)
    assert sorted(driver.free_blocks) == list(range(1, 65))


def test_forks_carry_penalty_counts(folder: Path) -> None:
    sampling = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1.5)
    driver = PlanDriver(make_runner(folder))
    group = driver.add(prompt(6), 12, sampling, n=2)
    driver.run()
    alone = PlanDriver(make_runner(folder))
    [single] = alone.add(prompt(6), 12, sampling)
    alone.run()
    assert group[0].outputs == group[1].outputs == single.outputs != greedy(REFERENCE, prompt(6), 12)


def test_memory_operations_run_in_their_order(folder: Path) -> None:
    """Each hazard in one plan: a block is swapped out and then a copy target, a swapped-in block is copied."""
    runner = make_runner(folder, num_blocks=4, num_swap_blocks=2)
    runner.begin(WorkerWelcome(7, 2, 100))
    pool, host = runner.cache.pool, runner.cache.host_pool
    for block in range(1, 5):
        pool[block] = block
    host[0] = 100
    plan = IterationPlan(
        7,
        1,
        swap_out=np.array([[1, 1]], np.int32),
        swap_in=np.array([[0, 2]], np.int32),
        block_copies=np.array([[2, 1], [4, 3]], np.int32),
    )
    result = runner.execute(plan)
    assert result.token_ids.size == 0
    assert float(host[1].mean()) == 1
    assert [float(pool[block].mean()) for block in range(1, 5)] == [100, 100, 4, 4]


def test_later_rows_of_a_plan_read_what_earlier_ones_write(folder: Path) -> None:
    runner = make_runner(folder)
    runner.begin(WorkerWelcome(7, 4, 100))
    ids = prompt(11)
    first = join(0, ids, [1, 2, 3])
    second = join(1, ids, [1, 2, 4], computed=8)
    chunks = np.array([[0, 0, 11, 1], [1, 8, 3, 1]], np.int32)
    result = runner.execute(IterationPlan(7, 1, joined=(first, second), prefill_chunks=chunks))
    assert result.token_ids.tolist() == greedy(REFERENCE, ids, 1) * 2


def test_a_row_with_logits_that_are_not_finite_fails_alone(folder: Path) -> None:
    driver = PlanDriver(make_runner(folder, num_blocks=10), chunk=4)
    [good] = driver.add(prompt(6), 14)
    [bad] = driver.add(prompt(5, 1), 14)
    for _ in range(4):
        driver.step()
    driver.runner.cache.pool[bad.table[0], 0, 0, 1] = torch.nan
    slot = bad.slot
    result = driver.step()
    assert bad.failed
    assert result.token_ids.tolist()[1] == -1
    assert [(fault.slot, fault.code) for fault in result.faults] == [(slot, "non_finite_logits")]
    assert "not finite" in result.faults[0].message
    assert decode(encode(result)) == result
    # The blocks it leaves hold NaN, and the next sequence that gets them is not harmed.
    [heir] = driver.add(prompt(9, 2), 10)
    driver.run()
    for sequence in (good, heir):
        assert sequence.outputs == greedy(REFERENCE, sequence.prompt, sequence.wanted)


def test_a_faulty_row_stays_faulty_until_its_slot_is_released(folder: Path) -> None:
    runner = make_runner(folder)
    runner.begin(WorkerWelcome(7, 2, 100))
    decode_row = np.array([0], np.int32)
    runner.execute(IterationPlan(7, 1, joined=(join(0, prompt(3), [1, 2]),), decode_rows=decode_row))
    runner.cache.pool[1] = torch.nan
    assert runner.execute(IterationPlan(7, 2, decode_rows=decode_row)).token_ids.tolist() == [-1]
    runner.cache.pool[1] = 0
    again = runner.execute(IterationPlan(7, 3, decode_rows=decode_row))  # was in flight already
    assert again.token_ids.tolist() == [-1]
    assert again.logprobs.rows.size == 0
    fresh = IterationPlan(
        7, 4, released=decode_row, joined=(join(0, prompt(3), [1]),), prefill_chunks=np.array([[0, 0, 3, 1]], np.int32)
    )
    assert runner.execute(fresh).token_ids.tolist() == greedy(REFERENCE, prompt(3), 1)


def test_surplus_tokens_of_an_ended_sequence_harm_nobody(folder: Path) -> None:
    runner = make_runner(folder, num_blocks=4)
    runner.begin(WorkerWelcome(7, 2, 100))
    rows = np.array([0], np.int32)
    chunk = np.array([[0, 0, 4, 1]], np.int32)
    runner.execute(IterationPlan(7, 1, joined=(join(0, prompt(4), [1]),), prefill_chunks=chunk))
    runner.execute(IterationPlan(7, 2, new_blocks=np.array([[0, 1, 2]], np.int32), decode_rows=rows))
    # Found finished meanwhile: block 2 and the slot go on to another sequence in the next plan.
    heir = join(0, prompt(6, 4), [2, 3])
    plan = IterationPlan(7, 3, released=rows, joined=(heir,), prefill_chunks=np.array([[0, 0, 6, 1]], np.int32))
    assert runner.execute(plan).token_ids.tolist() == greedy(REFERENCE, prompt(6, 4), 1)


def test_results_do_not_depend_on_batch_mates(folder: Path) -> None:
    requests = [
        (prompt(5, 1), GREEDY),
        (prompt(9, 2), SamplingParams(temperature=0.9, top_k=5, seed=1)),
        (prompt(12, 3), SamplingParams(temperature=0.8, top_p=0.5, seed=2)),
        (prompt(3, 4), SamplingParams(temperature=1.2, min_p=0.05, seed=42, logprobs=3)),
        (prompt(17, 5), SamplingParams(temperature=0.0, repetition_penalty=1.3, min_tokens=4)),
    ]
    busy = PlanDriver(make_runner(folder), chunk=6)
    together = [busy.add(ids, 16, sampling)[0] for ids, sampling in requests]
    busy.run()
    for (ids, sampling), sequence in zip(requests, together, strict=True):
        alone = PlanDriver(make_runner(folder))
        [single] = alone.add(ids, 16, sampling)
        alone.run()
        assert single.outputs == sequence.outputs


SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=0.0, repetition_penalty=1.4),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=1.1, seed=4, top_p=0.9, frequency_penalty=0.4, min_tokens=3),
]


@pytest.mark.parametrize(
    ("seed", "cache_dtype"), [*((seed, None) for seed in range(12)), (12, torch.int8), (13, torch.float8_e4m3fn)]
)
def test_any_course_of_events_gives_the_same_tokens(seed: int, cache_dtype: torch.dtype | None, folder: Path) -> None:
    """Arrivals, forks, recomputation and swapping at random moments, over a pool that is reused all the time."""

    def runner(num_blocks: int = 64, num_swap_blocks: int = 0) -> Runner:
        return make_runner(folder, num_blocks=num_blocks, num_swap_blocks=num_swap_blocks, cache_dtype=cache_dtype)

    chance = random.Random(seed)
    driver = PlanDriver(runner(60, 40), chunk=chance.choice([3, 5, 100]))
    groups: list[list[DrivenSequence]] = []
    swapped: list[DrivenSequence] = []
    for _ in range(60):
        running = [s for s in driver.sequences if s.slot is not None and not s.done and not s.forks]
        event = chance.random()
        if event < 0.25 and len(running) + len(swapped) < 4 and len(groups) < 8:
            ids = prompt(chance.randint(1, 14), chance.randint(0, 9))
            groups.append(
                driver.add(ids, chance.randint(1, 16), chance.choice(SAMPLINGS), n=chance.choice([1, 1, 2, 3]))
            )
        elif event < 0.35 and running:
            driver.recompute(chance.choice(running))
        elif event < 0.5 and running:
            swapped.append(chance.choice(running))
            driver.swap_out(swapped[-1])
            driver.step()
            continue
        driver.step(driver.swap_in(swapped.pop(0)) if swapped and chance.random() < 0.4 else None)
    for sequence in swapped:
        driver.step(driver.swap_in(sequence))
    driver.run()
    assert sorted(driver.free_blocks) == list(range(1, 61))
    assert groups
    for group in groups:
        for sequence in group:
            alone = PlanDriver(runner())
            [single] = alone.add(sequence.prompt, sequence.wanted, sequence.sampling)
            single.index = sequence.index
            alone.run()
            assert sequence.outputs == single.outputs


def test_numbers_belong_to_the_position_in_the_whole_sequence(folder: Path) -> None:
    driver = PlanDriver(make_runner(folder))
    [sequence] = driver.add(prompt(7), 8, SamplingParams(temperature=1.0, seed=77))
    driver.run()
    with torch.inference_mode():
        logits = REFERENCE(torch.tensor([sequence.tokens])).logits[0, 6:-1]
    cumulative = logits.double().softmax(-1).cumsum(-1)
    numbers = torch.from_numpy(uniforms([77] * 8, [0] * 8, range(7, 15)))
    assert sequence.outputs == (cumulative <= numbers.unsqueeze(1)).sum(-1).tolist()


def test_timings_and_order_of_the_result(folder: Path) -> None:
    ticks = iter(range(100))
    runner = make_runner(folder, clock=lambda: float(next(ticks)))
    runner.begin(WorkerWelcome(7, 4, 100))
    joins = (join(0, prompt(4), [1, 2]), join(1, prompt(5, 1), [3, 4]), join(2, prompt(6, 2), [5, 6]))
    chunks = np.array([[1, 0, 5, 1], [2, 0, 3, 0]], np.int32)
    first = runner.execute(IterationPlan(7, 1, joined=joins, prefill_chunks=np.array([[0, 0, 4, 1]], np.int32)))
    result = runner.execute(IterationPlan(7, 2, decode_rows=np.array([0], np.int32), prefill_chunks=chunks))
    zero, one = greedy(REFERENCE, prompt(4), 2), greedy(REFERENCE, prompt(5, 1), 1)
    assert first.token_ids.tolist() + result.token_ids.tolist() == [*zero, *one]
    assert (result.epoch, result.iteration) == (7, 2)
    assert (result.copy_us, result.forward_us, result.sample_us) == (1_000_000, 1_000_000, 1_000_000)


def test_a_new_epoch_forgets_everything(folder: Path) -> None:
    runner = make_runner(folder)
    runner.begin(WorkerWelcome(1, 2, 100))
    chunk = np.array([[0, 0, 5, 1]], np.int32)
    runner.execute(IterationPlan(1, 1, joined=(join(0, prompt(5), [1, 2]),), prefill_chunks=chunk))
    runner.begin(WorkerWelcome(2, 2, 100))
    with pytest.raises(ProtocolError, match="slot 0 is free"):
        runner.execute(IterationPlan(2, 1, decode_rows=np.array([0], np.int32)))


def join(slot: int, ids: list[int], table: list[int], computed: int = 0, **changes: int) -> SequenceJoin:
    fields = {"prompt_length": len(ids), "sequence": 0} | changes
    return SequenceJoin(
        slot=slot,
        computed=computed,
        token_ids=np.array(ids, np.int32),
        block_table=np.array(table, np.int32),
        sampling=GREEDY,
        **fields,
    )


JOINED = (join(0, [5, 6, 7], [1, 2]),)
ONE = np.array([0], np.int32)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (IterationPlan(7, 1, decode_rows=ONE), "slot 0 is free"),
        (IterationPlan(7, 1, decode_rows=np.array([4], np.int32)), "slot 4 runs, but there are 2 slots"),
        (IterationPlan(7, 1, released=np.array([9], np.int32)), "slot 9 is released"),
        (IterationPlan(7, 1, joined=JOINED * 2), "slot 0, which is taken"),
        (IterationPlan(7, 1, joined=(join(3, [1], [1]),)), "slot 3 is joined"),
        (IterationPlan(7, 1, joined=(join(0, [1], [9]),)), r"blocks 9\.\.9 are not within 1\.\.8"),
        (IterationPlan(7, 1, joined=(join(0, [1, VOCAB], [1]),)), "token 160 of a vocabulary of 160"),
        (IterationPlan(7, 1, joined=(join(0, [1], [1], prompt_length=2),)), "joins with 1 tokens, 2 of prompt"),
        (IterationPlan(7, 1, joined=(join(0, [1], [1], computed=2),)), "2 computed"),
        (IterationPlan(7, 1, joined=(join(0, [1] * 5, [1]),), decode_rows=ONE), "has no block"),
        (IterationPlan(7, 1, joined=JOINED, prefill_chunks=np.array([[0, 2, 2, 0]], np.int32)), "does not know"),
        (IterationPlan(7, 1, joined=JOINED, prefill_chunks=np.array([[0, 2, 0, 1]], np.int32)), "does not know"),
        (IterationPlan(7, 1, joined=JOINED, prefill_chunks=np.array([[0, 0, 3, 2]], np.int32)), "samples 2 tokens but"),
        (IterationPlan(7, 1, joined=JOINED, prefill_chunks=np.array([[0, 0, 2, 1]], np.int32)), "to sample before"),
        (IterationPlan(7, 1, joined=JOINED, decode_rows=np.array([0, 0], np.int32)), "runs twice"),
        (IterationPlan(7, 1, joined=(join(0, [1] * 17, [1, 2, 3, 4, 5]),), decode_rows=ONE), "beyond 16 tokens"),
        (IterationPlan(7, 1, forks=np.array([[0, 1, 1]], np.int32)), "forks from slot 0, which is free"),
        (IterationPlan(7, 1, joined=JOINED, forks=np.array([[0, 0, 1]], np.int32)), "forks into slot 0"),
        (IterationPlan(7, 1, joined=JOINED, forks=np.array([[0, 2, 1]], np.int32)), "slot 2 is forked to"),
        (IterationPlan(7, 1, new_blocks=np.array([[0, 0, 0]], np.int32)), r"blocks 0\.\.0"),
        (IterationPlan(7, 1, new_blocks=np.array([[0, 10**6, 1]], np.int32)), "position 1000000 of a block table"),
        (IterationPlan(7, 1, block_copies=np.array([[1, 9]], np.int32)), r"block_copies names blocks 9\.\.9"),
        (IterationPlan(7, 1, swap_out=np.array([[1, 0]], np.int32)), "swap_out names blocks"),
        (
            IterationPlan(
                7, 1, joined=(join(0, [1] * 9, [1]),), new_blocks=np.array([[0, 2, 3]], np.int32),
                prefill_chunks=np.array([[0, 0, 9, 1]], np.int32),
            ),
            "has a gap",
        ),
        (
            IterationPlan(
                7, 1, joined=(join(0, [1] * 11, [1]),),
                new_blocks=np.array([[0, 0, 1], [0, 1, 2], [0, 2, 3]], np.int32),
                prefill_chunks=np.array([[0, 0, 11, 1]], np.int32),
            ),
            "computes 11 tokens, 10 were agreed on",
        ),
    ],
)  # fmt: skip
def test_plans_that_contradict_the_mirror_are_refused(plan: IterationPlan, message: str, folder: Path) -> None:
    runner = make_runner(folder, num_blocks=8, max_model_len=16)
    runner.begin(WorkerWelcome(7, 2, 10))
    with pytest.raises(ProtocolError, match=message):
        runner.execute(plan)


def test_a_plan_before_the_welcome_is_refused(folder: Path) -> None:
    with pytest.raises(ProtocolError, match="before the first welcome"):
        make_runner(folder).execute(IterationPlan(7, 1))


def test_the_kernels_run_once_per_layer_for_all_rows(folder: Path) -> None:
    driver = PlanDriver(make_runner(folder))
    for seed in range(6):
        driver.add(prompt(4 + seed, seed), 5)
    driver.run()
    steps = len(driver.plans)
    assert driver.runner.kernels.calls == {"rotate_and_write": 2 * steps, "attention": 2 * steps}


def test_results_travel(folder: Path) -> None:
    driver = PlanDriver(make_runner(folder))
    driver.add(prompt(5), 3, SamplingParams(temperature=0.0, logprobs=2))
    driver.run()
    for result in driver.results:
        assert isinstance(result, IterationResult)
        assert decode(encode(result)) == result
