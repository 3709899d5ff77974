"""Real processes are killed, frozen, told to leave and started again while a real model answers.

Every part is a process of its own here; `pagemill serve`, which starts dead parts again, is in test_serve. The workers
stand still in the midst of their streams until a fault has been looked at: however slow anybody is, none ends before.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagemill_testing.agreement import Agreement, GreedyRun
from pagemill_testing.http_calls import Call
from pagemill_testing.live_server import SeparateProcesses
from pagemill_testing.program import Program
from pagemill_testing.sockets import ipc_folder
from pagemill_testing.stepping import SteppedWorker

pytestmark = pytest.mark.timeout(300)

TOKENS = 64
PEER_TIMEOUT = 10
"""A process that does not get to run for a while on a busy machine is not lost; one that is frozen is waited for."""
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a land far away,",
    "1, 2, 3, 5, 8, 13,",
]


class Fleet(SeparateProcesses):
    """A server that is put in order again before each test: whatever the last one broke is started anew."""

    workers: list[SteppedWorker]

    def begin(self) -> None:
        self.add_scheduler()
        self.add_gateway()
        self.workers = []

    def restore(self, workers: int) -> None:
        assert self.scheduler.alive, self.scheduler.tail()
        assert self.gateway.alive, self.gateway.tail()
        self.workers = [worker for worker in self.workers if worker.alive]
        self.go_on()
        while len(self.workers) < workers:
            self.add_worker()
        for worker in self.workers[workers:]:
            worker.send(signal.SIGTERM)
            assert worker.ended() == 0
        del self.workers[workers:]
        self.until_ready(workers)
        self.until_idle()

    def add_scheduler(self) -> None:
        self.scheduler = self.start_scheduler(no_worker_timeout=180, peer_timeout=PEER_TIMEOUT)

    def add_gateway(self) -> None:
        self.gateway = self.start_gateway(no_worker_timeout=180, peer_timeout=PEER_TIMEOUT)

    def add_worker(self) -> SteppedWorker:
        self.workers.append(self.start_worker(num_kv_blocks=256, peer_timeout=PEER_TIMEOUT))
        return self.workers[-1]

    def streams(self, count: int = len(PROMPTS)) -> list[Call]:
        """Open streams that have all begun, and get no further before ``go_on``."""
        self.hold()
        calls = [self.stream(prompt=PROMPTS[number], max_tokens=TOKENS, ignore_eos=True) for number in range(count)]
        self.stepped_until(
            self.workers, lambda state: [r["output_tokens"] >= 3 for r in state["requests"]] == [True] * count
        )
        for call in calls:
            call.until_tokens(3)
        return calls

    def hold(self) -> None:
        for worker in self.workers:
            worker.hold()

    def go_on(self) -> None:
        for worker in self.workers:
            worker.go_on()

    def share(self, worker: Program) -> int:
        """Sequences that run on a worker; 0 when the scheduler does not count on it."""
        state = self.worker_state(worker)
        return 0 if state is None else int(state["running_sequences"])


@pytest.fixture(scope="module")
def started_fleet(cache: Path) -> Iterator[Fleet]:
    with ipc_folder() as folder:
        fleet = Fleet(folder, cache)
        try:
            fleet.begin()
            yield fleet
        finally:
            fleet.close()


@pytest.fixture
def fleet(started_fleet: Fleet) -> Fleet:
    """With one worker."""
    started_fleet.restore(1)
    return started_fleet


@pytest.fixture
def pair(started_fleet: Fleet) -> Fleet:
    """With two workers."""
    started_fleet.restore(2)
    return started_fleet


@pytest.fixture(scope="module")
def expected(started_fleet: Fleet) -> list[GreedyRun]:
    """What each prompt gives alone and undisturbed."""
    started_fleet.restore(1)
    calls = [started_fleet.ask(prompt=prompt, max_tokens=TOKENS, ignore_eos=True, logprobs=2) for prompt in PROMPTS]
    return [GreedyRun.of(call) for call in calls]


def assert_right(fleet: Fleet, calls: list[Call], expected: list[GreedyRun], name: str) -> None:
    """All streams end well, as if nothing had happened, and leave no block behind."""
    fleet.go_on()
    fleet.finish(calls)
    agreement = Agreement(name)
    for number, call in enumerate(calls):
        agreement.check(expected[number], call.token_ids, PROMPTS[number])
        assert call.finish_reason == "length"
        assert len(call.token_ids) == TOKENS
    agreement.conclude()
    fleet.until_idle()


# ---------------------------------------------------------------- workers that die


def test_a_killed_workers_requests_move_and_finish_with_the_right_text(pair: Fleet, expected: list[GreedyRun]) -> None:
    lost = pair.counter("workers_lost_total")
    calls = pair.streams()
    victim, other = pair.workers
    assert pair.share(victim) > 0
    assert pair.share(other) > 0
    victim.kill()
    pair.until_state(lambda state: state["ready_workers"] == 1, "the worker is lost")
    assert not any(call.done for call in calls)
    assert_right(pair, calls, expected, "a worker was killed")
    assert pair.counter("workers_lost_total") == lost + 1


def test_a_request_that_saw_two_workers_die_is_not_tried_again(pair: Fleet) -> None:
    (call,) = pair.streams(1)
    for death in (1, 2):
        victim = pair.until(lambda: next((w for w in pair.workers if w.alive and pair.share(w)), None), "it runs")
        victim.kill()
        pair.until_state(lambda state, left=2 - death: state["ready_workers"] == left, "the worker is lost")
    call.until_done()
    assert not call.complete
    assert call.error is not None
    assert call.error["code"] == "worker_lost"
    assert "2 workers died" in call.error["message"]
    pair.restore(1)


def test_requests_wait_for_a_new_worker_when_the_only_one_is_killed(fleet: Fleet, expected: list[GreedyRun]) -> None:
    calls = fleet.streams(3)
    fleet.workers[0].kill()
    fleet.until(lambda: fleet.status("/ready") == 503, "/ready tells of it")
    assert fleet.get("/ready").json()["error"]["code"] == "no_worker"
    assert fleet.status("/health") == 503
    late = fleet.stream(prompt=PROMPTS[3], max_tokens=TOKENS, ignore_eos=True)
    state = fleet.state()
    assert {request["status"] for request in state["requests"]} == {"waiting"}
    assert all("lost" in request["waits_for"] or "no worker" in request["waits_for"] for request in state["requests"])
    fleet.add_worker()
    fleet.until_ready()
    assert_right(fleet, [*calls, late], expected, "the only worker was killed")


def test_without_a_new_worker_requests_end_with_a_clear_error(cache: Path) -> None:
    with ipc_folder() as folder:
        lonely = SeparateProcesses(folder, cache)
        try:
            lonely.start_scheduler(no_worker_timeout=0.5, worker_return_timeout=0.5, peer_timeout=PEER_TIMEOUT)
            lonely.start_gateway(no_worker_timeout=0.5, peer_timeout=PEER_TIMEOUT)
            worker = lonely.start_worker(num_kv_blocks=64, peer_timeout=PEER_TIMEOUT)
            lonely.until_ready()
            worker.hold()
            stream = lonely.stream(prompt=PROMPTS[0], max_tokens=500, ignore_eos=True)
            whole = lonely.start(prompt=PROMPTS[1], max_tokens=500, ignore_eos=True)
            lonely.stepped_until([worker], lambda s: [bool(r["output_tokens"]) for r in s["requests"]] == [True] * 2)
            stream.until_tokens(1)
            worker.kill()
            for call in (stream, whole):
                call.until_done()
                assert not call.complete
                assert call.error is not None
                assert call.error["code"] == "no_worker"
                assert "no worker has been ready for" in call.error["message"]
            assert (stream.status, whole.status) == (200, 503)
            late = lonely.start(prompt=PROMPTS[0])
            late.until_done()
            assert late.status == 503
            assert int(late.headers["retry-after"]) > 0
            lonely.until_idle()
            lonely.start_worker(num_kv_blocks=64, peer_timeout=PEER_TIMEOUT)
            lonely.until_ready()
            lonely.assert_alive()
        finally:
            lonely.close()


# ---------------------------------------------------------------- workers that freeze, leave and join


def test_a_frozen_worker_is_lost_and_joins_again_when_it_thaws(pair: Fleet, expected: list[GreedyRun]) -> None:
    calls = pair.streams()
    frozen = pair.workers[0]
    before = pair.worker_state(frozen)
    assert before is not None
    assert before["running_sequences"] > 0
    pair.freeze(frozen)
    pair.until_state(lambda state: state["ready_workers"] == 1, "the frozen worker is lost")
    assert pair.worker_state(frozen) is None
    pair.go_on()
    pair.thaw(frozen)  # while its old requests run elsewhere: what it still sends of them must not be applied
    assert_right(pair, calls, expected, "a worker was frozen")
    pair.until_ready(2)
    after = pair.worker_state(frozen)
    assert after is not None
    assert after["epoch"] > before["epoch"]
    again = pair.streams()
    assert pair.share(frozen) > 0
    assert_right(pair, again, expected, "after the thaw")


def test_a_worker_that_is_told_to_stop_hands_over_at_once(pair: Fleet, expected: list[GreedyRun]) -> None:
    lost = pair.counter("workers_lost_total")
    calls = pair.streams()
    leaver = pair.workers[0]
    assert pair.share(leaver) > 0
    leaver.send(signal.SIGTERM)
    pair.until(lambda: pair.worker_state(leaver) is None, "the worker has been let go")
    assert not any(call.done for call in calls)
    assert_right(pair, calls, expected, "a worker left")
    assert leaver.ended() == 0
    assert pair.counter("workers_lost_total") == lost


def test_the_last_worker_finishes_what_it_runs_before_it_leaves(fleet: Fleet, expected: list[GreedyRun]) -> None:
    calls = fleet.streams(2)
    (leaver,) = fleet.workers
    leaver.send(signal.SIGTERM)
    fleet.until(lambda: fleet.status("/ready") == 503, "/ready tells that none takes new requests")
    assert_right(fleet, calls, expected, "the last worker left")
    assert leaver.ended() == 0


def test_a_worker_that_joins_takes_part_of_the_load(fleet: Fleet, expected: list[GreedyRun]) -> None:
    (first,) = fleet.workers
    calls = fleet.streams()
    joined = fleet.add_worker()
    fleet.until_ready(2)
    fleet.go_on()
    # Running requests stay where their blocks are; of those that come after it has joined it gets its part.
    background: list[Call] = []

    def both_run() -> bool:
        background.append(fleet.stream(prompt="Tell me a story.", max_tokens=1000, ignore_eos=True))
        background[-1].until_tokens(1)
        return fleet.share(first) > 0 and fleet.share(joined) > 0

    fleet.until(both_run, "both workers run requests")
    fleet.hold()
    leaver = fleet.workers.pop(0)
    leaver.send(signal.SIGTERM)
    leaver.go_on()
    assert leaver.ended() == 0
    counts = [len(call.token_ids) for call in background]
    fleet.go_on()
    for call, count in zip(background, counts, strict=True):
        call.until_tokens(count + 3)
        fleet.drop(call)
    assert_right(fleet, calls, expected, "scaled to two and back")


# ---------------------------------------------------------------- the scheduler and the gateway


def test_a_killed_scheduler_ends_streams_and_its_successor_serves_again(pair: Fleet, expected: list[GreedyRun]) -> None:
    calls = pair.streams()
    pair.scheduler.kill()
    pair.until(lambda: all(call.done for call in calls), "open streams end")
    for call in calls:
        assert call.error is not None, call.describe()
        assert call.error["code"] == "scheduler_lost"
        assert not call.complete
    assert pair.status("/ready") == 503
    assert pair.status("/health") == 503
    late = pair.start(prompt=PROMPTS[0])
    late.until_done()
    assert late.status == 503
    pair.add_scheduler()
    pair.go_on()
    pair.until_ready(2)
    pair.until_idle()
    again = pair.streams()
    assert all(pair.share(worker) for worker in pair.workers)
    assert_right(pair, again, expected, "after the scheduler's restart")
    assert all(worker.alive for worker in pair.workers)
    assert pair.gateway.alive


def test_a_frozen_scheduler_ends_streams_and_goes_on_when_it_thaws(pair: Fleet, expected: list[GreedyRun]) -> None:
    calls = pair.streams()
    pair.freeze(pair.scheduler)
    pair.until(lambda: all(call.done for call in calls), "open streams end")
    assert {call.error["code"] for call in calls if call.error} == {"scheduler_lost"}
    assert pair.status("/ready") == 503
    pair.go_on()
    pair.thaw(pair.scheduler)
    pair.until_ready(2)
    pair.until_idle()  # the gateway has given its streams up, so they were aborted
    assert_right(pair, pair.streams(), expected, "after the scheduler's thaw")


def test_a_killed_gateways_requests_are_aborted(fleet: Fleet) -> None:
    calls = fleet.streams(2)
    fleet.gateway.kill()
    fleet.until(lambda: all(call.done for call in calls), "the connections break")
    assert all(call.failure is not None for call in calls)
    fleet.add_gateway()
    fleet.go_on()
    fleet.until_ready()
    # The scheduler waits for the lost gateway as long as for any peer; then its requests are aborted.
    fleet.until_state(lambda state: len(state["gateways"]) == 1, "the killed gateway is forgotten")
    fleet.until_idle()
    fleet.assert_alive()
