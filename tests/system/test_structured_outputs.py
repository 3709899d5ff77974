"""Answers that must match a grammar, from the real model in three processes: they do, whatever else goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pagemill_testing.http_calls import Call
from pagemill_testing.live_server import CHAT, LiveServer, ServeCommand
from pagemill_testing.sockets import ipc_folder
from pydantic import BaseModel, ConfigDict, Field

pytestmark = pytest.mark.timeout(300)


class Colour(Enum):
    RED, GREEN, BLUE = "red", "green", "blue"


class Address(BaseModel):
    model_config = ConfigDict(extra="forbid")

    street: Annotated[str, Field(max_length=12)]
    number: Annotated[int, Field(ge=1, le=999)]


class Person(BaseModel):
    """With what schemas of real clients have: references, alternatives, enumerations, bounds, defaults."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=16)]
    age: Annotated[int, Field(ge=0, le=120)]
    favourite: Colour
    kind: Literal["user", "admin"] = "user"
    nick: Annotated[str, Field(max_length=8)] | None
    addresses: Annotated[list[Address], Field(max_length=2)]


PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": Person.model_json_schema()}}
TOKENS = 200
"""More than the longest person takes."""
QUESTIONS = ["Describe a person.", "Who is Ada?", "Invent a villain.", "Erfinde jemanden.", "誰ですか"]


def start_person(server: LiveServer, number: int, **fields: Any) -> Call:
    question = QUESTIONS[number % len(QUESTIONS)]
    body = {"temperature": 1.0, "seed": number, "max_tokens": TOKENS, "response_format": PERSON, **fields}
    return server.start(CHAT, messages=[{"role": "user", "content": f"{question} JSON only."}], **body)


def check_person(call: Call, index: int = 0) -> Person:
    reasons = [part["finish_reason"] for part in call.choices(index) if part["finish_reason"]]
    assert reasons == ["stop"], call.text_of(index)
    return Person.model_validate_json(call.text_of(index), strict=False)


def test_every_answer_matches_beside_plain_ones(server: ServeCommand) -> None:
    plain_body = {"prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True}
    alone = server.ask(**plain_body)
    calls = []
    for number in range(8):
        calls.append(start_person(server, number, stream=number % 2 == 0))
        if number % 4 == 0:
            plain = server.start(**plain_body)
    people = [check_person(call) for call in server.finish(calls)]
    assert len({person.name for person in people}) > 4, "at temperature 1 they are not all the same"
    server.finish([plain])
    assert plain.token_ids[:8] == alone.token_ids[:8]
    server.until_idle()


@pytest.mark.full
def test_100_of_100_at_temperature_1(server: ServeCommand) -> None:
    for begin in range(0, 100, 20):
        for call in server.finish([start_person(server, 1000 + number) for number in range(begin, begin + 20)]):
            check_person(call)


def test_equal_seeds_give_equal_answers_streamed_or_not_and_after_prefix_hits(server: ServeCommand) -> None:
    first = server.finish([start_person(server, 7)])[0]
    again = server.finish([start_person(server, 7, stream=True, stream_options={"include_usage": True})])[0]
    assert again.token_ids == first.token_ids
    assert again.text == first.text
    assert again.usage["prompt_tokens_details"]["cached_tokens"] > 0  # type: ignore[index]


def test_n_choices_go_their_own_ways(server: ServeCommand) -> None:
    call = server.finish([start_person(server, 3, n=3, stream=True)])[0]
    people = [check_person(call, index) for index in range(3)]
    assert len({person.model_dump_json() for person in people}) == 3
    best = server.finish([start_person(server, 3, n=1, best_of=3)])[0]
    check_person(best)


def test_with_other_fields(server: ServeCommand) -> None:
    others: list[dict[str, Any]] = [
        {"min_tokens": 90},
        {"logprobs": True, "top_logprobs": 3},
        {"frequency_penalty": 1.5, "presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"logit_bias": {"2": 100, "0": -100, "74": 50}},
        {"top_k": 3, "top_p": 0.5, "min_p": 0.1},
        {"temperature": 0},
    ]
    for call in server.finish([start_person(server, 5, **fields) for fields in others]):
        check_person(call)


def test_a_cut_answer_says_length_and_a_stop_string_still_ends_one(server: ServeCommand) -> None:
    cut = server.finish([start_person(server, 1, max_tokens=5)])[0]
    assert cut.finish_reason == "length"
    assert re.match(r'\{\s?"name":? ?"?', cut.text)
    assert len(cut.token_ids) == 5
    stopped = server.finish([start_person(server, 1, stop=['"age"'])])[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text.rstrip().endswith(",")
    for form in ({"type": "json_object"}, PERSON):
        assert server.finish([start_person(server, 2, max_tokens=5, response_format=form)])[0].text.startswith("{")
    server.assert_alive()


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"choice": ["Paris", "London", "Rome"]}, "Paris|London|Rome"),
        ({"regex": r"[A-Z][a-z]{2,9}, \d{4}-\d{2}-\d{2}"}, r"[A-Z][a-z]{2,9}, \d{4}-\d{2}-\d{2}"),
        ({"grammar": 'root ::= ("ab" | "é日🙂")+ "."'}, r"(ab|é日🙂)+\."),
    ],
    ids=["choice", "regex", "grammar"],
)
def test_other_kinds(server: ServeCommand, outputs: dict[str, Any], pattern: str) -> None:
    fields = {"prompt": "The capital of France is", "max_tokens": 60, "temperature": 1.0, "structured_outputs": outputs}
    calls = server.finish([server.start(seed=seed, **fields) for seed in range(3)])
    for call in calls:
        assert call.finish_reason == "stop" or "grammar" in outputs
        if call.finish_reason == "stop":
            assert re.fullmatch(pattern, call.text), call.text
    if "choice" in outputs:
        assert server.ask(**{**fields, "temperature": 0}).text == "Paris"


def test_a_bad_grammar_harms_nobody(server: ServeCommand) -> None:
    good = [start_person(server, number) for number in range(2)]
    bad = [
        server.start(prompt="x", response_format={"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}),
        server.start(prompt="x", structured_outputs={"regex": "(" * 5000}),
        server.start(prompt="x", guided_grammar="start: nope"),
    ]
    for call in server.finish(good):
        check_person(call)
    for call in bad:
        call.until_done()
        assert call.status == 400
        assert call.error is not None
        assert call.error["param"].split(".")[0] in call.body
    server.assert_alive()


@pytest.fixture
def tight(cache: Path) -> Iterator[ServeCommand]:
    """A pool in which three such answers hardly fit."""
    with ipc_folder() as folder:
        server = ServeCommand(
            folder,
            "tight",
            cache_dir=cache,
            num_kv_blocks=32,
            num_swap_blocks=16,
            peer_timeout=60,
            check_invariants=True,
        )
        try:
            server.until_started()
            yield server
        finally:
            server.close()


def test_preempted_answers_go_on_where_they_were(tight: ServeCommand) -> None:
    tight.until_ready()
    with tight.arriving_together(6):
        calls = [start_person(tight, number, n=1 + number % 2) for number in range(6)]
    for number, call in enumerate(tight.finish(calls)):
        for index in range(1 + number % 2):
            check_person(call, index)
    assert tight.counter("num_preemptions_total") > 0
    tight.until_idle()


def test_json_objects_are_objects(server: ServeCommand) -> None:
    for call in server.finish(
        [start_person(server, 40 + n, response_format={"type": "json_object"}, max_tokens=60) for n in range(3)]
    ):
        assert call.text.startswith("{")
        if call.finish_reason == "stop":
            assert isinstance(json.loads(call.text), dict)
