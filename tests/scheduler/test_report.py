"""What the state tells of requests that wait."""

from __future__ import annotations

from pagemill_testing.single import greedy, ids, single


def test_what_came_during_an_iteration_waits_for_its_end() -> None:
    core = single(num_blocks=40, pipeline_depth=1, plan_deadline=100.0)
    running = core.submit(ids(5), greedy(5))
    core.simulation.tick()
    late = core.submit(ids(5, 2), greedy(5))
    behind = core.submit(ids(5, 3), greedy(5))
    for _ in range(66):
        core.simulation.beat()
    for handle in (late, behind):
        assert core.info(handle)["waits_for"] == "the iteration under way on worker w, for 33.0 s so far"
    assert core.info(running)["waits_for"] is None
    core.run()
    core.check(running, late, behind)


def test_what_stands_behind_one_that_does_not_fit_waits_for_its_turn() -> None:
    core = single(num_blocks=40)
    core.submit(ids(5), greedy(30))
    first, behind = core.submit(ids(630), greedy(5)), core.submit(ids(5, 3), greedy(5))
    core.step(2)
    assert str(core.info(first)["waits_for"]).startswith("blocks: ")
    assert core.info(behind)["waits_for"] == "its turn: 1 before it in the queue"


def test_what_finds_no_tokens_left_waits_for_the_next_iteration() -> None:
    core = single(num_blocks=200, max_num_batched_tokens=64)
    core.submit(ids(1000), greedy(5))
    late = core.submit(ids(300, 2), greedy(5))
    core.step(3)
    assert core.info(late)["waits_for"] == "the next iteration: others take all tokens of this one"


def test_without_a_worker_the_state_says_so() -> None:
    core = single(num_blocks=40)
    core.simulation.kill(core.worker)
    while core.simulation.snapshot()["ready_workers"]:
        core.simulation.beat()
    late = core.submit(ids(5), greedy(5))
    assert core.info(late)["waits_for"] == "no worker is ready"
