"""Text completions over HTTP, against scripted tokens: prompts, stop strings, limits, refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagemill_testing.gateway_server import FLEET, Stage, stage
from pagemill_testing.prepared_models import byte_level_bpe
from pagemill_testing.prepared_models import byte_level_ids as ids
from pagemill_testing.sockets import wait_until

from pagemill_shared.messages import FinishReason, FleetStatus

PATH = "/v1/completions"
TOKENIZER = byte_level_bpe()
VOCABULARY = TOKENIZER.get_vocab_size()
END = 2
TEXT = "The quick brown fox jumps over the lazy dog, and on it flows."


@pytest.fixture(scope="module")
def api() -> Iterator[Stage]:
    with stage({"eos_token_ids": [0, 2]}) as running:
        yield running


def streamed(api: Stage, **body: Any) -> tuple[str, str]:
    """Text and finish reason of a stream with one choice."""
    choices = [event["choices"][0] for event in api.events(PATH, **body)]
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def whole(api: Stage, **body: Any) -> tuple[str, str]:
    response = api.post(PATH, **body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["text"], choice["finish_reason"]


def error(api: Stage, **body: Any) -> dict[str, Any]:
    response = api.post(PATH, **body)
    assert response.status_code == 400, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return body


@pytest.mark.parametrize(
    "text", [TEXT, " leading blank", "🙂🙂🙂🙂🙂🙂🙂🙂", "日本語日本語日本語", "👩‍🚀👩‍🚀👩‍🚀", "\n\n\t x"]
)
@pytest.mark.parametrize("per_delivery", [1, 8])
def test_joined_pieces_equal_the_whole_answer(api: Stage, text: str, per_delivery: int) -> None:
    api.stub.replay(ids(text), per_delivery=per_delivery)
    events = api.events(PATH, prompt="x")
    pieces = [event["choices"][0]["text"] for event in events]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[0][0] == text[0]
    assert whole(api, prompt="x") == (text, "length")


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=30), st.integers(1, 5))
def test_any_tokens_stream_as_they_read_whole(api: Stage, tokens: list[int], per_delivery: int) -> None:
    api.stub.replay(tokens, per_delivery=per_delivery)
    expected = TOKENIZER.decode(tokens)
    assert streamed(api, prompt="x")[0] == expected
    assert whole(api, prompt="x")[0] == expected


@pytest.mark.parametrize(
    ("options", "shown"),
    [({}, False), (None, False), ({"include_usage": False}, False), ({"include_usage": None}, False),
     ({"include_usage": True}, True)],
)  # fmt: skip
def test_usage_comes_only_when_asked_for(api: Stage, options: Any, shown: bool) -> None:
    """Case 10."""
    api.stub.replay(ids("one two"))
    events = api.events(PATH, prompt="x", stream_options=options)
    assert [bool(event.get("usage")) for event in events] == [False] * (len(events) - 1) + [shown]
    for name in ("id", "created", "model", "object"):
        assert len({event[name] for event in events}) == 1
    if options is not None:
        for body in ({"stream": False}, {"stream": None}, {}):
            assert error(api, prompt="x", stream_options=options, **body)["param"] == "stream_options"


def stop_across_tokens() -> tuple[list[int], str]:
    """Tokens of TEXT, and six characters of it that straddle three tokens."""
    tokens = ids(TEXT)
    for first in range(5, len(tokens)):
        start = len(TOKENIZER.decode(tokens[:first]))
        middle, third = (len(TOKENIZER.decode(tokens[: first + n])) for n in (1, 2))
        stop = TEXT[start - 1 : start + 5]
        if middle < start + 5 <= third and TEXT.index(stop) == start - 1:
            return tokens, stop
    raise AssertionError("no such place in the text")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("per_delivery", [1, 3, 100])
def test_a_stop_string_ends_the_text(api: Stage, include: bool, per_delivery: int) -> None:
    tokens, stop = stop_across_tokens()
    end = TEXT.index(stop) + (len(stop) if include else 0)
    kept = next(n for n in range(len(tokens)) if stop in TOKENIZER.decode(tokens[:n]))
    body = {"prompt": "x", "stop": [stop], "include_stop_str_in_output": include}

    api.stub.replay(tokens, FinishReason.NOT_FINISHED, per_delivery=per_delivery)
    events = api.events(PATH, **body)
    pieces = [event["choices"][0]["text"] for event in events]
    assert "".join(pieces) == TEXT[:end]
    seen = ""
    for piece in pieces[:-2]:
        seen += piece
        assert include or not any(seen.endswith(stop[:n]) for n in range(1, len(stop)))
    assert events[-1]["choices"][0] | {"text": ""} == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": stop,
    }
    handle = api.stub.submitted[0].handle
    api.stub.wait_for(lambda: api.stub.finished)
    assert api.stub.finished == [(handle, 0, kept)]

    api.stub.replay(tokens, FinishReason.NOT_FINISHED, per_delivery=per_delivery)
    answer = api.post(PATH, **body).json()
    assert answer["choices"][0]["text"] == TEXT[:end]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == kept


def test_a_stop_string_beats_the_length(api: Stage) -> None:
    tokens = ids("one fox")
    api.stub.replay(tokens, FinishReason.LENGTH)
    assert whole(api, prompt="x", stop="fox", max_tokens=len(tokens)) == ("one ", "stop")


def test_a_head_of_a_stop_string_at_the_end_is_given_out(api: Stage) -> None:
    api.stub.replay([*ids("the lazy do"), END], FinishReason.EOS)
    assert streamed(api, prompt="x", stop="dog") == ("the lazy do", "stop")


def test_min_tokens_holds_stop_strings_back(api: Stage) -> None:
    tokens = ids("a fox, a fox")
    first = next(n for n in range(len(tokens)) if "fox" in TOKENIZER.decode(tokens[:n]))
    api.stub.replay(tokens, FinishReason.NOT_FINISHED)
    assert whole(api, prompt="x", stop="fox", min_tokens=first + 1) == ("a fox, a ", "stop")
    api.stub.replay(tokens, FinishReason.NOT_FINISHED)
    assert whole(api, prompt="x", stop="fox", min_tokens=first) == ("a ", "stop")


@pytest.mark.parametrize("stop", ["", [""], ["", "zz"], [1], 5, {"a": 1}, ["x"] * 65, "x" * 1025])
def test_stop_strings_that_are_refused(api: Stage, stop: Any) -> None:
    assert error(api, prompt="x", stop=stop)["param"].startswith("stop")


@pytest.mark.parametrize("end", [0, 2])
def test_every_end_token_is_sent_and_hidden(api: Stage, end: int) -> None:
    api.stub.replay([*ids("one"), end], FinishReason.EOS)
    assert whole(api, prompt="x", skip_special_tokens=False) == ("one", "stop")
    assert api.stub.submitted[0].sampling.eos_token_ids.tolist() == [0, 2]


def test_an_ignored_end_token_is_a_token_like_others(api: Stage) -> None:
    api.stub.replay([*ids("one"), END, *ids("two")])
    assert whole(api, prompt="x", skip_special_tokens=False, ignore_eos=True) == ("one<|im_end|>two", "length")
    assert api.stub.submitted[0].sampling.ignore_eos


@pytest.mark.parametrize(("include", "text"), [(False, "one"), (True, "one fox")])
def test_a_stop_token(api: Stage, include: bool, text: str) -> None:
    fox = ids(" fox")
    assert len(fox) >= 1
    api.stub.replay([*ids("one"), *fox], FinishReason.STOP_TOKEN)
    response = api.post(PATH, prompt="x", stop_token_ids=[fox[-1]], include_stop_str_in_output=include).json()
    shown = text if len(fox) == 1 or include else "one" + TOKENIZER.decode(fox[:-1])
    choice = response["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (shown, "stop", fox[-1])
    assert api.stub.submitted[0].sampling.stop_token_ids.tolist() == [fox[-1]]


def test_several_prompts_are_choices_of_one_answer(api: Stage) -> None:
    api.stub.replay(ids("one two"))
    for prompt in (["a", "b", "c"], [ids("a"), ids("b"), ids("c")]):
        answer = api.post(PATH, prompt=prompt).json()
        assert [(c["index"], c["text"]) for c in answer["choices"]] == [(i, "one two") for i in range(3)]
        assert answer["usage"]["completion_tokens"] == 3 * len(ids("one two"))
        events = api.events(PATH, prompt=prompt)
        texts = ["", "", ""]
        for event in events:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == ["one two"] * 3


@pytest.mark.parametrize("prompt", ["Hi there", [5, 6, 7], [[5, 6, 7]]])
def test_prompts_reach_the_scheduler_as_ids(api: Stage, prompt: Any) -> None:
    api.stub.replay(ids("one"))
    whole(api, prompt=prompt)
    expected = ids(prompt) if isinstance(prompt, str) else [5, 6, 7]
    assert api.stub.submitted[0].prompt_token_ids.tolist() == expected


@pytest.mark.parametrize(
    "prompt",
    [
        None, "", [], [""], ["a", ""], [[]], [1, 2, VOCABULARY], [-1], [5279552648203111001], [2**70], [1.5], [True],
        ["a", 3], [[1, 2], "x"], [[1, 2], [VOCABULARY]], [[[1]]], 5, {"a": 1}, ["a"] * 257,
    ],
)  # fmt: skip
def test_prompts_that_are_refused(api: Stage, prompt: Any) -> None:
    assert error(api, prompt=prompt)["param"].startswith("prompt")
    api.stub.replay(ids("one"))
    assert whole(api, prompt="still alive") == ("one", "length")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2**40), ("max_tokens", "5"), ("max_tokens", 1.5),
        ("max_tokens", True), ("min_tokens", -1), ("temperature", -0.1), ("temperature", 1e9), ("temperature", "hot"),
        ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("min_p", 1.5), ("repetition_penalty", 0),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("seed", 2**63), ("seed", 1.5),
        ("logprobs", 100000), ("logprobs", -1), ("logprobs", True), ("n", 0), ("n", 129), ("echo", "yes"),
        ("suffix", "end"), ("stream", "yes"), ("stop_token_ids", [VOCABULARY]),
        ("stop_token_ids", [-1]), ("stop_token_ids", 5), ("logit_bias", {str(VOCABULARY): 1}),
        ("logit_bias", {"-1": 1}), ("logit_bias", {"abc": 1}), ("logit_bias", {"²": 1}), ("logit_bias", [1]),
        ("cache_salt", ""), ("cache_salt", 5), ("priority", "high"),
        ("prompt_logprobs", 21), ("prompt_logprobs", -1), ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2),
        ("truncation_side", "middle"), ("allowed_token_ids", []), ("allowed_token_ids", [VOCABULARY]),
        ("bad_words", [""]), ("bad_words", "x"),

    ],
)  # fmt: skip
def test_values_that_are_refused_by_name(api: Stage, name: str, value: Any) -> None:
    assert error(api, prompt="x", **{name: value})["param"].partition("[")[0] == name


@pytest.mark.parametrize("bias", [{"5": 1000}, {"5": None}, {"5": "x"}])
def test_a_bias_that_is_refused(api: Stage, bias: dict[str, Any]) -> None:
    assert error(api, prompt="x", logit_bias=bias)["param"].startswith("logit_bias")


@pytest.mark.parametrize("value", [5, None])
def test_an_unknown_field_is_refused_by_name(api: Stage, value: int | None) -> None:
    refusal = error(api, prompt="x", max_token=value)
    assert refusal["param"] == "max_token"
    assert "max_token" in refusal["message"]


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens", "temperature", "top_p", "n", "stop", "seed", "logprobs", "logit_bias", "stream", "user",
        "echo", "suffix", "best_of", "stream_options", "model", "top_k", "min_p", "stop_token_ids", "min_tokens",
        "ignore_eos", "response_format", "presence_penalty", "priority", "request_id", "cache_salt",
    ],
)  # fmt: skip
def test_null_means_left_out(api: Stage, name: str) -> None:
    submissions = []
    for body in ({}, {name: None}):
        api.stub.replay(ids("one two"))
        assert whole(api, prompt="x", seed=1, **body if name != "seed" else {}) == ("one two", "length")
        submissions.append(api.stub.submitted[0].sampling)
    assert submissions[0] == submissions[1]


def test_values_that_change_nothing_are_accepted(api: Stage) -> None:
    api.stub.replay(ids("one"))
    neutral = {"n": 1, "best_of": 1, "echo": False, "suffix": "", "use_beam_search": False, "user": "me"}
    assert whole(api, prompt="x", response_format={"type": "text"}, metadata={"a": "b"}, **neutral) == ("one", "length")


def test_sampling_parameters_arrive(api: Stage) -> None:
    api.stub.replay(ids("one"))
    options = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "seed": 42, "max_tokens": 9, "min_tokens": 3,
    }  # fmt: skip
    whole(api, prompt="x", logit_bias={"5": -100, "6": 2.5}, priority=-3, logprobs=None, **options)
    submitted = api.stub.submitted[0]
    for name, value in options.items():
        assert getattr(submitted.sampling, name) == value
    assert submitted.sampling.logit_bias_ids.tolist() == [5, 6]
    assert submitted.sampling.logit_bias_values.tolist() == [-100, 2.5]
    assert submitted.priority == -3


def test_a_seed_is_drawn_when_none_is_given(api: Stage) -> None:
    seeds = set()
    for _ in range(4):
        api.stub.replay(ids("one"))
        whole(api, prompt="x")
        seeds.add(api.stub.submitted[0].sampling.seed)
    assert len(seeds) == 4


def test_a_prompt_that_leaves_no_room(api: Stage) -> None:
    for limits in ({}, {"max_tokens": 1}):
        refusal = error(api, prompt=[5] * 2048, **limits)
        assert (refusal["param"], refusal["code"]) == ("prompt", "context_length_exceeded")
        assert "2048" in refusal["message"]
    refusal = error(api, prompt=[5] * 2000, max_tokens=49)
    assert (refusal["param"], refusal["code"]) == ("max_tokens", "context_length_exceeded")
    assert all(number in refusal["message"] for number in ("2048", "2049", "2000", "49"))
    api.stub.replay(ids("one"))
    whole(api, prompt=[5] * 2040)  # the default limit is cut to what fits
    assert api.stub.submitted[0].sampling.max_tokens == 8


@pytest.mark.parametrize(("pool_tokens", "flag"), [(1024, "--num-kv-blocks"), (4096, "--max-model-len")])
def test_the_context_length_says_what_limits_it(pool_tokens: int, flag: str) -> None:
    with stage() as api:
        own = error(api, prompt=[5] * 2048)["message"]
        assert own.startswith("This model's maximum context length is 2048 tokens, but the prompt has 2048 tokens")
        assert "--" not in own
        api.stub.set_fleet(FleetStatus(1, 1024, FLEET.vocab_size, FLEET.fingerprint, pool_tokens))
        wait_until(lambda: api.client.get("/v1/models").json()["data"][0]["max_model_len"] == 1024)
        for body in ({"prompt": [5] * 1500}, {"prompt": [5] * 1000, "max_tokens": 500}):
            refusal = error(api, **body)
            assert refusal["code"] == "context_length_exceeded"
            assert refusal["message"].startswith("This model's maximum context length is 1024 tokens, but ")
            assert "the model itself takes 2048" in refusal["message"]
            assert re.findall(r"--[a-z-]+", refusal["message"])[0] == flag


@pytest.mark.usefixtures("late_head")
def test_a_refusal_of_the_scheduler_is_an_http_error_even_for_a_stream(api: Stage) -> None:
    for stream in (False, True):
        api.stub.replay([], failure=("context_length_exceeded", "too long: 5 of 4", "prompt"))
        refusal = error(api, prompt="x", stream=stream)
        assert refusal["code"] == "context_length_exceeded"
        assert refusal["param"] == "prompt"
        assert refusal["message"] == "too long: 5 of 4"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_line_up_with_the_text(api: Stage, stream: bool) -> None:
    tokens = ids("a 🙂 fox, a dog")
    api.stub.replay(tokens, logprobs=lambda token: ([token, 70, 71], [-0.5, -0.25, -2.0]))
    if stream:
        choices = [event["choices"][0] for event in api.events(PATH, prompt="x", logprobs=2)]
        parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        logprobs = {name: [item for part in parts for item in part[name]] for name in parts[0]}
        text = "".join(choice["text"] for choice in choices)
    else:
        choice = api.post(PATH, prompt="x", logprobs=2).json()["choices"][0]
        logprobs, text = choice["logprobs"], choice["text"]
    assert {len(items) for items in logprobs.values()} == {len(tokens)}
    assert "".join(logprobs["tokens"]) == text == "a 🙂 fox, a dog"
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert text[offset:].startswith(token)
    assert set(logprobs["token_logprobs"]) == {-0.5}
    assert all(len(top) == 3 for top in logprobs["top_logprobs"])


@pytest.mark.parametrize("include", [False, True])
def test_logprobs_are_cut_at_the_kept_token(api: Stage, include: bool) -> None:
    tokens, stop = stop_across_tokens()
    kept = next(n for n in range(len(tokens)) if stop in TOKENIZER.decode(tokens[:n]))
    api.stub.replay(tokens, FinishReason.NOT_FINISHED, logprobs=lambda t: ([t], [-0.5]), per_delivery=100)
    body = {"prompt": "x", "logprobs": 0, "stop": stop, "include_stop_str_in_output": include}
    answer = api.post(PATH, **body).json()
    choice = answer["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == kept == answer["usage"]["completion_tokens"]
    assert "".join(choice["logprobs"]["tokens"]).startswith(choice["text"])


def test_missing_logprobs_are_an_error_and_not_silence(api: Stage) -> None:
    api.stub.replay(ids("one"))
    response = api.post(PATH, prompt="x", logprobs=1)
    assert response.status_code == 500
    assert "log-probabilities" in response.json()["error"]["message"]


def test_a_negative_seed_is_a_seed(api: Stage) -> None:
    api.stub.replay(ids("one"))
    whole(api, prompt="x", seed=-1)
    assert api.stub.submitted[0].sampling.seed == 2**63 - 1


@pytest.mark.parametrize("text", [TEXT, "🙂日本"])
@pytest.mark.parametrize("finish", [FinishReason.EOS, FinishReason.LENGTH])
def test_token_ids_come_along_when_asked_for(api: Stage, text: str, finish: FinishReason) -> None:
    tokens = [*ids(text), END] if finish is FinishReason.EOS else ids(text)
    api.stub.replay(tokens, finish)
    prompt = ids("The quick")
    choice = api.post(PATH, prompt="The quick", return_token_ids=True).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"], choice["text"]) == (prompt, tokens, text)
    events = [event["choices"][0] for event in api.events(PATH, prompt="The quick", return_token_ids=True)]
    assert events[0]["prompt_token_ids"] == prompt
    assert [token for event in events for token in event.get("token_ids", [])] == tokens
    assert "".join(event["text"] for event in events) == text
    assert all("token_ids" in event for event in events[1:-1])
    plain = api.events(PATH, prompt="The quick", return_token_ids=False)
    assert not any({"token_ids", "prompt_token_ids"} & event["choices"][0].keys() for event in plain)


def test_token_ids_go_up_to_the_token_that_completed_the_stop_string(api: Stage) -> None:
    api.stub.replay(ids(TEXT))
    choice = api.post(PATH, prompt="x", stop="fox", return_token_ids=True).json()["choices"][0]
    kept = TOKENIZER.decode(choice["token_ids"])
    assert choice["token_ids"] == ids(TEXT)[: len(choice["token_ids"])]
    assert "fox" in kept
    assert "fox" not in TOKENIZER.decode(choice["token_ids"][:-1])
