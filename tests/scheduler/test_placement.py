"""Which of several workers a request starts on."""

from __future__ import annotations

from pagemill_testing.simulation import FakeGateway, Simulation, WorkerPeer
from pagemill_testing.single import greedy, ids, samples


def fleet(*blocks: int, **config: object) -> tuple[Simulation, FakeGateway, list[WorkerPeer]]:
    simulation = Simulation(**config)
    gateway = simulation.add_gateway()
    workers = [
        simulation.add_worker(f"w{number}", num_blocks=count, block_size=4, num_swap_blocks=0)
        for number, count in enumerate(blocks)
    ]
    return simulation, gateway, workers


def running_on(simulation: Simulation, handle: int) -> str | None:
    return {r["request_id"]: r["worker"] for r in simulation.snapshot()["requests"]}[f"g-{handle}"]  # type: ignore[attr-defined,no-any-return]


def test_requests_spread_over_idle_workers() -> None:
    simulation, gateway, _ = fleet(40, 40, 40)
    handles = [gateway.submit(ids(8, first), greedy(5)) for first in range(6)]
    simulation.tick()
    places = [running_on(simulation, handle) for handle in handles]
    assert sorted(map(str, places)) == ["w0", "w0", "w1", "w1", "w2", "w2"]


def test_a_request_goes_where_its_prompt_is_cached() -> None:
    simulation, gateway, workers = fleet(40, 40)
    first = gateway.submit(ids(20), greedy(5))
    simulation.tick()
    where = running_on(simulation, first)
    simulation.run()
    again = gateway.submit(ids(20), greedy(5))
    simulation.tick()
    assert running_on(simulation, again) == where
    simulation.run()
    assert gateway.answers[again].cached_tokens == 16
    assert {worker.worker.computed_tokens > 0 for worker in workers} == {True, False}


def test_a_loaded_worker_loses_those_whose_prompt_it_caches() -> None:
    simulation, gateway, _ = fleet(40, 40, max_num_seqs=4)
    gateway.submit(ids(5), greedy(2))
    simulation.run()
    handles = [gateway.submit(ids(4 + 1), greedy(20)) for _ in range(6)]
    simulation.tick()
    places = [running_on(simulation, handle) for handle in handles]
    assert places.count("w0") >= 2
    assert places.count("w1") >= 2


def test_a_request_goes_to_the_worker_that_can_hold_it() -> None:
    simulation, gateway, _ = fleet(6, 40)
    large = gateway.submit(ids(60), greedy(5))
    group = gateway.submit(ids(8, 2), samples(4, 12))
    simulation.tick()
    assert (running_on(simulation, large), running_on(simulation, group)) == ("w1", "w1")
    simulation.run()
    assert gateway.answers[large].done
    assert gateway.answers[group].done


def test_a_full_worker_is_passed_over() -> None:
    simulation, gateway, _ = fleet(10, 10, max_num_seqs=8)
    handles = [gateway.submit(ids(30, first), greedy(5)) for first in range(3)]
    simulation.tick()
    places = [running_on(simulation, handle) for handle in handles]
    assert {places[0], places[1]} == {"w0", "w1"}
    assert places[2] is None


def test_the_watermark_is_left_free_unless_the_worker_is_idle() -> None:
    simulation, gateway, _ = fleet(10, watermark=0.5)
    whole = gateway.submit(ids(36), greedy(4))
    simulation.tick()
    assert running_on(simulation, whole) == "w0"
    simulation.run()
    small = gateway.submit(ids(4), greedy(4))
    simulation.tick()
    held_back = gateway.submit(ids(20, 2), greedy(4))
    simulation.tick()
    assert running_on(simulation, small) == "w0"
    assert running_on(simulation, held_back) is None
    simulation.run()
