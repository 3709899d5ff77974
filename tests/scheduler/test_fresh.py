"""New requests that start with one plan: together where they can, and as if they had come one by one."""

from __future__ import annotations

import pytest
from pagemill_testing.plain import needs_plain_core
from pagemill_testing.single import Single, greedy, ids, samples, single

from pagemill_scheduler import prefix_names
from pagemill_scheduler.prefix_names import PrefixNames

SIZE = 4


def make(**fields: object) -> Single:
    return single(
        **({"block_size": SIZE, "num_blocks": 60, "max_num_seqs": 16, "max_num_batched_tokens": 200} | fields)
    )


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs of blocks were named together, each time."""
    sizes: list[int] = []
    name_runs = PrefixNames.name_runs

    def spy(names: PrefixNames, runs: list[prefix_names.Run]) -> list[int]:
        sizes.append(len(runs))
        return name_runs(names, runs)

    monkeypatch.setattr(PrefixNames, "name_runs", spy)
    return sizes


def computed(core: Single) -> list[list[tuple[int, int]]]:
    """(start, count) of the chunks of each plan."""
    return [[(start, count) for _, start, count, _ in plan.prefill_chunks.tolist()] for plan in core.plans]


@needs_plain_core
def test_different_prompts_start_together(runs: list[int]) -> None:
    core = make()
    for first, length in enumerate((9, 6, 3, 11)):
        core.submit(ids(length, first + 1), greedy(3))
    core.run()
    assert computed(core)[0] == [(0, 9), (0, 6), (0, 3), (0, 11)]
    assert runs == [3]  # the third has no full block
    core.simulation.assert_free()


@needs_plain_core
def test_one_that_begins_like_another_starts_after_it(runs: list[int]) -> None:
    core = make()
    for prompt in (ids(9), ids(6, 2), ids(11), ids(9)):
        core.submit(prompt, greedy(3))
    core.run()
    assert computed(core)[0] == [(0, 9), (0, 6), (8, 3), (8, 1)]
    assert runs == [2]  # of the other two, nothing new is full
    core.simulation.assert_free()


def test_a_prompt_whose_last_block_is_full_shares_it_too() -> None:
    core = make()
    for prompt in (ids(8), ids(9, 3), ids(8), ids(12), ids(12)):
        core.submit(prompt, greedy(3))
    core.run()
    assert computed(core)[0] == [(0, 8), (0, 9), (4, 4), (8, 4), (8, 4)]
    core.simulation.assert_free()


@needs_plain_core
def test_without_a_prefix_cache_equal_prompts_start_together(runs: list[int]) -> None:
    core = make(prefix_caching=False)
    for _ in range(3):
        core.submit(ids(9), greedy(3))
    core.run()
    assert computed(core)[0] == [(0, 9)] * 3
    assert runs == []


def test_what_does_not_fit_waits_and_holds_up_the_rest() -> None:
    core = make(num_blocks=10, watermark=0.0)
    for first, length in enumerate((9, 17, 17, 3)):
        core.submit(ids(length, first + 1), greedy(2))
    core.run()
    assert computed(core)[0] == [(0, 9), (0, 17)]
    core.simulation.assert_free()


def test_the_last_one_computes_what_is_left_of_the_budget() -> None:
    core = make(max_num_batched_tokens=20)
    for first in range(3):
        core.submit(ids(9, first + 1), greedy(2))
    core.run()
    assert computed(core)[0] == [(0, 9), (0, 9), (0, 2)]
    assert computed(core)[1][0] == (2, 7)
    core.simulation.assert_free()


@needs_plain_core
def test_groups_start_with_the_others_and_fork_in_the_same_plan(runs: list[int]) -> None:
    core = make()
    group = core.submit(ids(9, 5), samples(3, 4))
    core.submit(ids(6, 2), greedy(3))
    core.run()
    assert runs == [2]
    assert len(core.plans[0].forks) == 2
    assert len(core.answer(group).tokens) == 3
    core.simulation.assert_free()
