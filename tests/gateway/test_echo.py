"""Prompts in answers: echo, log-probabilities of prompts, no tokens at all, prompts that are cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagemill_testing.gateway_server import Stage, stage
from pagemill_testing.prepared_models import add_bos, byte_level_bpe
from pagemill_testing.prepared_models import byte_level_ids as ids

from pagemill_gateway.echo import echo_of
from pagemill_gateway.prompt import Prompt
from pagemill_gateway.tokenizer import TextTokenizer
from pagemill_shared.messages import FinishReason, PromptReport

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
TOKENIZER = byte_level_bpe()
VOCABULARY = TOKENIZER.get_vocab_size()


def ask(api: Stage, **body: Any) -> dict[str, Any]:
    response = api.post(PATH, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(api: Stage, path: str = PATH, **body: Any) -> tuple[str, str]:
    response = api.post(path, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


@pytest.mark.parametrize("logprobs", [None, 0, 1, 3])
@pytest.mark.parametrize("text", ["Your answer: Yes", "\n1. Carl has 20", "日本語 🙂🙂", "<|im_start|>user\nHi"])
def test_echo_without_tokens_is_the_prompt(api: Stage, text: str, logprobs: int | None) -> None:
    """Cases 18 and 20."""
    api.stub.replay([], FinishReason.LENGTH)
    answer = ask(api, prompt=text, echo=True, max_tokens=0, logprobs=logprobs)
    [choice] = answer["choices"]
    assert choice["text"] == text
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    [submit] = api.stub.submitted
    assert (submit.sampling.max_tokens, submit.sampling.prompt_logprobs) == (0, logprobs)
    lists = choice["logprobs"]
    if logprobs is None:
        assert lists is None
        return
    count = len(ids(text))
    assert {len(items) for items in lists.values()} == {count}
    assert "".join(lists["tokens"]) == text
    assert lists["token_logprobs"] == [None, *(-p / 8 for p in range(1, count))]
    assert lists["top_logprobs"][0] is None
    assert all(len(top) in (logprobs, logprobs + 1) for top in lists["top_logprobs"][1:])
    for offset, token in zip(lists["text_offset"], lists["tokens"], strict=True):
        assert text[offset:].startswith(token)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_echo_without_tokens_streams_as_it_reads_whole(api: Stage, logprobs: int | None) -> None:
    """Case 18, streamed."""
    api.stub.replay([], FinishReason.LENGTH)
    body = {"prompt": ["Your answer: Yes", "\n1. Carl has 20"], "echo": True, "max_tokens": 0, "logprobs": logprobs}
    whole = ask(api, **body)["choices"]
    *events, usage = api.events(PATH, **body, stream_options={"include_usage": True})
    assert usage["usage"]["completion_tokens"] == 0
    choices = [event["choices"][0] for event in events]
    for index, choice in enumerate(whole):
        mine = [each for each in choices if each["index"] == index]
        assert "".join(each["text"] for each in mine) == choice["text"] == body["prompt"][index]  # type: ignore[index]
        assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + ["length"]
        for name in choice["logprobs"] or ():
            told = [item for each in mine if each["logprobs"] for item in each["logprobs"][name]]
            assert told == choice["logprobs"][name]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_echo_goes_before_what_is_generated_streamed_or_not(api: Stage, logprobs: int | None, n: int) -> None:
    output = ids(" and then")
    api.stub.replay(output, FinishReason.LENGTH, logprobs=lambda token: ([token, 5, 6], [-0.5, -1.0, -2.0]))
    body = {"prompt": ["First", "Second one"], "echo": True, "max_tokens": 9, "logprobs": logprobs, "n": n}
    whole = ask(api, **body)["choices"]
    texts = ["First and then"] * n + ["Second one and then"] * n
    assert [choice["text"] for choice in whole] == texts
    events = [event["choices"][0] for event in api.events(PATH, **body)]
    for index, choice in enumerate(whole):
        mine = [event for event in events if event["index"] == index]
        assert "".join(event["text"] for event in mine) == choice["text"]
        if logprobs is None:
            continue
        lists = choice["logprobs"]
        assert "".join(lists["tokens"]) == choice["text"]
        assert lists["text_offset"] == sorted(lists["text_offset"])
        assert choice["text"][lists["text_offset"][-1] :] == lists["tokens"][-1]
        for name, items in lists.items():
            assert [item for event in mine if event["logprobs"] for item in event["logprobs"][name]] == items


def test_a_bos_that_the_tokenizer_adds_is_not_echoed() -> None:
    tokenizer = byte_level_bpe()
    add_bos(tokenizer, "<|im_start|>")
    with stage({"tokenizer": tokenizer}) as api:
        api.stub.replay(ids("!"), FinishReason.LENGTH, logprobs=lambda token: ([token], [-0.5]))
        [choice] = ask(api, prompt="Hi there", echo=True, max_tokens=1, logprobs=0)["choices"]
        assert choice["text"] == "Hi there!"
        assert choice["logprobs"]["tokens"][0] == ""
        assert len(choice["logprobs"]["tokens"]) == len(api.stub.submitted[0].prompt_token_ids) + 1


def test_stop_strings_do_not_look_at_the_prompt(api: Stage) -> None:
    api.stub.replay(ids(" one two"), FinishReason.LENGTH)
    [choice] = ask(api, prompt="one two three", echo=True, max_tokens=9, stop=["two"])["choices"]
    assert choice["text"] == "one two three one "


def test_prompt_logprobs_in_vllms_shape(api: Stage) -> None:
    api.stub.replay(ids("!"), FinishReason.LENGTH)
    prompt = ids("The quick brown fox")
    [choice] = ask(api, prompt=prompt, max_tokens=1, prompt_logprobs=2)["choices"]
    told = choice["prompt_logprobs"]
    assert told[0] is None
    assert [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], told[1:], strict=True)] == [
        -p / 8 for p in range(1, len(prompt))
    ]
    assert [entry[str(token)]["rank"] for token, entry in zip(prompt[1:], told[1:], strict=True)] == list(
        range(1, len(prompt))
    )
    assert all({"3", "4"} <= set(entry) for entry in told[1:])
    messages = [{"role": "user", "content": "Hi"}]
    api.stub.replay([], FinishReason.LENGTH)
    answer = api.post(CHAT, messages=messages, prompt_logprobs=0, max_tokens=1).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "n": 2}, "n"),
        ({"max_tokens": 0, "echo": True, "use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"allowed_token_ids": [5], "structured_outputs": {"regex": "a"}}, "allowed_token_ids"),
        ({"bad_words": ["x"], "response_format": {"type": "json_object"}}, "bad_words"),
        ({"allowed_token_ids": [2], "min_tokens": 3, "stop_token_ids": [2]}, "allowed_token_ids"),
        ({"prompt_logprobs": 20, "prompt": [[5] * 2000] * 40}, "prompt_logprobs"),
        ({"prompt": [[5] * 2000] * 6, "echo": True, "logprobs": 20, "stream": True}, "logprobs"),
        ({"bad_words": ["xyz " * 250] * 64}, "bad_words"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(api: Stage, body: dict[str, Any], param: str) -> None:
    assert refused(api, **({"prompt": "x"} | body))[0] == param


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_chat_has_at_least_one_token(api: Stage, field: str) -> None:
    """Case 26."""
    assert refused(api, CHAT, messages=[{"role": "user", "content": "x"}], **{field: 0})[0] == field


@pytest.mark.parametrize(("side", "wanted"), [(None, [7, 8, 9]), ("left", [7, 8, 9]), ("right", [5, 6, 7])])
def test_prompts_are_cut_on_the_side_that_is_said(api: Stage, side: str | None, wanted: list[int]) -> None:
    api.stub.replay(ids("!"), FinishReason.LENGTH)
    ask(api, prompt=[5, 6, 7, 8, 9], max_tokens=1, truncate_prompt_tokens=3, truncation_side=side)
    assert api.stub.submitted[0].prompt_token_ids.tolist() == wanted
    api.post(CHAT, messages=[{"role": "user", "content": "Hi"}], truncate_prompt_tokens=3, max_tokens=1)
    assert len(api.stub.submitted[1].prompt_token_ids) == 3


def test_minus_one_cuts_a_prompt_to_what_fits(api: Stage) -> None:
    api.stub.replay(ids("!"), FinishReason.LENGTH)
    longest = api.client.get("/v1/models").json()["data"][0]["max_model_len"]
    ask(api, prompt=[5] * (longest + 50), max_tokens=7, truncate_prompt_tokens=-1)
    assert len(api.stub.submitted[0].prompt_token_ids) == longest - 7
    assert refused(api, prompt=[5] * (longest + 50), max_tokens=7)[0] == "prompt"


def test_a_prompt_may_fill_the_context_where_nothing_is_generated(api: Stage) -> None:
    api.stub.replay([], FinishReason.LENGTH)
    longest = api.client.get("/v1/models").json()["data"][0]["max_model_len"]
    answer = ask(api, prompt=[5] * longest, max_tokens=0, echo=True)
    assert answer["usage"]["prompt_tokens"] == longest
    assert refused(api, prompt=[5] * (longest + 1), max_tokens=0, echo=True)[0] == "prompt"


def test_token_limits_reach_the_scheduler(api: Stage) -> None:
    api.stub.replay(ids("!"), FinishReason.LENGTH)
    ask(api, prompt="x", allowed_token_ids=[5, 6], bad_words=["fox", " fox"])
    sampling = api.stub.submitted[0].sampling
    assert sampling.allowed_token_ids.tolist() == [5, 6]
    words = [word.tolist() for word in sampling.bad_words]
    assert words == [ids("fox"), ids(" fox"), ids(" fox"), ids("  fox")]


def test_what_is_told_of_a_prompt_survives_a_resync(api: Stage) -> None:
    api.stub.replay(ids("ok"), FinishReason.LENGTH, logprobs=lambda token: ([token], [-0.5]))
    api.stub.lose_next_delivery()
    [choice] = ask(api, prompt="one two three", echo=True, max_tokens=5, logprobs=0)["choices"]
    assert choice["text"] == "one two threeok"
    assert len(choice["logprobs"]["tokens"]) == len(ids("one two three")) + len(ids("ok"))


def test_reports_that_leave_positions_out_are_noticed() -> None:
    prompt = Prompt([5, 6, 7, 8])
    prompt.take(PromptReport(1, 0, 2))
    with pytest.raises(ValueError, match=r"2\.\.3"):
        prompt.take(PromptReport(1, 3, 4))
    with pytest.raises(ValueError, match="0 log-probabilities"):
        prompt.logprobs()
    with pytest.raises(ValueError, match="no hidden state"):
        prompt.pooled(mean=True)


TEXTS = TextTokenizer(byte_level_bpe(), None, None)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30))
def test_the_pieces_of_any_prompt_are_its_text(tokens: list[int]) -> None:
    """Lone bytes, halves of characters and control tokens among them."""
    text = echo_of(TEXTS, Prompt(tokens), None).text
    whole = b"".join(TEXTS.token_bytes(token) for token in tokens).decode("utf-8", "replace")
    assert text == whole
