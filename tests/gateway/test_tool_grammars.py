"""What the grammars of tool calls enforce, what cannot be enforced, and calls that are cut off."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pagemill_testing.gateway_server import Stage, stage
from pagemill_testing.prepared_models import byte_level_bpe
from pagemill_testing.weather_tools import (
    CALL,
    END,
    HI,
    NOW,
    NOW_CALL,
    PARIS,
    PATH,
    WEATHER,
    accepts,
    answer_with,
    choice_of,
    joined,
    prompt_of,
)
from tokenizers import AddedToken

from pagemill_shared.messages import FinishReason


def test_required_calls_something_named_calls_that(api: Stage) -> None:
    answer_with(api, CALL)
    choice = choice_of(api, tool_choice="required")
    assert choice["finish_reason"] == "tool_calls"
    assert accepts(api, CALL)
    assert accepts(api, f"{CALL}\n{NOW_CALL}")
    assert not accepts(api, "Hello")
    assert not accepts(api, CALL.replace("city", "town"))
    choice_of(api, tool_choice="required", parallel_tool_calls=False)
    assert accepts(api, NOW_CALL)
    assert not accepts(api, f"{CALL}\n{NOW_CALL}")
    choice = choice_of(api, tool_choice={"type": "function", "function": {"name": "get_weather"}})
    assert choice["finish_reason"] == "tool_calls"
    assert accepts(api, CALL)
    assert not accepts(api, NOW_CALL)
    choice_of(api)
    assert api.stub.submitted[-1].sampling.grammar == ""


def test_with_a_response_format_the_answer_is_that_or_calls(api: Stage) -> None:
    answer_with(api, '{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert choice_of(api, response_format=form)["message"]["content"] == '{"a": 1}'
    assert accepts(api, '{"a": 1}')
    assert accepts(api, CALL)
    assert not accepts(api, "Hello")
    choice_of(api, response_format=form, tool_choice="required")
    assert not accepts(api, '{"a": 1}')


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", CALL),
        ("llama3", f'{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}'),
        ("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}]'),
    ],
)
@pytest.mark.parametrize("markers", [False, True], ids=["as text", "as control tokens"])
def test_each_format_reads_what_it_enforces(parser: str, text: str, markers: bool) -> None:
    tokenizer = byte_level_bpe()
    if markers:
        names = ["[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>", "<|python_tag|>"]
        tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    with stage({"tokenizer": tokenizer}, tool_call_parser=parser) as api:
        api.stub.replay([*tokenizer.encode(text).ids, END], finish=FinishReason.EOS)
        choice = choice_of(api, tool_choice="required")
        assert accepts(api, text, tokenizer)
        assert choice["message"]["content"] is None
        [call, *_] = choice["message"]["tool_calls"]
        assert (call["function"]["name"], call["function"]["arguments"]) == ("get_weather", PARIS)
        if parser == "mistral":
            assert len(call["id"]) == 9
            assert call["id"].isalnum()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "has blank"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tool_choice": "required", "use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_refused(api: Stage, fields: dict[str, Any], param: str) -> None:
    response = api.post(PATH, **{"messages": HI, "tools": [WEATHER, NOW], **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "a"}}, {"structured_outputs": {"choice": ["a"]}},
        {"structured_outputs": {"json": {}}}, {"structured_outputs": {"grammar": 'start: "a"'}},
        {"guided_regex": "a"}, {"guided_choice": ["a"]}, {"guided_json": {}}, {"guided_grammar": 'start: "a"'},
    ],
)  # fmt: skip
def test_no_other_answer_can_be_asked_for_where_calls_are_enforced(api: Stage, choice: Any, fields: Any) -> None:
    [name] = fields
    asked = {"messages": HI, "tools": [WEATHER, NOW], "tool_choice": choice}
    response = api.post(PATH, **asked, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == name
    assert f"{name} cannot be combined with tool_choice" in error["message"]
    answer_with(api, CALL)
    assert api.post(PATH, **asked, response_format={"type": "json_object"}).status_code == 200


def function(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
@pytest.mark.parametrize("path", [PATH, "/tokenize"])
@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "string"}, 'must have "type": "object", but its type is "string"'),
        ({"enum": ["a"]}, 'must have "type": "object", but its type is missing'),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "its type is missing"),
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, 'properties.a.type: "strin" is no type'),
        ({"type": "object", "properties": {"a": {"minimum": 1e999}}}, "properties.a.minimum: a number must be finite"),
        ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance is not supported"),
        ("no schema", "object"),
    ],
)
def test_parameters_that_are_none_are_refused_by_name(
    api: Stage, path: str, choice: str, parameters: Any, words: str
) -> None:
    raw = json.dumps({"messages": HI, "tools": [NOW, function("f", parameters)], "tool_choice": choice})
    response = api.client.post(path, content=raw.replace("Infinity", "1e999"))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "tools[1].function.parameters"
    assert error["message"].startswith("tools[1].function.parameters: ")
    assert words in error["message"]


@pytest.mark.parametrize(
    ("unenforceable", "words"),
    [
        ({"a": {"not": {}}}, "parameters: properties.a: cannot be enforced with not"),
        ({"a": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "with anyOf it can"),
        ({"a": {"type": "string", "pattern": "["}}, "a regular expression is not valid"),
        ({"a": {"$ref": "#/nowhere"}}, "where nothing is"),
        ({"a": {"type": "integer", "minimum": 1e30, "maximum": 1e31}}, "properties.a.minimum: can be enforced from"),
        ({"a": {"type": "string", "pattern": "^a{1000000}$"}}, "the pattern '^a{1000000}$' is too complex"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name_where_it_must_be(
    api: Stage, unenforceable: dict[str, Any], words: str
) -> None:
    bad = function("bad", {"type": "object", "properties": unenforceable, "required": ["a"]})
    answer_with(api, "ok")
    assert choice_of(api, tools=[NOW, bad])["finish_reason"] == "stop", "nothing is enforced"
    assert api.post(PATH, messages=HI, tools=[NOW, bad], tool_choice=named("now")).status_code == 200, "nothing of it"
    form = {"type": "json_object"}
    for fields in [{"tool_choice": "required"}, {"tool_choice": named("bad")}, {"response_format": form}]:
        response = api.post(PATH, **{"messages": HI, "tools": [NOW, bad], **fields})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == "tools[1].function.parameters"
        assert words in error["message"]
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    error = api.post(PATH, messages=HI, tools=[NOW], response_format=broken).json()["error"]
    assert error["param"] == "response_format.json_schema.schema"


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_numbers_in_parameters_may_be_written_as_json_schema_allows(api: Stage) -> None:
    city = {"type": "array", "items": {"type": "null"}, "maxItems": 1.0, "uniqueItems": False}
    tool = function("now", {"type": "object", "properties": {"a": city}, "required": ["a"]})
    answer_with(api, NOW_CALL)
    choice_of(api, tools=[tool], tool_choice="required")
    assert accepts(api, NOW_CALL.replace("{}", '{"a": [null]}'))
    assert not accepts(api, NOW_CALL.replace("{}", '{"a": [null, null]}'))
    assert '"maxItems": 1.0, "uniqueItems": false' in prompt_of(api)


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
def test_a_function_without_parameters_is_called_without_arguments(api: Stage, parameters: Any) -> None:
    answer_with(api, NOW_CALL)
    choice_of(api, tools=[function("now", parameters)], tool_choice="required")
    assert accepts(api, NOW_CALL)
    assert not accepts(api, NOW_CALL.replace("{}", '{"a": 1}'))


def test_a_schema_as_text_leaves_room_for_calls_too(api: Stage) -> None:
    answer_with(api, '{"a": 1}')
    for schema in [json.dumps({"type": "object", "required": ["a"]}), True]:
        choice_of(api, structured_outputs={"json": schema})
        assert accepts(api, '{"a": 1}')
        assert accepts(api, CALL)
        assert not accepts(api, "Hello")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    ("text", "stop", "include", "arguments", "reason"),
    [
        (CALL, "Par", False, ['{"city": "'], "stop"),
        (CALL, '"get_weather"', True, [""], "stop"),
        (CALL, "is", True, ['{"city": "Paris'], "stop"),
        (CALL, "}", False, ['{"city": "Paris"'], "stop"),
        (CALL, "}", True, [PARIS], "tool_calls"),
        (CALL, "</tool_call>", False, [PARIS], "tool_calls"),
        (f"{CALL}\n{NOW_CALL}", "now", False, [PARIS], "tool_calls"),
        (f"{NOW_CALL}\n{CALL}", "Paris", False, ["{}", '{"city": "'], "stop"),
        (CALL, "name", False, [], "stop"),
    ],
)
def test_a_call_that_a_stop_string_cuts_ends_for_it(
    api: Stage, text: str, stop: str, include: bool, arguments: list[str], reason: str, choice: str, stream: bool
) -> None:
    answer_with(api, text)
    fields = {"stop": [stop], "include_stop_str_in_output": include, "tool_choice": choice}
    if stream:
        events = api.events(PATH, messages=HI, tools=[WEATHER, NOW], **fields)
        _, calls, found = joined(events)
        told = [call["arguments"] for call in calls]
    else:
        answer = choice_of(api, **fields)
        found = answer["finish_reason"]
        assert answer["stop_reason"] == stop
        told = [call["function"]["arguments"] for call in answer["message"].get("tool_calls", [])]
    assert (told, found) == (arguments, reason)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_stop_token_cuts_ends_for_it(api: Stage, stream: bool) -> None:
    answer_with(api, CALL[: CALL.index("is")], FinishReason.STOP_TOKEN)  # whose own text, the r, does not show
    if stream:
        _, calls, reason = joined(api.events(PATH, messages=HI, tools=[WEATHER, NOW], tool_choice="required"))
        assert ([call["arguments"] for call in calls], reason) == (['{"city": "Pa'], "stop")
        return
    answer = choice_of(api, tool_choice="required")
    assert answer["finish_reason"] == "stop"
    [call] = answer["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Pa'
