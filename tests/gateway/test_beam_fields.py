"""Beam searches over HTTP, on both endpoints."""

from __future__ import annotations

from typing import Any

import pytest
from pagemill_testing.gateway_server import Stage, stage
from pagemill_testing.group_answers import (
    BOTH,
    CHAT,
    END,
    TEXT,
    TOKENIZER,
    ask,
    replay,
    streamed,
    text_of,
    whole,
)
from pagemill_testing.prepared_models import byte_level_ids as ids

from pagemill_shared.messages import FinishReason
from pagemill_shared.sampling import EarlyStopping


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_finished_beams_come_best_first_each_in_one_piece(api: Stage, path: str, stream: bool) -> None:
    outputs = [[*ids("the lazy dog"), END], ids("the fox")]
    replay(api, outputs, finishes=[FinishReason.EOS, FinishReason.LENGTH], scores=[-0.25, -0.5])
    fields = {"use_beam_search": True, "n": 2, "beam_width": 4, "max_tokens": 9, "length_penalty": 0.5}
    if stream:
        texts, endings, order = streamed(api, path, **fields)
        assert len(order) == (6 if path == CHAT else 4)
    else:
        answer = whole(api, path, **fields)
        texts = {choice["index"]: text_of(choice) for choice in answer["choices"]}
        endings = {choice["index"]: choice for choice in answer["choices"]}
        assert answer["usage"]["completion_tokens"] == sum(map(len, outputs))
    assert texts == {0: "the lazy dog", 1: "the fox"}
    assert [(endings[i]["finish_reason"], endings[i]["score"]) for i in range(2)] == [("stop", -0.25), ("length", -0.5)]
    sampling = api.stub.submitted[0].sampling
    assert (sampling.n, sampling.beam_width, sampling.length_penalty) == (2, 4, 0.5)
    assert (sampling.temperature, sampling.early_stopping) == (0.0, EarlyStopping.HEURISTIC)


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({"beam_width": 3}, 3),
        ({"best_of": 3}, 3),
        ({"best_of": 3, "beam_width": 3}, 3),
        ({"n": 2}, 2),
        ({"n": 2, "best_of": 5}, 5),
        ({}, 1),
        ({"beam_width": 1}, 1),
        ({"n": 5, "beam_width": 5, "stream": True}, 5),
        ({"best_of": 4, "stream": True}, 4),
    ],
)
def test_the_width_of_a_beam_search(api: Stage, fields: dict[str, Any], width: int) -> None:
    api.stub.replay(ids("one"), scores=[-1.0] * 5)
    assert api.post(TEXT, **ask(TEXT, use_beam_search=True, **fields)).status_code == 200
    sampling = api.stub.submitted[0].sampling
    assert (sampling.beam_width, sampling.n) == (width, fields.get("n", 1))


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (True, EarlyStopping.WHEN_FULL),
        (False, EarlyStopping.HEURISTIC),
        (None, EarlyStopping.HEURISTIC),
        ("never", EarlyStopping.NEVER),
    ],
)
def test_when_a_beam_search_stops(api: Stage, value: Any, meaning: EarlyStopping) -> None:
    api.stub.replay(ids("one"), scores=[-1.0])
    whole(api, TEXT, use_beam_search=True, best_of=2, early_stopping=value)
    assert api.stub.submitted[0].sampling.early_stopping == meaning


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_finished_beam_is_cut_at_its_first_stop_string(api: Stage, stream: bool, include: bool) -> None:
    outputs = [ids("one ### two ### three"), ids("four five")]
    replay(api, outputs, scores=[-0.5, -1.0])
    fields = {
        "use_beam_search": True, "n": 2, "max_tokens": 30, "stop": ["###"], "early_stopping": True,
        "include_stop_str_in_output": include,
    }  # fmt: skip
    if stream:
        texts, endings, _ = streamed(api, TEXT, **fields)
    else:
        answer = whole(api, TEXT, **fields, logprobs=None)
        texts = {choice["index"]: text_of(choice) for choice in answer["choices"]}
        endings = {choice["index"]: choice for choice in answer["choices"]}
        kept = next(n for n in range(len(outputs[0])) if "###" in TOKENIZER.decode(outputs[0][:n]))
        assert answer["usage"]["completion_tokens"] == kept + len(outputs[1])
    assert texts == {0: "one ###" if include else "one ", 1: "four five"}
    assert (endings[0]["finish_reason"], endings[0]["stop_reason"]) == ("stop", "###")
    assert endings[1]["finish_reason"] == "length"
    api.stub.wait_for(lambda: not api.stub.running)
    assert not api.stub.finished  # the search is over: there is nothing to end
    assert not api.stub.aborted


def test_log_probabilities_of_beams(api: Stage) -> None:
    outputs = [ids("the lazy dog"), ids("the fox")]
    replay(api, outputs, scores=[-0.5, -1.0], logprobs=lambda token: ([token, 70], [-token / 64, -2.0]))
    for choice, tokens in zip(whole(api, TEXT, use_beam_search=True, n=2, logprobs=1)["choices"], outputs, strict=True):
        assert choice["logprobs"]["token_logprobs"] == [-token / 64 for token in tokens]
    assert api.stub.submitted[0].sampling.logprobs == 1


def test_a_score_that_json_cannot_say(api: Stage) -> None:
    api.stub.replay(ids("one"), scores=[float("-inf")])
    assert whole(api, TEXT, use_beam_search=True, best_of=2)["choices"][0]["score"] == -9999.0


def test_what_the_model_suggests_for_samples_is_not_for_beams() -> None:
    suggested = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    with stage({"generation_config": suggested}) as api:
        api.stub.replay(ids("one"), scores=[-1.0])
        whole(api, TEXT, use_beam_search=True, best_of=2, seed=5, temperature=0, top_p=1, top_k=-1, min_p=0)
        whole(api, TEXT, use_beam_search=True, best_of=2)
        for submitted in api.stub.submitted:
            sampling = submitted.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 1.0, 0, 0.0)
            assert sampling.repetition_penalty == 1.1
