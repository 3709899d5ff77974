"""A server whose pool holds ten blocks and whose worker runs five sequences: everything waits, and nothing is lost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pagemill_testing.agreement import Agreement, GreedyRun
from pagemill_testing.http_calls import Call
from pagemill_testing.live_server import ServeCommand
from pagemill_testing.program import until
from pagemill_testing.sockets import ipc_folder

pytestmark = pytest.mark.timeout(300)

BLOCK = 16
BLOCKS = 10
SEATS = 5


@pytest.fixture(scope="module")
def started_server(cache: Path) -> Iterator[ServeCommand]:
    with ipc_folder() as folder:
        server = ServeCommand(
            folder,
            "tiny",
            cache_dir=cache,
            num_kv_blocks=BLOCKS,
            max_num_seqs=SEATS,
            enable_prefix_caching=False,
            preemption_mode="recompute",
            peer_timeout=60,
            check_invariants=True,
        )
        try:
            server.until_started()
            yield server
        finally:
            server.close()


@pytest.fixture
def tiny(started_server: ServeCommand) -> Iterator[ServeCommand]:
    started_server.until_ready()
    started_server.until_idle()
    yield started_server
    started_server.drop_all()


def prompt_of(length: int, variant: int = 0) -> list[int]:
    """Token ids of ordinary words."""
    return [260 + (37 * i + 1009 * variant) % 20000 for i in range(length)]


def run_alone(server: ServeCommand, body: dict[str, Any]) -> GreedyRun:
    call = server.ask(logprobs=2, **body)
    if any("penalty" in field for field in body):  # log-probabilities tell nothing of ties that penalties make
        return GreedyRun(call.token_ids, [math.inf] * len(call.token_ids))
    return GreedyRun.of(call)


def together(server: ServeCommand, bodies: list[dict[str, Any]]) -> list[Call]:
    with server.arriving_together(len(bodies)):
        calls = [server.stream(**body) for body in bodies]
    return server.finish(calls)


def check_alone_and_together(server: ServeCommand, bodies: list[dict[str, Any]], name: str) -> None:
    alone = [run_alone(server, body) for body in bodies]
    calls = together(server, bodies)
    agreement = Agreement(name)
    for body, run, call in zip(bodies, alone, calls, strict=True):
        assert len(call.token_ids) == body["max_tokens"]
        agreement.check(run, call.token_ids, str(body["prompt"][:3]))
    agreement.conclude()


def test_preempted_requests_lose_and_repeat_nothing_and_penalties_see_their_outputs(tiny: ServeCommand) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": prompt_of(20, variant), "max_tokens": 36, "ignore_eos": True} for variant in range(4)
    ]
    bodies[1]["repetition_penalty"] = 1.3
    bodies[2] |= {"presence_penalty": 1.0, "frequency_penalty": 0.5}
    before = tiny.counter("num_preemptions_total")
    check_alone_and_together(tiny, bodies, "four sequences of four blocks in ten")
    assert tiny.counter("num_preemptions_total") > before
    assert tiny.counter("recomputed_tokens_total") > 0
    tiny.until_idle()


def test_all_need_a_block_in_the_same_step_when_none_is_free(tiny: ServeCommand) -> None:
    bodies = [
        {"prompt": prompt_of(2 * BLOCK - 1, variant), "max_tokens": 20, "ignore_eos": True} for variant in range(5)
    ]
    before = tiny.counter("num_preemptions_total")
    check_alone_and_together(tiny, bodies, "five sequences that fill the pool")
    assert tiny.counter("num_preemptions_total") > before
    tiny.until_idle()


def test_seeded_sampling_survives_preemption(tiny: ServeCommand) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": prompt_of(20, seed), "max_tokens": 32, "ignore_eos": True, "temperature": 0.8, "seed": seed}
        for seed in range(4)
    ]
    alone = [tiny.ask(**body).token_ids for body in bodies]
    before = tiny.counter("num_preemptions_total")
    calls = together(tiny, bodies)
    assert [call.token_ids for call in calls] == alone
    assert tiny.counter("num_preemptions_total") > before
    tiny.until_idle()


def test_more_prompts_in_one_request_than_seats(tiny: ServeCommand) -> None:
    prompts = [prompt_of(10, variant) for variant in range(2 * SEATS)]
    together = tiny.ask(prompt=prompts, max_tokens=4, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        assert together.token_ids_of(number) == tiny.ask(prompt=prompt, max_tokens=4, ignore_eos=True).token_ids
    tiny.until_idle()


def test_what_can_never_fit_is_refused_at_once_and_holds_up_nobody(tiny: ServeCommand) -> None:
    with tiny.worker_held():
        running = tiny.stream(prompt=prompt_of(20), max_tokens=100, ignore_eos=True)
        tiny.until_state(lambda state: state["metrics"]["num_requests_running"] == 1, "a request runs")
        for size, answer in ((BLOCKS * BLOCK + 1, 1), (20, BLOCKS * BLOCK)):
            refused = tiny.start(prompt=prompt_of(size), max_tokens=answer)
            refused.until_done()
            assert refused.status == 400
            assert refused.error is not None
            assert refused.error["code"] == "context_length_exceeded"
            assert str(BLOCKS * BLOCK) in refused.error["message"]
            assert not running.done
    running.until_tokens(1)
    tiny.drop(running)
    tiny.until_idle()
    fits = tiny.ask(prompt=prompt_of(BLOCKS * BLOCK - 4), max_tokens=4, ignore_eos=True)
    assert len(fits.token_ids) == 4
    tiny.until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_waits(tiny: ServeCommand, stream: bool) -> None:
    crowd = 4 * SEATS  # it takes long until the last of them have a seat
    with tiny.arriving_together(crowd):
        running = [tiny.stream(prompt=prompt_of(20, n), max_tokens=140, ignore_eos=True) for n in range(crowd)]
    waiting = tiny.start(prompt=prompt_of(40), max_tokens=10, stream=stream, request_id="leaver")
    tiny.until(lambda: (tiny.request("leaver") or {}).get("waits_for"), "the state says why it waits")
    tiny.drop(waiting)
    tiny.until(lambda: tiny.request("leaver") is None, "the request is gone")
    preempted = [r["request_id"] for r in tiny.state()["requests"] if r["status"] == "waiting"]
    assert "leaver" not in preempted
    for call in running:
        tiny.drop(call)
    until(lambda: all(call.done for call in running), "the clients have gone")
    tiny.until_idle()
    tiny.assert_alive()


def test_every_length_at_the_edges_of_blocks_frees_all(tiny: ServeCommand) -> None:
    lengths = (1, 15, 16, 17, 33)
    limits = (1, 2, 15, 16, 17)
    calls = [
        tiny.start(prompt=prompt_of(length), max_tokens=limit, ignore_eos=True)
        for length in lengths
        for limit in limits
    ]
    tiny.finish(calls)
    assert [len(call.token_ids) for call in calls] == [limit for _ in lengths for limit in limits]
    tiny.until_idle()


@pytest.mark.parametrize("position", [1, 15, 16, 17])
def test_an_end_token_at_the_edge_of_a_block_frees_all(tiny: ServeCommand, position: int) -> None:
    """The end token is wished for from the start and banned until the sequence has ``position`` tokens before it."""
    for length in (8, 16):
        before_end = position if length == 16 else position + 8
        call = tiny.ask(
            prompt=prompt_of(length), max_tokens=40, min_tokens=before_end, logit_bias={"2": 100.0}, stream=True
        )
        assert call.finish_reason == "stop"
        assert call.token_ids[-1] == 2
        assert len(call.token_ids) == before_end + 1
        tiny.until_idle()
