"""Function calls and parsed answers from the real model, through OpenAI's own client. The model is small: what it must
call is enforced by grammar, so that it does."""

from __future__ import annotations

import asyncio
import json
from enum import Enum
from typing import Annotated, Any

import openai
import pytest
from pagemill_testing.live_server import CHAT, ServeCommand
from pydantic import BaseModel, ConfigDict, Field

pytestmark = pytest.mark.timeout(300)

MODEL = "SmolLM2-135M-Instruct"
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


class Unit(Enum):
    CELSIUS, FAHRENHEIT = "celsius", "fahrenheit"


class GetWeather(BaseModel):
    """Tells the weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Annotated[str, Field(max_length=20)]
    unit: Unit


class Add(BaseModel):
    """Adds two numbers."""

    model_config = ConfigDict(extra="forbid")

    a: Annotated[int, Field(ge=0, le=999)]
    b: Annotated[int, Field(ge=0, le=999)]


TOOLS: list[Any] = [openai.pydantic_function_tool(GetWeather), openai.pydantic_function_tool(Add)]
MODELS: dict[str, type[BaseModel]] = {"GetWeather": GetWeather, "Add": Add}


def check_calls(calls: list[Any]) -> list[str]:
    """The names of the functions called; their arguments must match."""
    assert calls
    for call in calls:
        MODELS[call.function.name].model_validate_json(call.function.arguments, strict=False)
    return [call.function.name for call in calls]


def test_calls_that_must_be(server: ServeCommand) -> None:
    named = {"type": "function", "function": {"name": "Add"}}

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            create = client.chat.completions.create
            common: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": TOOLS, "temperature": 1.0}
            common |= {"max_tokens": 100}
            answers = await asyncio.gather(
                *(create(**common, tool_choice="required", parallel_tool_calls=False, seed=i) for i in range(3)),
                *(create(**common, tool_choice=named, seed=i, n=2) for i in range(2)),
                create(**(common | {"max_tokens": 12}), tool_choice="required", seed=5),
            )
        for answer in answers[:3]:
            [choice] = answer.choices
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content is None
            assert len(check_calls(choice.message.tool_calls)) == 1
        for answer in answers[3:5]:
            for choice in answer.choices:
                assert choice.finish_reason == "tool_calls"
                assert check_calls(choice.message.tool_calls) == ["Add"]
        assert answers[5].choices[0].finish_reason == "length"

    asyncio.run(run())
    server.until_idle()


def test_a_stream_of_calls_and_the_turns_after_it(server: ServeCommand) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        common: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "temperature": 0, "max_tokens": 100}
        with client.chat.completions.stream(
            messages=ASK, tool_choice="required", parallel_tool_calls=False, **common
        ) as stream:
            kinds = {event.type for event in stream}
            message = stream.get_final_completion().choices[0].message
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        assert message.tool_calls is not None
        [call] = message.tool_calls
        check_calls([call])
        result = {"role": "tool", "tool_call_id": call.id, "content": "It is sunny in Paris, 20 degrees."}
        whole = client.chat.completions.create(
            messages=ASK, tool_choice="required", parallel_tool_calls=False, **common
        )
        assert whole.choices[0].message.tool_calls is not None
        assert whole.choices[0].message.tool_calls[0].function.arguments == call.function.arguments, "streamed or not"
        answer = client.chat.completions.create(messages=[*ASK, message, result], tool_choice="none", **common)
        assert answer.choices[0].message.content
        assert answer.choices[0].finish_reason in ("stop", "length")


def test_parsed_models(server: ServeCommand) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        parsed = client.chat.completions.parse(
            model=MODEL, messages=ASK, response_format=GetWeather, temperature=1.0, seed=1
        )
        assert isinstance(parsed.choices[0].message.parsed, GetWeather)
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(model=MODEL, messages=ASK, response_format=GetWeather, max_tokens=5)
    server.assert_alive()


def test_without_being_made_to_it_may_just_answer(server: ServeCommand) -> None:
    call = server.ask(CHAT, messages=ASK, tools=[json.loads(json.dumps(tool)) for tool in TOOLS], max_tokens=24)
    assert call.finish_reason in ("stop", "length", "tool_calls")
    assert call.text or call.finish_reason == "tool_calls"
