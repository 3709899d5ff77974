"""A request gives the same alone and in a crowd, and other requests cannot hold it up."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from pagemill_testing.http_calls import Call
from pagemill_testing.live_server import CHAT, ServeCommand

pytestmark = pytest.mark.timeout(300)

FRANCE = "The capital of France is"
SAMPLED: list[dict[str, Any]] = [
    {"prompt": FRANCE, "seed": 42, "temperature": 0.8},
    {"prompt": FRANCE, "seed": 43, "temperature": 0.8},
    {"prompt": "Once upon a time", "seed": 1, "temperature": 0.9, "top_k": 5},
    {"prompt": "My favourite colour is", "seed": 7, "temperature": 1.0, "top_p": 0.5},
    {"prompt": "The answer to everything:", "seed": 2**63 - 1, "temperature": 1.5, "min_p": 0.1},
    {"prompt": "Paris Paris Paris", "seed": 3, "temperature": 0.7, "repetition_penalty": 1.3},
    {"prompt": "la la la la", "seed": 4, "temperature": 0.7, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"prompt": FRANCE, "temperature": 0},
]
UNSEEDED: dict[str, Any] = {"prompt": FRANCE, "temperature": 0.9}


def test_seeded_requests_give_the_same_alone_and_in_a_crowd(server: ServeCommand) -> None:
    alone = [server.ask(max_tokens=16, **body).token_ids for body in SAMPLED]
    assert alone[0] != alone[1]  # another seed, another text
    crowd = [*SAMPLED, UNSEEDED, *SAMPLED[::-1], UNSEEDED]
    for stream in (False, True):
        calls = server.finish([server.start(max_tokens=16, stream=stream, **body) for body in crowd])
        for body, call in zip(crowd, calls, strict=True):
            if body is not UNSEEDED:
                assert call.token_ids == alone[SAMPLED.index(body)], body
    server.until_idle()


def test_a_stream_joined_is_the_answer_in_one_piece(server: ServeCommand) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": "🙂🙂🙂🙂🙂🙂🙂🙂"},
        {"prompt": "日本語日本語日本語"},
        {"prompt": "👩‍🚀👩‍🚀👩‍🚀"},
        {"prompt": "The quick brown fox"},
        {"path": CHAT, "messages": [{"role": "user", "content": "Write a poem about Zürich."}]},
    ]
    whole = server.finish([server.start(max_tokens=30, **body) for body in bodies])
    streamed = server.finish([server.start(max_tokens=30, stream=True, **body) for body in bodies])
    for one, other in zip(whole, streamed, strict=True):
        assert one.text == other.text
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason
    server.until_idle()


def test_a_stop_string_ends_a_stream_and_frees_its_blocks(server: ServeCommand) -> None:
    text = server.ask(prompt="The quick brown fox", max_tokens=30).text
    stop = text[11:19]
    for include in (False, True):
        end = text.index(stop) + (len(stop) if include else 0)
        call = server.finish(
            [server.stream(prompt="The quick brown fox", max_tokens=30, stop=stop, include_stop_str_in_output=include)]
        )[0]
        assert (call.text, call.finish_reason) == (text[:end], "stop")
        server.until_idle()


def test_one_client_given_id_for_two_requests(server: ServeCommand) -> None:
    body = {"prompt": FRANCE, "max_tokens": 60, "ignore_eos": True, "request_id": "twin"}
    headers = {"X-Request-Id": "twin"}
    alone = server.ask(**body)
    with server.arriving_together(2):
        first = server.start(headers=headers, stream=True, **{**body, "max_tokens": 4000})
        second = server.start(headers=headers, stream=True, **body)
        server.until_state(lambda s: [r["request_id"] for r in s["requests"]] == ["twin", "twin"], "both are there")
    first.until_tokens(2)
    second.until_tokens(2)
    server.drop(first)
    assert second.succeeded().token_ids == alone.token_ids
    assert second.headers["x-request-id"] == "twin"
    server.until_idle()


# ---------------------------------------------------------------- nobody is held up


def test_a_long_prompt_stalls_neither_a_running_stream_nor_a_short_prompt(server: ServeCommand) -> None:
    """By the scheduler's own count the stream gets a token in every iteration that computes the long prompt, and the
    short prompt that comes behind it is answered before it is computed."""

    def in_prefill(state: dict[str, Any]) -> bool:
        return any(
            (request["request_id"], request["status"], request["output_tokens"]) == ("long", "running", 0)
            for request in state["requests"]
        )

    def progress(state: dict[str, Any]) -> tuple[int, int]:
        stream = next(r for r in state["requests"] if r["request_id"] == "running")
        return state["workers"][0]["iteration"], stream["output_tokens"]

    def observed(variant: int) -> bool:
        """One long prompt; False where it was over before anybody looked a second time."""
        running = server.stream(prompt=FRANCE, max_tokens=4000, ignore_eos=True, request_id="running")
        running.until_tokens(3)
        with server.worker_held():
            long = server.stream(
                prompt=[300 + variant + i % 1000 for i in range(1300)], max_tokens=2, request_id="long"
            )
            server.until(lambda: server.request("long"), "the long prompt is there")
            short = server.stream(prompt=FRANCE, max_tokens=2, request_id="short")
            seen = [server.until_state(lambda state: state["requests_total"] == 3, "the short one is there, too")]
        while not long.done:
            state = server.state()
            if in_prefill(state):
                seen.append(state)
        server.finish([short, long])
        (iterations, tokens), (first_iteration, first_tokens) = progress(seen[-1]), progress(seen[0])
        # Results come up to two plans after their dispatch.
        assert abs((iterations - first_iteration) - (tokens - first_tokens)) <= 2
        server.drop(running)
        server.until_idle()
        names = {request["request_id"] for request in seen[-1]["requests"]}
        return iterations > first_iteration and "short" not in names

    variants = itertools.count()
    server.until(lambda: observed(next(variants)), "the short prompt is answered before the long one is computed")


def test_a_huge_prompt_does_not_stall_streams_or_health(server: ServeCommand) -> None:
    """Tokenized off the event loop: what else is asked is answered before it is refused."""
    running = server.stream(prompt=FRANCE, max_tokens=4000, ignore_eos=True)
    running.until_tokens(3)

    def others_go_on() -> bool:
        """While one huge prompt is looked at; False where this process did not get to look meanwhile."""
        huge = server.start(prompt="lorem ipsum dolor sit amet " * 100_000, max_tokens=1)
        checks, before = 0, len(running.token_ids)
        while not huge.done:
            assert server.get("/health").status_code == 200
            checks += not huge.done
        during = len(running.token_ids) - before
        assert huge.status == 400
        assert huge.error is not None
        assert huge.error["code"] == "context_length_exceeded"
        assert huge.error["param"] == "prompt"
        return checks > 3 and during > 3

    server.until(others_go_on, "health checks and a stream go on while a huge prompt is tokenized")
    server.drop(running)
    server.until_idle()


def test_many_prompts_in_one_request_run_together(server: ServeCommand) -> None:
    prompts = [FRANCE, "Once upon a time", "def main():", "1, 2, 3,"]
    singles = [server.ask(prompt=prompt, max_tokens=8) for prompt in prompts]
    together = server.ask(prompt=prompts, max_tokens=8)
    streamed = server.finish([server.stream(prompt=prompts, max_tokens=8)])[0]
    for number, single in enumerate(singles):
        assert together.token_ids_of(number) == single.token_ids
        assert streamed.token_ids_of(number) == single.token_ids
        assert streamed.text_of(number) == single.text
    server.until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_shared_prefixes_give_the_same_with_and_without_the_cache(server: ServeCommand, stream: bool) -> None:
    """Prompts at the edges of blocks, each sent twice: the second time from the cache, save at least one token."""
    text = [300 + 7 * i % 5000 for i in range(48)]
    for length in (1, 15, 16, 17, 32, 48):
        prompt = [1000 + length, *text[1:length]]
        first, second = (
            server.ask(prompt=prompt, max_tokens=4, stream=stream, stream_options={"include_usage": True})
            if stream
            else server.ask(prompt=prompt, max_tokens=4)
            for _ in range(2)
        )
        assert first.token_ids == second.token_ids
        assert cached(second) <= length - 1
        assert cached(second) == (length - 1) // 16 * 16
    server.until_idle()


def cached(call: Call) -> int:
    usage: Any = call.usage
    return int(usage["prompt_tokens_details"]["cached_tokens"])
