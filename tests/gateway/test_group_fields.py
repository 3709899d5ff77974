"""Several sequences per prompt over HTTP, on both endpoints: samples, the best of them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagemill_testing.gateway_server import Stage
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
from pagemill_testing.http_calls import Caller
from pagemill_testing.prepared_models import byte_level_ids as ids
from pagemill_testing.program import until
from pagemill_testing.scripts import Script

from pagemill_shared.messages import FinishReason, SubmitRequest
from pagemill_shared.sampling import MAX_SEQUENCES

OUTPUTS = ["one fox", "the lazy dog, and on", "a"]


# ---------------------------------------------------------------- samples


@BOTH
def test_each_sample_is_a_choice(api: Stage, path: str) -> None:
    replay(api, [ids(text) for text in OUTPUTS])
    answer = whole(api, path, n=3)
    assert [(c["index"], text_of(c), c["finish_reason"]) for c in answer["choices"]] == [
        (i, text, "length") for i, text in enumerate(OUTPUTS)
    ]
    assert all("score" not in choice for choice in answer["choices"])
    (submitted,) = api.stub.submitted
    assert (submitted.sampling.n, submitted.sampling.beam_width, submitted.sampling.logprobs) == (3, 0, None)
    assert answer["usage"]["prompt_tokens"] == len(submitted.prompt_token_ids)
    assert answer["usage"]["completion_tokens"] == sum(len(ids(text)) for text in OUTPUTS)


@BOTH
def test_streams_of_samples_are_interleaved(api: Stage, path: str) -> None:
    replay(api, [ids(text) for text in OUTPUTS])
    texts, endings, order = streamed(api, path, n=3)
    assert texts == dict(enumerate(OUTPUTS))
    assert {ending["finish_reason"] for ending in endings.values()} == {"length"}
    first_end = order.index(2)
    assert {0, 1, 2} <= set(order[: first_end + 3])
    if path == CHAT:
        replay(api, [ids(text) for text in OUTPUTS])
        deltas = [event["choices"][0] for event in api.events(path, **ask(path, n=3))]
        roles = [choice["index"] for choice in deltas if "role" in choice["delta"]]
        assert roles == [0, 1, 2]


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.integers(3, TOKENIZER.get_vocab_size() - 1), max_size=12), min_size=1, max_size=5),
    st.integers(1, 4),
    st.booleans(),
)
def test_joined_pieces_of_each_choice_are_its_whole_text(
    api: Stage, outputs: list[list[int]], per_delivery: int, beams: bool
) -> None:
    options = {"scores": [-1.0 - i for i in range(len(outputs))]} if beams else {}
    expected = {i: TOKENIZER.decode(tokens) for i, tokens in enumerate(outputs)}
    fields = {"n": len(outputs), "use_beam_search": beams}
    replay(api, outputs, per_delivery=per_delivery, **options)
    assert streamed(api, TEXT, **fields)[0] == expected
    replay(api, outputs, per_delivery=per_delivery, **options)
    assert {c["index"]: text_of(c) for c in whole(api, TEXT, **fields)["choices"]} == expected


def by_prompt(submit: SubmitRequest) -> Script:
    name = TOKENIZER.decode(submit.prompt_token_ids.tolist())
    count = submit.sampling.n
    scores = [-1.0] * count if submit.sampling.beam_width else []
    return Script(sequences=[ids(f"{name}{i}") for i in range(count)], scores=scores)


@pytest.mark.parametrize("beams", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(api: Stage, stream: bool, beams: bool) -> None:
    api.stub.replay([])
    api.stub.answer, before = by_prompt, api.stub.answer
    try:
        fields = {"prompt": ["A", "B", "C"], "n": 2, "use_beam_search": beams}
        if stream:
            texts = streamed(api, TEXT, **fields)[0]
        else:
            answer = whole(api, TEXT, **fields)
            texts = {choice["index"]: text_of(choice) for choice in answer["choices"]}
            assert list(texts) == list(range(6))
            assert answer["usage"]["prompt_tokens"] == 3
    finally:
        api.stub.answer = before
    assert texts == {0: "A0", 1: "A1", 2: "B0", 3: "B1", 4: "C0", 5: "C1"}


@BOTH
def test_as_many_samples_as_there_may_be(api: Stage, path: str) -> None:
    api.stub.replay(ids("one"))
    assert [c["index"] for c in whole(api, path, n=MAX_SEQUENCES)["choices"]] == list(range(MAX_SEQUENCES))


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_its_sequence_alone(api: Stage, path: str, stream: bool) -> None:
    outputs = [ids("one fox, two"), ids("a dog and on and on"), [*ids("the fo"), END]]
    replay(api, outputs, finishes=[FinishReason.NOT_FINISHED, FinishReason.LENGTH, FinishReason.EOS])
    kept = next(n for n in range(len(outputs[0])) if "fox" in TOKENIZER.decode(outputs[0][:n]))
    if stream:
        texts, endings, _ = streamed(api, path, n=3, stop="fox")
    else:
        answer = whole(api, path, n=3, stop="fox")
        texts = {choice["index"]: text_of(choice) for choice in answer["choices"]}
        endings = {choice["index"]: choice for choice in answer["choices"]}
        assert answer["usage"]["completion_tokens"] == kept + len(outputs[1]) + len(outputs[2])
    assert texts == {0: "one ", 1: "a dog and on and on", 2: "the fo"}
    assert [endings[i]["finish_reason"] for i in range(3)] == ["stop", "length", "stop"]
    assert [endings[i]["stop_reason"] for i in range(3)] == ["fox", None, None]
    handle = api.stub.submitted[0].handle
    api.stub.wait_for(lambda: api.stub.finished)
    assert api.stub.finished == [(handle, 0, kept)]
    assert not api.stub.aborted


def test_a_stop_is_told_again_after_a_lost_message(api: Stage) -> None:
    replay(api, [ids("one fox"), ids("on and on")], finishes=[FinishReason.NOT_FINISHED] * 2)
    with api.client.stream("POST", TEXT, json=ask(TEXT, n=2, stop="fox", stream=True)) as response:
        lines = response.iter_lines()
        while '"stop_reason":"fox"' not in next(lines):
            pass
        api.stub.wait_for(lambda: api.stub.finished)
        first = list(api.stub.finished)
        api.stub.begin_epoch()
        api.stub.wait_for(lambda: len(api.stub.finished) > 1)
        assert api.stub.finished == first * 2
        assert api.stub.running == 1
    api.stub.wait_for(lambda: api.stub.aborted)


@BOTH
def test_log_probabilities_belong_to_their_choice(api: Stage, path: str) -> None:
    outputs = [ids("one fox"), ids("the lazy dog")]
    replay(api, outputs, logprobs=lambda token: ([token, 70], [-token / 64, -2.0]))
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    for choice, tokens in zip(whole(api, path, n=2, **fields)["choices"], outputs, strict=True):
        if path == CHAT:
            values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        else:
            values = choice["logprobs"]["token_logprobs"]
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert values == [-token / 64 for token in tokens]


def test_token_ids_belong_to_their_choice(api: Stage) -> None:
    outputs = [ids("one fox"), ids("the lazy dog")]
    replay(api, outputs)
    assert [c["token_ids"] for c in whole(api, TEXT, n=2, return_token_ids=True)["choices"]] == outputs


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_whole_group(api: Stage, path: str, stream: bool) -> None:
    replay(api, [ids("one"), ids("two")], finishes=[FinishReason.LENGTH, FinishReason.NOT_FINISHED])
    with contextlib.closing(Caller(api.gateway.url)) as caller:
        call = caller.start(path, ask(path, n=2, stream=stream))
        running = api.stub.wait_for(lambda: [r for g in api.stub.gateways.values() for r in g.running.values()])
        api.stub.wait_for(lambda: running[0].all_sent)
        if stream:
            until(lambda: len(call.chunks) >= 2, "both outputs")
        caller.drop(call)
        api.stub.wait_for(lambda: api.stub.aborted)
    assert api.stub.aborted == [api.stub.submitted[0].handle]
    assert not api.stub.running


# ---------------------------------------------------------------- best_of


def likely(token: int) -> tuple[list[int], list[float]]:
    """ " dog" is likelier than others."""
    return [token], [-0.125 if token in ids(" dog") else -1.0]


@BOTH
@pytest.mark.parametrize("logprobs", [False, True])
def test_the_best_samples_come_first(api: Stage, path: str, logprobs: bool) -> None:
    outputs = [ids(" fox fox fox"), ids(" dog dog"), ids(" fox"), ids(" dog")]
    replay(api, outputs, logprobs=likely)
    fields: dict[str, Any] = {"logprobs": True if path == CHAT else 0} if logprobs else {}
    answer = whole(api, path, n=2, best_of=4, **fields)
    scores = [sum(likely(token)[1][0] for token in tokens) for tokens in outputs]
    best = sorted(range(4), key=lambda i: -scores[i])[:2]
    assert [text_of(choice) for choice in answer["choices"]] == [TOKENIZER.decode(outputs[i]) for i in best]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["score"] for choice in answer["choices"]] == [scores[i] for i in best]
    assert all((choice["logprobs"] is not None) == logprobs for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == sum(map(len, outputs))  # those that are not shown, too
    (submitted,) = api.stub.submitted
    assert (submitted.sampling.n, submitted.sampling.logprobs) == (4, 0)


def test_what_follows_a_stop_string_does_not_count_for_the_rank(api: Stage) -> None:
    outputs = [ids(" dog fox fox fox fox"), [*ids(" dog"), *ids(" dog dog dog dog dog dog dog dog dog")]]
    replay(api, outputs, logprobs=likely, per_delivery=100)
    choice = whole(api, TEXT, best_of=2, stop=" fox")["choices"][0]
    kept = next(n for n in range(len(outputs[0])) if " fox" in TOKENIZER.decode(outputs[0][:n]))
    scores = [sum(likely(t)[1][0] for t in outputs[0][:kept]), sum(likely(t)[1][0] for t in outputs[1])]
    assert choice["score"] == max(scores)
    assert choice["text"] == (" dog" if scores[0] > scores[1] else TOKENIZER.decode(outputs[1]))


def test_best_of_several_prompts(api: Stage) -> None:
    replay(api, [ids(" fox"), ids(" dog")], logprobs=likely)
    choices = whole(api, TEXT, prompt=["A", "B"], best_of=2)["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, " dog"), (1, " dog")]


@BOTH
def test_as_many_as_are_sampled_are_not_ranked(api: Stage, path: str) -> None:
    outputs = [ids(" fox"), ids(" dog")]
    replay(api, outputs)
    assert streamed(api, path, n=2, best_of=2)[0] == {0: " fox", 1: " dog"}
    assert api.stub.submitted[0].sampling.logprobs is None


# ---------------------------------------------------------------- priority and cache


@BOTH
def test_priority_and_salt_reach_the_scheduler(api: Stage, path: str) -> None:
    api.stub.replay(ids("one"))
    whole(api, path, priority=-(2**31), cache_salt="mine")
    whole(api, path)
    first, second = api.stub.submitted
    assert (first.priority, first.cache_salt) == (-(2**31), "mine")
    assert (second.priority, second.cache_salt) == (0, "")


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_show_once_for_each_prompt(api: Stage, path: str, stream: bool) -> None:
    api.stub.replay(ids("one"))
    api.stub.cached_tokens = 16
    try:
        if stream:
            usage = api.events(path, **ask(path, n=3, stream_options={"include_usage": True}))[-1]["usage"]
        else:
            usage = whole(api, path, n=3)["usage"]
    finally:
        api.stub.cached_tokens = 0
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    assert usage["completion_tokens"] == 3 * len(ids("one"))
