"""The one door: messages that are out of place, peers that fail, and the end."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pagemill_testing.fake_worker import worker_hello
from pagemill_testing.simulation import Simulation
from pagemill_testing.single import Single, greedy, ids, samples, single

from pagemill_scheduler.events import Peer, Received, Stop, StopRequested, Tick
from pagemill_shared.messages import (
    AbortRequest,
    GatewayHello,
    HelloRequest,
    IterationResult,
    SequenceFinished,
    StateQuery,
    StateReport,
    WorkerHello,
)


def test_messages_about_unknown_or_ended_requests_change_nothing_and_are_counted() -> None:
    core = single(num_blocks=20)
    handle = core.submit(ids(5), greedy(3))
    core.run()
    link, peer = core.gateway.outgoing, core.gateway.peer
    for _ in range(2):
        core.simulation.receive(peer, AbortRequest(link.epoch, link.next(), handle))
    core.simulation.receive(peer, AbortRequest(link.epoch, link.next(), 777))
    core.simulation.receive(peer, SequenceFinished(link.epoch, link.next(), handle, 0, 1))
    assert core.metric("ignored_messages_total") == 4
    other = core.submit(ids(5), samples(2, 10))
    core.step(2)
    core.finish(other, 7)
    core.finish(other, 1)
    core.finish(other, 1)
    assert core.metric("ignored_messages_total") == 6
    core.run()
    assert len(core.answer(other).tokens[0]) == 10
    core.simulation.assert_free()


def test_messages_of_an_old_epoch_change_nothing_and_are_counted() -> None:
    core = single(num_blocks=20)
    handle = core.submit(ids(5), greedy(30))
    core.step(2)
    old_worker, old_gateway = core.worker.worker.epoch, core.gateway.outgoing.epoch
    core.worker.hello()
    core.gateway.hello()
    before = core.metric("ignored_messages_total")
    core.simulation.receive(core.worker.peer, IterationResult(old_worker, 3, np.zeros(1, np.int32)))
    core.simulation.receive(core.gateway.peer, AbortRequest(old_gateway, 2, handle))
    assert core.metric("ignored_messages_total") == before + 2
    core.run()
    core.check(handle)


def test_an_unknown_peer_is_asked_to_say_hello() -> None:
    core = single(num_blocks=20)
    stranger = Peer("backend", b"stranger")
    [asked] = core.simulation.core.handle(Received(0.0, stranger, IterationResult(1, 1, np.zeros(0, np.int32))))
    assert isinstance(asked.message, HelloRequest)  # type: ignore[union-attr]
    # Asking back would go on for ever.
    assert core.simulation.core.handle(Received(0.0, stranger, HelloRequest())) == []


def test_a_hello_on_the_wrong_side_is_no_hello() -> None:
    core = single(num_blocks=20)
    for peer, hello in (
        (Peer("frontend", b"x"), worker_hello("x")),
        (Peer("backend", b"y"), GatewayHello("y", "model")),
    ):
        actions = core.simulation.core.handle(Received(0.0, peer, hello))
        assert [type(action.message) for action in actions] == [HelloRequest]  # type: ignore[union-attr]
    assert set(core.simulation.state.workers) == {"w"}


def lost(core: Single) -> list[str]:
    return [str(log.fields["reason"]) for log in core.simulation.logs if log.event == "worker lost"]


@pytest.mark.parametrize("tokens", [[1, 2, 3], [], [1000]], ids=["too many", "too few", "outside the vocabulary"])
def test_a_result_that_does_not_answer_its_plan_is_a_lost_worker(tokens: list[int]) -> None:
    core = single(num_blocks=20)
    handle = core.submit(ids(5), greedy(3))
    core.simulation.tick()
    core.worker.plans.clear()
    epoch = core.worker.worker.epoch
    core.simulation.receive(core.worker.peer, IterationResult(epoch, 1, np.array(tokens, np.int32)))
    assert len(lost(core)) == 1
    core.simulation.beat()  # it is asked to say hello, and is used again
    core.run()
    core.check(handle)


def test_a_worker_that_makes_no_progress_is_lost_although_it_is_heard() -> None:
    core = single(num_blocks=20, plan_deadline=10.0)
    handle = core.submit(ids(5), greedy(3))
    core.simulation.tick()
    for _ in range(19):
        core.simulation.beat()
    assert lost(core) == []
    other = core.simulation.add_worker("v", num_blocks=20)
    for _ in range(3):
        core.simulation.beat()
    assert lost(core) == ["no result of iteration 1 within 10.1 s"]
    while not core.answer(handle).done:
        core.simulation.tick()
        other.step()
    core.check(handle)


def test_a_deadline_grows_with_the_tokens_of_the_plan() -> None:
    core = single(num_blocks=200, plan_deadline=1.0, prefill_tokens_per_s=100.0)
    core.submit(ids(500), greedy(3))
    core.simulation.tick()
    for _ in range(100):  # ten times the 5 s that it should take
        core.simulation.beat()
    assert lost(core) == []
    for _ in range(4):
        core.simulation.beat()
    assert lost(core) == ["no result of iteration 1 within 51.0 s"]


def test_progress_puts_the_deadline_off() -> None:
    core = single(num_blocks=20, plan_deadline=2.0, pipeline_depth=2)
    handle = core.submit(ids(5), greedy(40))
    for _ in range(30):
        core.simulation.beat(1.0)
        core.worker.step()
    assert lost(core) == []
    core.run()
    core.check(handle)


def test_a_silent_worker_is_lost() -> None:
    core = single(num_blocks=20, peer_timeout=3.0)
    for _ in range(7):
        core.simulation.beat(silent=[core.worker.peer])
    assert lost(core) == ["silent for 3.5 s"]


def test_two_deaths_fail_a_request_and_spare_those_that_waited() -> None:
    core = single(num_blocks=40, max_num_seqs=1)
    running, waiting = core.submit(ids(5), greedy(50)), core.submit(ids(5, 2), greedy(5))
    worker = core.worker
    for name in ("v", "u"):
        core.simulation.tick()
        worker.step()
        core.simulation.kill(worker)
        core.simulation.beat()
        worker = core.simulation.add_worker(name, num_blocks=40)
        core.simulation.tick()
    failure = core.answer(running).failure
    assert failure is not None
    assert (failure.code, failure.message) == (
        "worker_lost",
        "2 workers died while they ran this request; it is not tried again",
    )
    core.run()
    core.check(waiting)


def test_a_resynchronisation_and_a_departure_are_no_deaths() -> None:
    core = single(num_blocks=40)
    handle = core.submit(ids(5), greedy(50))
    for _ in range(5):
        core.step()
        core.worker.hello()
    core.step(2)
    core.simulation.add_worker("v", num_blocks=40)
    core.worker.leave()
    core.run()
    core.check(handle)
    assert core.ended(handle)["outcome"] == "finished"


def lose_worker(core: Single) -> None:
    core.simulation.kill(core.worker)
    while core.simulation.snapshot()["ready_workers"]:
        core.simulation.beat()


def test_without_a_worker_requests_wait_and_then_fail() -> None:
    core = single(num_blocks=40, no_worker_timeout=5.0)
    lose_worker(core)
    early = core.submit(ids(5), greedy(5))
    for _ in range(8):
        core.simulation.beat()
    assert core.answer(early).failure is None
    late = core.submit(ids(5), greedy(5))
    for _ in range(4):
        core.simulation.beat()
    failure = core.answer(early).failure
    assert failure is not None
    assert failure.code == "no_worker"
    assert core.answer(late).failure is None
    core.simulation.add_worker("v", num_blocks=40)
    core.run()
    core.check(late)


def test_what_was_open_when_the_last_worker_went_waits_longer_for_the_next() -> None:
    core = single(num_blocks=40, no_worker_timeout=2.0, worker_return_timeout=9.0)
    begun, queued = core.submit(ids(5), greedy(30)), core.submit(ids(630), greedy(5))
    core.step(3)
    assert core.info(queued)["status"] == "waiting"
    lose_worker(core)
    failed = []
    late = core.submit(ids(5), greedy(5))
    while core.answer(queued).failure is None:
        core.simulation.beat()
        failed.append([h for h in (begun, late, queued) if core.answer(h).failure is not None])
    assert failed[-1] == [begun, late, queued]
    assert failed[-2] == [late]
    failure = core.answer(begun).failure
    assert failure is not None
    assert (failure.code, failure.message) == ("no_worker", "no worker has been ready for 9.0 s")


def test_what_was_open_when_the_last_worker_went_goes_on_with_the_next() -> None:
    core = single(num_blocks=40)
    begun = core.submit(ids(5), greedy(30))
    core.step(3)
    lose_worker(core)
    lost_at = core.simulation.now
    while core.simulation.now < lost_at + 30:
        core.simulation.beat()
    core.simulation.add_worker("v", num_blocks=40)
    core.run()
    core.check(begun)


def test_gateways_hear_whether_the_pool_bounds_the_length() -> None:
    core = single(num_blocks=40, max_model_len=256)
    fleet = core.gateway.fleet
    assert (fleet.max_model_len, fleet.pool_tokens) == (256, 640)
    core.simulation.add_worker("v", block_size=16, num_blocks=20, max_model_len=4096)
    fleet = core.gateway.fleet
    assert (fleet.max_model_len, fleet.pool_tokens) == (320, 320)


def test_what_came_while_no_worker_was_there_is_checked_when_one_is() -> None:
    simulation = Simulation()
    gateway = simulation.add_gateway()
    wrong, large, right = (gateway.submit(p, greedy(5)) for p in ([5000], ids(500), ids(5)))
    simulation.add_worker(num_blocks=20, block_size=16)
    simulation.run()
    codes = {handle: answer.failure and answer.failure.code for handle, answer in gateway.answers.items()}
    assert codes == {wrong: "invalid_request", large: "context_length_exceeded", right: None}
    assert "token id 5000 is outside the vocabulary of 1000" in gateway.answers[wrong].failure.message  # type: ignore[union-attr]


def refused(core: Single, hello: WorkerHello) -> list[str]:
    peer = core.simulation.add_worker(**{f: getattr(hello, f) for f in ("identity", "fingerprint")})
    return [peer.dismissed] if peer.dismissed else []


def test_a_worker_with_another_model_is_refused() -> None:
    core = single(num_blocks=20)
    [reason] = refused(core, worker_hello("v", fingerprint="other"))
    assert reason == "model fingerprint other differs from the other workers' model"
    assert core.simulation.snapshot()["ready_workers"] == 1


@pytest.mark.parametrize(("num_blocks", "tokens"), [(255, [4080]), (256, [])])
def test_a_worker_with_fewer_blocks_than_one_request_may_need_is_warned_of(num_blocks: int, tokens: list[int]) -> None:
    core = single(num_blocks=num_blocks, max_model_len=4096)
    warnings = [log.fields for log in core.simulation.logs if log.level == "warning"]
    assert [fields["pool_tokens"] for fields in warnings] == tokens
    assert all(fields["max_model_len"] == 4096 for fields in warnings)


def test_the_first_worker_is_compared_with_the_gateways() -> None:
    core = single(num_blocks=20)
    core.simulation.kill(core.worker)
    core.simulation.beat()
    [reason] = refused(core, worker_hello("v", fingerprint="other"))
    assert reason == "model fingerprint other differs from gateway g's model"


def test_a_worker_that_comes_back_with_another_model_is_gone() -> None:
    core = single(num_blocks=20)
    waiting = core.submit(ids(5), greedy(5))
    core.simulation.tick()
    assert refused(core, worker_hello("w", fingerprint="other"))
    assert core.gateway.fleet.ready_workers == 0
    for _ in range(12):
        core.simulation.beat()
    failure = core.answer(waiting).failure
    assert failure is not None
    assert failure.code == "no_worker"


def test_stopping_refuses_what_comes_and_finishes_what_runs() -> None:
    core = single(num_blocks=20)
    running = core.submit(ids(5), greedy(10))
    core.step(2)
    core.simulation.handle(StopRequested(core.simulation.now))
    failure = core.answer(core.submit(ids(5), greedy(5))).failure
    assert failure is not None
    assert failure.code == "server_stopping"
    assert not core.simulation.stopped
    core.run()
    core.check(running)
    assert core.simulation.stopped
    assert Stop() in core.simulation.core.handle(Tick(core.simulation.now))


def test_the_state_can_be_asked_for_at_any_time() -> None:
    core = single(num_blocks=12, max_num_seqs=2)
    handles = [core.submit(ids(20, first), samples(2, 10)) for first in range(3)]
    for _ in range(6):
        [sent] = core.simulation.core.handle(Received(core.simulation.now, core.gateway.peer, StateQuery(5)))
        assert isinstance(sent.message, StateReport)  # type: ignore[union-attr]
        state = json.loads(sent.message.state)  # type: ignore[union-attr]
        assert {r["request_id"] for r in state["requests"]} <= {f"g-{handle}" for handle in handles}
        core.step()


def test_each_waiting_request_tells_why() -> None:
    core = single(num_blocks=12, max_num_seqs=2)
    core.submit(ids(100), greedy(60))
    core.step(2)
    blocked, behind = core.submit(ids(90, 2), greedy(5)), core.submit(ids(5, 3), greedy(5))
    core.step()
    assert core.info(blocked)["waits_for"] == "blocks: it needs 6 and 0 stay in reserve, 5 are free"
    assert (core.info(blocked)["requests_ahead"], core.info(behind)["requests_ahead"]) == (0, 1)
