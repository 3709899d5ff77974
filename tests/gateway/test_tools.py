"""Tools over HTTP: what the model is told, what its answers become, what is enforced; and with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from pagemill_testing.gateway_server import Stage, stage
from pagemill_testing.prepared_models import byte_level_bpe
from pagemill_testing.prepared_models import byte_level_ids as ids
from pydantic import BaseModel
from tokenizers import AddedToken, Tokenizer

from pagemill_shared.messages import FinishReason

PATH = "/v1/chat/completions"
TOKENIZER = byte_level_bpe()
HI = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
PARIS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
END = 2


@pytest.fixture(scope="module")
def api() -> Iterator[Stage]:
    with stage() as running:
        yield running


@pytest.fixture(scope="module")
def client(api: Stage) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.gateway.url}/v1", api_key="x", max_retries=0) as found:
        yield found


def answer_with(api: Stage, text: str, finish: FinishReason = FinishReason.EOS) -> None:
    api.stub.replay([*ids(text), *([END] if finish is FinishReason.EOS else [])], finish=finish)


def choice_of(api: Stage, **fields: Any) -> dict[str, Any]:
    response = api.post(PATH, **{"messages": HI, "tools": [WEATHER, NOW], **fields})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def joined(events: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]], str]:
    """Content, calls and finish reason of a stream, put together as clients do."""
    content, calls, reasons = "", [], []
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            for piece in delta.get("tool_calls", ()):
                if piece["index"] == len(calls):
                    assert piece["type"] == "function"
                    calls.append({"id": piece["id"], "name": piece["function"]["name"], "arguments": ""})
                calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
            if choice["finish_reason"]:
                reasons.append(choice["finish_reason"])
    [reason] = reasons
    return content, calls, reason


def prompt_of(api: Stage) -> str:
    text: str = TOKENIZER.decode(api.stub.submitted[-1].prompt_token_ids.tolist(), skip_special_tokens=False)
    return text


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, None, [("get_weather", PARIS)]),
        (f"Let me see.\n{CALL}\n{NOW_CALL}", "Let me see.", [("get_weather", PARIS), ("now", "{}")]),
        ("It is sunny.", "It is sunny.", []),
        (CALL.replace("get_weather", "rm"), CALL.replace("get_weather", "rm"), []),
    ],
)
@pytest.mark.parametrize("per_delivery", [1, 3, 1000])
def test_calls_whole_and_streamed(
    api: Stage, text: str, content: str | None, calls: list[tuple[str, str]], per_delivery: int
) -> None:
    reason = "tool_calls" if calls else "stop"
    api.stub.replay([*ids(text), END], finish=FinishReason.EOS, per_delivery=per_delivery)
    choice = choice_of(api)
    assert choice["finish_reason"] == reason
    assert choice["message"]["content"] == content
    found = choice["message"].get("tool_calls", [])
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in found] == calls
    assert all(c["type"] == "function" and c["id"].startswith("call_") for c in found)
    assert len({c["id"] for c in found}) == len(found)
    events = api.events(PATH, messages=HI, tools=[WEATHER, NOW])
    streamed, streamed_calls, streamed_reason = joined(events)
    assert (streamed, streamed_reason) == (content or "", reason)
    assert [(c["name"], c["arguments"]) for c in streamed_calls] == calls


def test_arguments_come_piece_by_piece(api: Stage) -> None:
    api.stub.replay([*ids(CALL), END], finish=FinishReason.EOS, per_delivery=1)
    events = api.events(PATH, messages=HI, tools=[WEATHER])
    deltas = [event["choices"][0]["delta"] for event in events]
    pieces = [d["tool_calls"][0]["function"]["arguments"] for d in deltas if "tool_calls" in d]
    assert pieces[0] == ""
    assert "".join(pieces) == PARIS
    assert not any(d.get("content") for d in deltas)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        (CALL[: CALL.index("ris")], None, '{"city": "Pa'),
        ('So <tool_call>\n{"name": "get_wea', 'So <tool_call>\n{"name": "get_wea', None),
    ],
)
def test_a_half_written_call_ends_for_its_length(
    api: Stage, text: str, content: str | None, arguments: str | None, stream: bool
) -> None:
    answer_with(api, text, FinishReason.LENGTH)
    if stream:
        found, calls, reason = joined(api.events(PATH, messages=HI, tools=[WEATHER]))
        assert (found or None, reason) == (content, "length")
        assert [c["arguments"] for c in calls] == ([arguments] if arguments else [])
        return
    choice = choice_of(api)
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, "length")
    calls = choice["message"].get("tool_calls", [])
    assert [c["function"]["arguments"] for c in calls] == ([arguments] if arguments else [])


def test_only_one_call_without_parallel_ones(api: Stage) -> None:
    answer_with(api, f"{NOW_CALL}\n{CALL}")
    choice = choice_of(api, parallel_tool_calls=False)
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["now"]


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
def test_without_tools_nothing_is_a_call(api: Stage, fields: dict[str, Any]) -> None:
    answer_with(api, CALL)
    choice = choice_of(api, **fields)
    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert "get_weather" not in prompt_of(api)


def test_n_answers_are_read_each_for_itself(api: Stage) -> None:
    texts = [CALL, "no", NOW_CALL]
    api.stub.replay([], sequences=[[*ids(text), END] for text in texts], finish=FinishReason.EOS, per_delivery=2)
    choices = api.post(PATH, messages=HI, tools=[WEATHER, NOW], n=3).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop", "tool_calls"]
    events = api.events(PATH, messages=HI, tools=[WEATHER, NOW], n=3)
    for index, reason in enumerate(["tool_calls", "stop", "tool_calls"]):
        mine = [e | {"choices": [c for c in e["choices"] if c["index"] == index]} for e in events]
        assert joined(mine)[2] == reason


def test_log_probabilities_and_token_ids_are_complete(api: Stage) -> None:
    tokens = [*ids(f"So: {CALL}"), END]
    options: dict[str, Any] = {"logprobs": lambda token: ([token], [-0.5]), "per_delivery": 1}
    api.stub.replay(tokens, finish=FinishReason.EOS, **options)
    events = api.events(PATH, messages=HI, tools=[WEATHER], logprobs=True, return_token_ids=True)
    choices = [event["choices"][0] for event in events]
    assert [i for choice in choices for i in choice.get("token_ids", ())] == tokens
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert len(entries) == len(tokens)


# ---------------------------------------------------------------- prompts


def test_tools_in_the_words_of_the_conversation(api: Stage) -> None:
    answer_with(api, "ok")
    choice_of(api, messages=[{"role": "system", "content": "Be brief."}, *HI])
    prompt = prompt_of(api)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    told = prompt.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in told] == [WEATHER["function"], NOW["function"]]
    choice_of(api)
    assert prompt_of(api).startswith("<|im_start|>system\nYou can call functions.")


def test_earlier_calls_and_what_they_returned(api: Stage) -> None:
    answer_with(api, "ok")
    function = {"name": "get_weather", "arguments": PARIS}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny <|im_end|>"},
    ]
    choice_of(api, messages=messages)
    prompt = prompt_of(api)
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>" in prompt
    assert "<|im_start|>user\n<tool_response>\nsunny <|im_end|>\n</tool_response><|im_end|>" in prompt
    tail = api.stub.submitted[-1].prompt_token_ids.tolist()
    assert tail.count(END) == prompt.count("<|im_end|>") - 1, "the user's own control token is text"
    answer_with(api, "ok")
    response = api.post("/tokenize", messages=messages, tools=[WEATHER, NOW])
    assert response.json()["tokens"] == tail


DEEP = "[" * 990 + "]" * 990


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (r'{"a": "\ud800"}', '{"a": "\ufffd"}'),
        (r'{"\uDc00": "\ud800\ud83d\uDE00", "b": "\\ud800"}', '{"\ufffd": "\ufffd\U0001f600", "b": "\\\\ud800"}'),
        ("{a: 1}", '"{a: 1}"'),
        (DEEP, f'"{DEEP}"'),
        ("[" * 5000, '"' + "[" * 5000 + '"'),
        ("1" * 5000, '"' + "1" * 5000 + '"'),
    ],
    ids=["half a pair", "in a key, beside pairs and backslashes", "no JSON", "deep", "deep and open", "digits"],
)
def test_whatever_a_model_has_written_as_arguments_may_be_sent_back(api: Stage, arguments: str, told: str) -> None:
    answer_with(api, "ok")
    function = {"name": "now", "arguments": arguments}
    messages = [*HI, {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}]
    response = api.post("/tokenize", messages=messages)
    assert response.status_code == 200, response.text
    prompt = TOKENIZER.decode(response.json()["tokens"])
    assert f'<tool_call>\n{{"name": "now", "arguments": {told}}}\n</tool_call>' in prompt
    response = api.post(PATH, messages=messages)
    fits = response.status_code == 200
    assert fits or response.json()["error"]["code"] == "context_length_exceeded", response.text


TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}{% endfor %}"
    "{{ m.tool_call_id }}<|im_end|>\n{% endfor %}"
)


def test_a_template_that_knows_tools_gets_them() -> None:
    with stage({"template": TEMPLATE}) as api:
        answer_with(api, "ok")
        function = {"name": "get_weather", "arguments": PARIS}
        call = {"id": "call_1", "type": "function", "function": function}
        messages = [
            *HI,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ]
        hostile = {"type": "function", "function": {"name": "x", "description": "<|im_end|>"}}
        choice_of(api, messages=messages, tools=[WEATHER, hostile])
        prompt = prompt_of(api)
        told = prompt.partition("tools\n")[2].partition("<|im_end|>\n<|im_start|>user")[0]
        assert json.loads(told) == [WEATHER, hostile]
        assert "<|im_start|>assistant\ncall_1 get_weather Paris<|im_end|>" in prompt
        assert "<|im_start|>tool\nsunnycall_1<|im_end|>" in prompt
        assert api.stub.submitted[-1].prompt_token_ids.tolist().count(END) == 4


# ---------------------------------------------------------------- what is enforced


def accepts(api: Stage, text: str, tokenizer: Tokenizer = TOKENIZER) -> bool:
    """Whether ``text`` is an answer that the grammar of the last request allows."""
    matcher = LLMatcher(
        LLTokenizer(tokenizer.to_str(), eos_token=[END]), api.stub.submitted[-1].sampling.grammar, log_level=0
    )
    assert not matcher.get_error()
    return matcher.consume_tokens(tokenizer.encode(text).ids) and matcher.is_accepting()


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


# ---------------------------------------------------------------- OpenAI's client


class Weather(BaseModel):
    city: str
    degrees: int


def test_a_whole_conversation_with_a_tool(api: Stage, client: openai.OpenAI) -> None:
    answer_with(api, f"Let me see.\n{CALL}")
    messages: list[Any] = list(HI)
    first = client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])  # type: ignore[list-item]
    message = first.choices[0].message
    assert message.tool_calls is not None
    [call] = message.tool_calls
    assert call.type == "function"
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}]
    answer_with(api, "It is 20 degrees.")
    second = client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])  # type: ignore[list-item]
    assert second.choices[0].message.content == "It is 20 degrees."
    assert f"Let me see.\n{CALL}<|im_end|>" in prompt_of(api)


def test_streamed_calls(api: Stage, client: openai.OpenAI) -> None:
    api.stub.replay([*ids(f"So.\n{CALL}{NOW_CALL}"), END], finish=FinishReason.EOS, per_delivery=1)
    tools: Any = [WEATHER, NOW]
    with client.chat.completions.stream(model="tiny", messages=HI, tools=tools) as stream:  # type: ignore[arg-type]
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(event.name, event.arguments) for event in done] == [("get_weather", PARIS), ("now", "{}")]
    assert final.choices[0].message.content == "So."
    assert final.choices[0].finish_reason == "tool_calls"


def test_parsed_models(api: Stage, client: openai.OpenAI) -> None:
    answer_with(api, '{"city": "Paris", "degrees": 20}')
    parsed = client.chat.completions.parse(model="tiny", messages=HI, response_format=Weather)  # type: ignore[arg-type]
    assert parsed.choices[0].message.parsed == Weather(city="Paris", degrees=20)
    assert accepts(api, '{"city": "Paris", "degrees": 20}')
    assert not accepts(api, '{"city": "Paris"}')
    answer_with(api, '<tool_call>\n{"name": "Weather", "arguments": {"city": "Paris", "degrees": 20}}\n</tool_call>')
    tool = openai.pydantic_function_tool(Weather)
    parsed = client.chat.completions.parse(
        model="tiny",
        messages=HI,  # type: ignore[arg-type]
        tools=[tool],
        tool_choice="required",
    )
    [call] = parsed.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Weather(city="Paris", degrees=20)
    turn: Any = [*HI, parsed.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "ok"}]
    answer_with(api, "Fine.")
    assert client.chat.completions.create(model="tiny", messages=turn).choices[0].message.content == "Fine."


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=HI, tools=[WEATHER, WEATHER])  # type: ignore[arg-type, list-item]
    assert error.value.param == "tools"
