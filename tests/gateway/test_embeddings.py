"""Embeddings over HTTP: the stub's hidden states are (1, the prompt's length)."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest
from pagemill_testing.gateway_server import Stage
from pagemill_testing.prepared_models import byte_level_bpe
from pagemill_testing.prepared_models import byte_level_ids as ids

from pagemill_shared.messages import FinishReason
from pagemill_shared.sampling import Pooling

PATH = "/v1/embeddings"
TOKENIZER = byte_level_bpe()
VOCABULARY = TOKENIZER.get_vocab_size()


def ask(api: Stage, **body: Any) -> dict[str, Any]:
    api.stub.replay([], FinishReason.LENGTH)
    response = api.post(PATH, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("one two", [ids("one two")]),
        (["one", "two three"], [ids("one"), ids("two three")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_texts_and_token_ids_one_or_several(api: Stage, given: Any, wanted: list[list[int]]) -> None:
    answer = ask(api, input=given, model="tiny", user="me")
    assert [submit.prompt_token_ids.tolist() for submit in api.stub.submitted] == wanted
    assert all(submit.sampling.max_tokens == 0 for submit in api.stub.submitted)
    assert [item["index"] for item in answer["data"]] == list(range(len(wanted)))
    total = sum(map(len, wanted))
    assert answer["usage"] == {"prompt_tokens": total, "total_tokens": total}
    for item, prompt in zip(answer["data"], wanted, strict=True):  # the mean of the stub's sum (1, P)
        x, y = 1 / len(prompt), 1.0
        length = (x * x + y * y) ** 0.5
        assert item["embedding"] == pytest.approx([x / length, y / length], rel=1e-6)


def test_base64_holds_the_same_numbers(api: Stage) -> None:
    numbers = ask(api, input="one two", normalize=False, pooling="last")["data"][0]["embedding"]
    assert numbers == [1.0, len(ids("one two"))]
    assert api.stub.submitted[0].sampling.pooling == Pooling.LAST
    packed = ask(api, input="one two", normalize=False, pooling="last", encoding_format="base64")["data"][0][
        "embedding"
    ]
    assert list(struct.unpack("<2f", base64.b64decode(packed))) == numbers


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({}, "input", 400),
        ({"input": ""}, "input", 400),
        ({"input": []}, "input", 400),
        ({"input": ["x", 3]}, "input[1]", 400),
        ({"input": [VOCABULARY]}, "input", 400),
        ({"input": [5] * 2049}, "input", 400),
        ({"input": "x", "dimensions": 64}, "dimensions", 400),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", 400),
        ({"input": "x", "pooling": "cls"}, "pooling", 400),
        ({"input": "x", "stream": True}, "stream", 400),
        ({"input": "x", "model": "other"}, "model", 404),
    ],
)
def test_what_is_not_served_is_refused_by_name(api: Stage, body: dict[str, Any], param: str, status: int) -> None:
    response = api.post(PATH, **body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


def test_null_is_the_default(api: Stage) -> None:
    plain = ask(api, input="one")
    for field in ("encoding_format", "dimensions", "pooling", "normalize", "user", "truncate_prompt_tokens", "model"):
        assert ask(api, **{"input": "one", field: None})["data"] == plain["data"]


def test_inputs_are_cut_where_that_is_asked(api: Stage) -> None:
    ask(api, input=[5] * 3000, truncate_prompt_tokens=-1)
    assert len(api.stub.submitted[0].prompt_token_ids) == 2048


def test_a_lost_scheduler_is_told_of(api: Stage) -> None:
    api.stub.replay([], failure=("no_worker", "none is left", ""))
    response = api.post(PATH, input="x")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_worker"
