"""The Responses API over HTTP, against scripted tokens: shapes, the sequence of events, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pagemill_testing.gateway_server import Stage
from pagemill_testing.prepared_models import byte_level_ids as ids

from pagemill_gateway.response_answers import Response, ResponseEvent
from pagemill_shared.messages import FinishReason

PATH = "/v1/responses"
TEXT = "The answer is 42. 🙂"


def ask(api: Stage, **body: Any) -> dict[str, Any]:
    response = api.post(PATH, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    Response.model_validate_json(response.text)
    return answer


def events(api: Stage, **body: Any) -> list[dict[str, Any]]:
    response = api.post(PATH, stream=True, **body)
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        ResponseEvent.model_validate_json(data.removeprefix("data: "))
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_an_answer_is_one_message(api: Stage) -> None:
    api.stub.replay([*ids(TEXT), 2], FinishReason.EOS)
    answer = ask(api, input="What?", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
    [item] = answer["output"]
    assert item["content"] == [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}]
    assert (answer["status"], answer["incomplete_details"], answer["error"]) == ("completed", None, None)
    assert (answer["metadata"], answer["temperature"], answer["store"]) == ({"a": "b"}, 0.5, False)
    assert answer["usage"]["output_tokens"] == len(ids(TEXT)) + 1
    chat = api.post(
        "/tokenize",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}],
    ).json()["tokens"]
    assert api.stub.submitted[0].prompt_token_ids.tolist() == chat
    assert answer["usage"]["input_tokens"] == len(chat)


def test_a_conversation_of_items_with_parts(api: Stage) -> None:
    api.stub.replay(ids("!"), FinishReason.LENGTH)
    first = ask(api, input="One", max_output_tokens=1)
    assert (first["status"], first["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    parts = [{"type": "input_text", "text": "Two "}, {"type": "input_text", "text": "three"}]
    items = [{"role": "developer", "content": "Kind."}, *first["output"], {"role": "user", "content": parts}]
    ask(api, input=items, max_output_tokens=1)
    messages = [
        {"role": "system", "content": "Kind."},
        {"role": "assistant", "content": "!"},
        {"role": "user", "content": "Two three"},
    ]
    assert api.stub.submitted[1].prompt_token_ids.tolist() == api.post("/tokenize", messages=messages).json()["tokens"]


@pytest.mark.parametrize("finish", [FinishReason.EOS, FinishReason.LENGTH])
def test_the_official_sequence_of_events(api: Stage, finish: FinishReason) -> None:
    api.stub.replay([*ids(TEXT), 2] if finish is FinishReason.EOS else ids(TEXT), finish)
    found = events(api, input="What?")
    kinds = [event["type"] for event in found]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    last = "response.completed" if finish is FinishReason.EOS else "response.incomplete"
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        last,
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event["delta"] for event in found[4:-4]) == TEXT
    assert found[-4]["text"] == found[-3]["part"]["text"] == TEXT
    assert found[-1]["response"]["output"] == [found[-2]["item"]]
    assert len({event["item_id"] for event in found if "item_id" in event}) == 1
    whole = ask(api, input="What?")
    volatile = ("id", "created_at", "output")
    assert {k: v for k, v in whole.items() if k not in volatile} == {
        k: v for k, v in found[-1]["response"].items() if k not in volatile
    }


def test_log_probabilities_where_they_are_included(api: Stage) -> None:
    api.stub.replay(ids("a b"), FinishReason.LENGTH, logprobs=lambda token: ([token, 5], [-0.5, -1.0]))
    body = {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    logprobs = ask(api, **body)["output"][0]["content"][0]["logprobs"]
    assert [entry["logprob"] for entry in logprobs] == [-0.5] * len(ids("a b"))
    assert [len(entry["top_logprobs"]) for entry in logprobs] == [1] * len(ids("a b"))
    deltas = [event for event in events(api, **body) if event["type"].endswith("delta")]
    assert [entry for event in deltas for entry in event["logprobs"]] == logprobs


def test_structured_output_is_passed_on(api: Stage) -> None:
    api.stub.replay(ids("{}"), FinishReason.EOS)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "it", "schema": schema, "strict": True}
    answer = ask(api, input="x", text={"format": form})
    assert answer["text"]["format"] == form
    assert api.stub.submitted[0].sampling.grammar


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({}, "input", 400),
        ({"input": []}, "input", 400),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None, 400),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, None, 400),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", 400),
        ({"input": "x", "conversation": "conv_1"}, "conversation", 400),
        ({"input": "x", "background": True}, "background", 400),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools", 400),
        ({"input": "x", "truncation": "auto"}, "truncation", 400),
        ({"input": "x", "top_logprobs": 3}, "top_logprobs", 400),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", 400),
        ({"input": "x", "max_output_tokens": 99999}, "max_output_tokens", 400),
        ({"input": "word " * 3000}, "input", 400),
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 3}}}},
            "text.format.schema",
            400,
        ),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", 400),
        ({"input": "x", "messages": []}, "messages", 400),
        ({"input": "x", "model": "other"}, "model", 404),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    api: Stage, body: dict[str, Any], param: str | None, status: int
) -> None:
    response = api.post(PATH, **body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["param"].startswith("input") if param is None else error["param"] == param


def test_null_is_the_default(api: Stage) -> None:
    api.stub.replay(ids("!"), FinishReason.EOS)
    plain = ask(api, input="x")
    for field in ("instructions", "max_output_tokens", "temperature", "top_p", "text", "metadata", "stream", "include",
                  "previous_response_id", "tools", "store", "reasoning", "user"):  # fmt: skip
        answer = ask(api, **{"input": "x", field: None})
        assert answer["output"][0]["content"] == plain["output"][0]["content"]


def test_a_failure_in_the_middle_of_a_stream_is_its_last_event(api: Stage) -> None:
    api.stub.replay(ids("one two"), FinishReason.NOT_FINISHED)
    with api.client.stream("POST", PATH, json={"input": "x", "stream": True}) as response:
        lines = response.iter_lines()
        assert next(line for line in lines if "output_text.delta" in line)
        api.stub.fail("worker_lost", "it is gone")
        rest = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert rest[-1]["type"] == "response.failed"
    assert rest[-1]["response"]["error"] == {"code": "server_error", "message": "it is gone"}


@pytest.mark.usefixtures("late_head")
def test_a_failure_before_the_first_output_is_an_http_error(api: Stage) -> None:
    api.stub.replay([], failure=("no_worker", "none is left", ""))
    assert api.post(PATH, input="x", stream=True).status_code == 503
