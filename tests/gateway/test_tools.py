"""Tools over HTTP: what the model is told, what its answers become; and with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pagemill_testing.gateway_server import Stage, stage
from pagemill_testing.prepared_models import byte_level_ids as ids
from pagemill_testing.weather_tools import (
    CALL,
    END,
    HI,
    NOW,
    NOW_CALL,
    PARIS,
    PATH,
    TOKENIZER,
    WEATHER,
    accepts,
    answer_with,
    choice_of,
    joined,
    prompt_of,
)
from pydantic import BaseModel

from pagemill_shared.messages import FinishReason


@pytest.fixture(scope="module")
def client(api: Stage) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.gateway.url}/v1", api_key="x", max_retries=0) as found:
        yield found


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
