"""Bodies that are refused: the error names the place that the client wrote, and never a kind or class of ours."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from pydantic import ValidationError

from pagemill_gateway.bodies import RequestBody
from pagemill_gateway.chat_body import ChatBody
from pagemill_gateway.completion_body import CompletionBody
from pagemill_gateway.embedding_body import EmbeddingBody
from pagemill_gateway.errors import ApiError
from pagemill_gateway.json_schemas import MAX_DIGITS
from pagemill_gateway.parsing import MAX_DEPTH, parse_body
from pagemill_gateway.response_body import ResponseBody
from pagemill_gateway.token_bodies import DetokenizeBody

HI = {"role": "user", "content": "Hi"}
BASES: dict[type[RequestBody], dict[str, Any]] = {
    ChatBody: {"messages": [HI]}, CompletionBody: {"prompt": "x"}, ResponseBody: {"input": "x"},
    EmbeddingBody: {"input": "x"},
}  # fmt: skip
WRONG: list[Any] = [
    3.5, "\x00", True, -(10**30), [], [None], [[]], [{}], {}, {"x": {}}, {"type": "function", "x": []},
]  # fmt: skip
OURS = (
    "NamedToolChoice", "InputMessage", "InputText", "function-", "list[", "dict[", "literal[", "constrained", "instance"
)  # fmt: skip
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


def refusal(cls: type[RequestBody], **body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(cls, json.dumps(body).encode())
    assert caught.value.status == 400
    return caught.value


def chat(**body: Any) -> ApiError:
    return refusal(ChatBody, **{"messages": [HI], "tools": [{"type": "function", "function": {"name": "f"}}]} | body)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("sometimes", "tool_choice"), (3, "tool_choice"), ([], "tool_choice"), ({}, "tool_choice.type"),
        ({"type": "function"}, "tool_choice.function"), ({"type": "x", "function": {"name": "f"}}, "tool_choice.type"),
        ({"type": "function", "function": "f"}, "tool_choice.function"),
        ({"type": "function", "function": {}}, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": 3}}, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": "f"}, "x": 1}, "tool_choice.x"),
    ],
)  # fmt: skip
def test_a_tool_choice(choice: Any, param: str) -> None:
    assert chat(tool_choice=choice).param == param


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (3, "input[2]"), ("x", "input[2]"), ({}, "input[2].role"), ({"role": "user"}, "input[2].content"),
        ({"role": "user", "content": 3}, "input[2].content"), ({"role": "bot", "content": "x"}, "input[2].role"),
        ({"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "input_text"}]},
         "input[2].content[1].text"),
        ({"role": "user", "content": [{"type": "input_text", "text": 3}]}, "input[2].content[0].text"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[2].content[0].type"),
        ({"role": "user", "content": "x", "y": 1}, "input[2].y"), ({"type": "x"}, "input[2].type"),
    ],
)  # fmt: skip
def test_an_item_of_a_responses_input(item: Any, param: str) -> None:
    assert refusal(ResponseBody, input=[HI, HI, item]).param == param


@pytest.mark.parametrize(
    ("cls", "body", "param"),
    [
        (ResponseBody, {"input": 3}, "input"),
        (ResponseBody, {"input": []}, "input"),
        (ResponseBody, {"input": "x", "text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format.schema"),
        (ResponseBody, {"input": "x", "metadata": {"str": 3}}, "metadata.str"),
        (ChatBody, {"messages": [HI, {"role": "user"}]}, "messages[1].content"),
        (ChatBody, {"messages": [HI, {"role": "user", "content": [3]}]}, "messages[1].content[0]"),
        (ChatBody, {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (ChatBody, {"messages": [HI, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        (ChatBody, {"messages": [HI | {"tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        (ChatBody, {"messages": [HI], "structured_outputs": {"json": 3}}, "structured_outputs.json"),
        (ChatBody, {"messages": [HI], "structured_outputs": {"choice": ["a", 3]}}, "structured_outputs.choice[1]"),
        (ChatBody, {"messages": [HI], "guided_json": 3}, "guided_json"),
        (ChatBody, {"messages": [HI], "logit_bias": {"5": 1000}}, "logit_bias.5"),
        (ChatBody, {"messages": [HI], "stop": ["a", 3]}, "stop[1]"),
        (ChatBody, {"messages": [HI], "stop": ["a", ""]}, "stop[1]"),
        (ChatBody, {"messages": [HI], "stop": ""}, "stop"),
        (ChatBody, {"messages": [HI], "early_stopping": "x"}, "early_stopping"),
        (CompletionBody, {"prompt": ["a", 3]}, "prompt[1]"),
        (CompletionBody, {"prompt": ["a", ""]}, "prompt[1]"),
        (CompletionBody, {"prompt": [3, "a"]}, "prompt[1]"),
        (CompletionBody, {"prompt": [[1], "a"]}, "prompt[1]"),
        (CompletionBody, {"prompt": [[1], []]}, "prompt[1]"),
        (CompletionBody, {"prompt": [[1], [2, True]]}, "prompt[1][1]"),
        (CompletionBody, {"prompt": [[1], [2, -1]]}, "prompt[1][1]"),
        (CompletionBody, {"prompt": [1, 2**31]}, "prompt[1]"),
        (CompletionBody, {"prompt": [1, 10**30]}, "prompt[1]"),
        (CompletionBody, {"prompt": {}}, "prompt"),
        (EmbeddingBody, {"input": [[1], [1.5]]}, "input[1][0]"),
        (DetokenizeBody, {"tokens": [1, None]}, "tokens[1]"),
    ],
)
def test_the_place_is_named_as_the_client_wrote_it(cls: type[RequestBody], body: dict[str, Any], param: str) -> None:
    error = refusal(cls, **body)
    assert error.param == param
    assert error.message.startswith(f"{param}: ")


def test_a_value_that_may_be_of_several_kinds_is_told_all_of_them() -> None:
    assert refusal(ResponseBody, input=3).message == "input: Input should be a valid string or a valid list (got 3)"
    words = chat(tool_choice="sometimes").message
    assert "'none', 'auto' or 'required' or an object (got 'sometimes')" in words
    assert refusal(ResponseBody, input=[]).message.startswith("input: List should have at least 1 item")


@pytest.mark.parametrize("cls", [ChatBody, CompletionBody, ResponseBody, EmbeddingBody])
def test_no_name_of_ours_shows(cls: type[RequestBody]) -> None:
    """Every field, with values of each wrong kind."""
    base = BASES[cls]
    tried = 0
    for name in cls.model_fields:
        for value in WRONG:
            raw = json.dumps(base | {name: value}).encode()
            with contextlib.suppress(ApiError):  # some of them are right here
                parse_body(cls, raw)
                continue
            with pytest.raises(ApiError) as caught:
                parse_body(cls, raw)
            error = caught.value
            tried += 1
            assert (error.param or "").partition(".")[0].partition("[")[0] in {*base, *cls.model_fields}, error
            assert not any(word in f"{error.param} {error.message}" for word in OURS), (name, error.message)
    assert tried > 5 * len(cls.model_fields)


@pytest.mark.parametrize(
    ("cls", "name", "value", "rest"),
    [
        (CompletionBody, "suffix", "x", ""),
        (ChatBody, "logits_processors", ["x"], ""),
        (ChatBody, "prompt_embeds", "x", ""),
        (ChatBody, "functions", [{}], ""),
        (ResponseBody, "previous_response_id", "x", ""),
        (EmbeddingBody, "dimensions", 3, ""),
        (ResponseBody, "truncation", "auto", ', but for "disabled"'),
        (ChatBody, "modalities", ["audio"], ', but for ["text"]'),
    ],
)
def test_what_is_not_served_at_all_is_told_from_what_is_with_another_value(
    cls: type[RequestBody], name: str, value: Any, rest: str
) -> None:
    error = refusal(cls, **BASES[cls], **{name: value})
    assert (error.code, error.param) == ("unsupported_parameter", name)
    assert error.message == f"`{name}` is not supported by this server{rest}"


@pytest.mark.parametrize("given", ["a\nb", "a\r\nX-Header: 1", "\x1b[2J", "a b", "a\u2028b", "ä", "", "x" * 257, "a\n"])
@pytest.mark.parametrize("cls", [ChatBody, CompletionBody, EmbeddingBody])
def test_a_request_id_is_printable(cls: type[RequestBody], given: str) -> None:
    body = BASES[cls]
    assert refusal(cls, **body, request_id=given).param == "request_id"
    parse_body(cls, json.dumps(body | {"request_id": "req_1/2-~!"}).encode())


MANY = 20_000


@pytest.mark.parametrize(
    ("cls", "body"),
    [
        (ChatBody, {"messages": [1] * MANY}),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * MANY}]}),
        (ChatBody, {"messages": [HI], "tools": [1] * MANY}),
        (ChatBody, {"messages": [HI], "stop_token_ids": ["x"] * MANY}),
        (ChatBody, {"messages": [HI], "logit_bias": {str(i): "x" for i in range(MANY)}}),
        (ChatBody, {"messages": [HI], "structured_outputs": {"choice": [1] * MANY}}),
        (CompletionBody, {"prompt": ["a", *[1] * MANY]}),
        (CompletionBody, {"prompt": "x", "bad_words": [1] * MANY}),
        (ResponseBody, {"input": [1] * MANY}),
        (ResponseBody, {"input": [{"role": "user", "content": [1] * MANY}]}),
        (ResponseBody, {"input": "x", "metadata": {str(i): 1 for i in range(MANY)}}),
        (ResponseBody, {"input": "x", "include": ["x"] * MANY}),
    ],
)
def test_many_faults_cost_no_more_than_a_few(cls: type[RequestBody], body: dict[str, Any]) -> None:
    """pydantic would make an object of several hundred bytes, and some microseconds of work, of each."""
    with pytest.raises(ValidationError) as caught:
        cls.model_validate(body)
    assert caught.value.error_count() < 1500
    assert refusal(cls, **body).param is not None


def test_many_unknown_fields() -> None:
    unknown = {f"unknown{i}": 1 for i in range(MANY)}
    error = refusal(CompletionBody, prompt="x", **unknown)
    assert (error.param, error.code) == ("unknown0", "unknown_parameter")
    assert error.message == "unrecognized request argument: unknown0"
    assert "20000 faults" in refusal(ChatBody, messages=[HI | unknown]).message


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ('{"a":' * 1000 + "1" + "}" * 1000, f"is nested too deeply: more than {MAX_DEPTH} objects and lists"),
        ('{"prompt":' + "[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH + "}", "is nested too deeply"),
        ('{"max_tokens":' + "1" * (MAX_DIGITS + 1) + "}", "has a number of too many digits: more than 4,300"),
        ('{"max_tokens":-' + "1" * 5000 + "}", "has a number of too many digits: more than 4,300"),
        ('{"max_tokens":', "is not valid JSON: EOF"),
    ],
)
def test_a_limit_of_the_reader_is_told_from_what_is_no_json(raw: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(CompletionBody, raw.encode())
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert caught.value.message.startswith(f"the body {words}")


@pytest.mark.parametrize(
    "raw",
    [
        '{"a":' + "[" * (MAX_DEPTH - 1) + "1" + "]" * (MAX_DEPTH - 1) + "}",
        '{"a":' + "1" * MAX_DIGITS + "}",
    ],
)
def test_what_the_reader_still_takes(raw: str) -> None:
    with pytest.raises(ApiError, match="unrecognized request argument: a"):
        parse_body(CompletionBody, raw.encode())


@pytest.mark.parametrize(
    ("cls", "field"), [(ChatBody, "messages"), (CompletionBody, "prompt"), (ResponseBody, "input")]
)
def test_null_for_what_is_required_is_as_good_as_nothing(cls: type[RequestBody], field: str) -> None:
    for body in ({}, {field: None}):
        error = refusal(cls, **body)
        assert (error.param, error.message) == (field, f"{field}: is missing")


@pytest.mark.parametrize("nothing", [None, []])
def test_context_management_that_asks_for_nothing(nothing: Any) -> None:
    parse_body(ResponseBody, json.dumps({"input": "x", "context_management": nothing}).encode())
    assert refusal(ResponseBody, input="x", context_management=[{"type": "compaction"}]).param == "context_management"
