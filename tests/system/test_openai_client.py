"""The official client against the whole server with the real model: what people write works as they wrote it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from openai.types.chat import ChatCompletionMessageParam
from pagemill_testing.live_server import ServeCommand
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagemill_shared.manifest import prepared_folder

pytestmark = pytest.mark.timeout(300)

MODEL = "SmolLM2-135M-Instruct"
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture
def client(server: ServeCommand) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=20)
    [choice] = answer.choices
    assert choice.message.content == ANSWER
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_is_the_same_text(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_log_probabilities_and_several_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, n=3, seed=5, max_tokens=6, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_completions_with_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", echo=True, logprobs=1, max_tokens=2, temperature=0
    )
    [choice] = answer.choices
    assert choice.text.startswith("The capital of France is Paris")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text


def test_async_requests_side_by_side(server: ServeCommand) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def whole() -> str:
                answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
                return answer.choices[0].message.content or ""

            async def streamed() -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=QUESTION, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(*(work() for work in (whole, streamed) * 4)))

    assert asyncio.run(ask()) == [ANSWER] * 8


def test_raw_responses_and_request_ids(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=QUESTION, max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().choices[0].finish_reason == "length"
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=QUESTION, temperature=0, stream=True
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert list(response.iter_lines())[-2] == "data: [DONE]"


def test_a_stream_that_is_closed_ends_its_request(client: openai.OpenAI, server: ServeCommand) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    server.until_idle()


class City(BaseModel):
    name: str = Field(max_length=20)
    inhabitants: int


def test_answers_are_parsed_into_models(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Name a city and its inhabitants."}],
        response_format=City,
        max_tokens=200,
        temperature=1.0,
        seed=3,
    )
    city = answer.choices[0].message.parsed
    assert isinstance(city, City)


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "no-such-model"}, openai.NotFoundError, "model"),
        ({"temperature": 1000}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "max_tokens"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "temprature"),
        ({"logit_bias": {"49152": 1}}, openai.BadRequestError, "logit_bias"),
        ({"messages": []}, openai.BadRequestError, "messages"),
    ],
)
def test_errors_come_as_the_clients_own(client: openai.OpenAI, fields: Any, kind: type, param: str) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**({"model": MODEL, "messages": QUESTION} | fields))
    assert caught.value.param == param


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="What is the capital of France?", temperature=0)
    assert answer.output_text == ANSWER
    assert answer.status == "completed"
    again = client.responses.create(
        model=MODEL,
        input=[
            {"role": "user", "content": "What is the capital of France?"},
            *answer.output,  # type: ignore[list-item]
            {"role": "user", "content": "And of Italy?"},
        ],
        temperature=0,
        max_output_tokens=3,
        metadata={"a": "b"},
    )
    assert again.status == "incomplete"
    assert again.incomplete_details is not None
    assert again.incomplete_details.reason == "max_output_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", previous_response_id=answer.id)
    assert caught.value.param == "previous_response_id"


def test_streamed_responses(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="What is the capital of France?", temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.output_text == ANSWER
    events = client.responses.create(model=MODEL, input="What is the capital of France?", temperature=0, stream=True)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == ANSWER


def test_embeddings_are_the_models_states(client: openai.OpenAI, cache: Path) -> None:
    folder = prepared_folder(cache, "bundled")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().model
    texts = ["A cat sits on the mat.", "The quick brown fox jumps over the lazy dog. " * 30]  # one and two chunks
    states = []
    for text in texts:
        with torch.inference_mode():
            states.append(model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0])
    for pooling, form in (("mean", "float"), ("last", "base64")):
        answer = client.embeddings.create(
            model=MODEL,
            input=texts,
            encoding_format=form,  # type: ignore[arg-type]
            extra_body={"pooling": pooling},
        )
        for each, item in zip(states, answer.data, strict=True):
            wanted = (each.mean(0) if pooling == "mean" else each[-1]).numpy()
            found: Any = item.embedding
            if isinstance(found, str):
                found = np.frombuffer(base64.b64decode(found), "<f4")
            assert np.linalg.norm(found) == pytest.approx(1.0, abs=1e-5)
            assert float(np.dot(found, wanted / np.linalg.norm(wanted))) > 0.99999
