"""The client and the report of the benchmark of servers: what is sent, and what the figures mean."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from serving.client import Answer, RequestError, figures, run
from serving.report import Row, joined, plot, table
from serving.workloads import Prompts, Workload

LOAD = Workload("short", concurrency=2, requests=5, prompt=3, output=3)


def answers(load: Workload, *, tokens: int, status: int = 200) -> tuple[list[Answer], list[dict[str, Any]], int]:
    """What the client makes of a server whose streams end with a usage of ``tokens``; the bodies; most at once."""
    bodies: list[dict[str, Any]] = []
    at_once = [0, 0]

    async def complete(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        if status != 200:
            return web.json_response({"error": {"message": "no"}}, status=status)
        at_once[0] += 1
        at_once[1] = max(at_once)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        events = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}, {"usage": {"completion_tokens": tokens}}]
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        at_once[0] -= 1
        return response

    async def main() -> list[Answer]:
        app = web.Application()
        app.router.add_post("/v1/completions", complete)
        async with TestServer(app) as server:
            return await run(str(server.make_url("/")), load, [f"p{i}" for i in range(load.requests)], {"x": 1})

    return asyncio.run(main()), bodies, at_once[1]


def test_every_prompt_is_sent_once_and_timed() -> None:
    taken, bodies, at_once = answers(LOAD, tokens=3)
    assert sorted(body["prompt"] for body in bodies) == [f"p{i}" for i in range(5)]
    assert {body["x"] for body in bodies} == {1}
    assert {body["max_tokens"] for body in bodies} == {3}
    assert 1 <= at_once <= 2
    assert all(answer.begun < answer.first <= answer.ended and answer.tokens == 3 for answer in taken)


def test_an_answer_of_another_length_is_no_answer() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        answers(LOAD, tokens=2)
    assert caught.group_contains(RequestError, match="2 tokens came where 3")


def test_a_refusal_names_the_reason() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        answers(LOAD, tokens=3, status=400)
    assert caught.group_contains(RequestError, match="400: .*no")


def test_an_answer_that_never_ends_is_given_up() -> None:
    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", hang)
        async with TestServer(app) as server:
            await run(str(server.make_url("/")), LOAD, ["p"], {}, limit=0.01)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    assert caught.group_contains(RequestError, match=r"no whole answer within 0\.01 seconds")


def test_figures() -> None:
    load = Workload("n=2", concurrency=1, requests=2, prompt=3, output=5, n=2)
    made = figures([Answer(10.0, 11.0, 13.0, 10), Answer(13.0, 13.5, 15.0, 10)], load)
    assert made.output_tokens == 20
    assert made.output_tokens_per_s == pytest.approx(20 / 5)
    assert made.ttft_ms_p50 == pytest.approx(750)
    # Ten tokens of two choices: four follow the first of each.
    assert made.tpot_ms_p50 == pytest.approx(1e3 * (2 / 4 + 1.5 / 4) / 2)


def test_rounds_are_joined_and_compared(tmp_path: Path) -> None:
    def row(system: str, rate: float) -> Row:
        return Row(system, "fp32", "short", 32, rate, 10.0, 20.0, 5.0, 100.0, 2.0, ())

    rows = joined([row("pagemill", 300.0), row("vLLM", 100.0), row("pagemill", 500.0), row("vLLM", 100.0)])
    assert [(r.system, r.output_tokens_per_s, r.rounds) for r in rows] == [
        ("pagemill", 400.0, (300.0, 500.0)),
        ("vLLM", 100.0, (100.0, 100.0)),
    ]
    assert "| short | 32 | vLLM | fp32 | 100.0 | 0.25 |" in table(rows)
    plot(rows, tmp_path / "plot.svg")
    assert "vLLM" in (tmp_path / "plot.svg").read_text()
    assert (tmp_path / "plot.svg").stat().st_size > 1000


@pytest.mark.parametrize("load", [Workload("s", 1, 3, 64, 4), Workload("p", 1, 3, 80, 4, shared=48)])
def test_prompts_have_their_length(load: Workload, tmp_path: Path) -> None:
    from pagemill_testing.prepared_models import byte_level_bpe

    tokenizer = byte_level_bpe()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = Prompts(tmp_path / "tokenizer.json").make(load, "seed")
    tokens = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert {len(ids) for ids in tokens} == {load.prompt}
    assert len(set(map(tuple, (ids[: load.shared] for ids in tokens)))) == 1
    assert texts == Prompts(tmp_path / "tokenizer.json").make(load, "seed")
    assert texts != Prompts(tmp_path / "tokenizer.json").make(load, "other")
