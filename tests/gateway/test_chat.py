"""Chat completions over HTTP, against scripted tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pagemill_testing.gateway_server import Stage, stage
from pagemill_testing.prepared_models import byte_level_bpe
from pagemill_testing.prepared_models import byte_level_ids as ids
from transformers import PreTrainedTokenizerFast

from pagemill_gateway.chat_body import ChatBody
from pagemill_shared.manifest import prepared_folder
from pagemill_shared.messages import FinishReason

PATH = "/v1/chat/completions"
TOKENIZER = byte_level_bpe()
END = 2
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def chat() -> Iterator[Stage]:
    with stage() as running:
        yield running


@pytest.fixture(scope="module")
def reference(chat: Stage) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(prepared_folder(chat.folder, "bundled"))


def test_an_answer(chat: Stage, reference: PreTrainedTokenizerFast) -> None:
    chat.stub.replay([*ids("The answer is 42."), END], FinishReason.EOS)
    response = chat.post(PATH, model="tiny", messages=HI)
    assert response.status_code == 200
    answer = response.json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "The answer is 42.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt = reference.apply_chat_template(HI, add_generation_prompt=True)["input_ids"]
    assert chat.stub.submitted[0].prompt_token_ids.tolist() == prompt
    generated = len(ids("The answer is 42.")) + 1
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": generated,
        "total_tokens": len(prompt) + generated,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_what_the_prefix_cache_held_shows_in_the_usage(chat: Stage) -> None:
    chat.stub.replay(ids("one"))
    chat.stub.cached_tokens = 16
    try:
        usage = chat.post(PATH, messages=HI, cache_salt="mine").json()["usage"]
    finally:
        chat.stub.cached_tokens = 0
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    assert chat.stub.submitted[0].cache_salt == "mine"


def test_token_ids_come_along_when_asked_for(chat: Stage, reference: PreTrainedTokenizerFast) -> None:
    tokens = [*ids("one two"), END]
    prompt = reference.apply_chat_template(HI, add_generation_prompt=True)["input_ids"]
    chat.stub.replay(tokens, FinishReason.EOS)
    answer = chat.post(PATH, messages=HI, return_token_ids=True).json()
    assert answer["prompt_token_ids"] == prompt
    assert answer["choices"][0]["token_ids"] == tokens
    first, *others = chat.events(PATH, messages=HI, return_token_ids=True, stream_options={"include_usage": True})
    assert first["prompt_token_ids"] == prompt
    choices = [event["choices"][0] for event in others if event["choices"]]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == tokens
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "one two"
    assert others[-1]["usage"]["completion_tokens"] == len(tokens)


def test_a_stream_has_role_then_content_then_the_finish_reason(chat: Stage) -> None:
    chat.stub.replay([*ids("one two"), END], FinishReason.EOS)
    events = chat.events(PATH, messages=HI)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "one two"
    assert all("role" not in delta for delta in deltas[1:])
    assert deltas[-1] == {}
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["stop"]
    for name in ("id", "created", "model", "object"):
        assert len({event[name] for event in events}) == 1
    assert {event["choices"][0]["index"] for event in events} == {0}
    assert events[0]["object"] == "chat.completion.chunk"


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {}}, False),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": None}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
)
def test_usage_comes_only_when_asked_for(chat: Stage, options: dict[str, Any], shown: bool) -> None:
    chat.stub.replay(ids("one two"))
    events = chat.events(PATH, messages=HI, **options)
    with_usage = [event for event in events if event.get("usage")]
    if not shown:
        assert not with_usage
        assert all("usage" not in event for event in events)
        return
    assert with_usage == [events[-1]]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == len(ids("one two"))
    assert all(event["usage"] is None for event in events[:-1])


def test_stream_options_without_a_stream(chat: Stage) -> None:
    response = chat.post(PATH, messages=HI, stream_options={"include_usage": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 50, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 50}, 50),
    ],
)
def test_the_newer_name_of_the_limit_wins(chat: Stage, limits: dict[str, int], expected: int) -> None:
    chat.stub.replay(ids("one"))
    assert chat.post(PATH, messages=HI, **limits).json()["choices"][0]["finish_reason"] == "length"
    assert chat.stub.submitted[0].sampling.max_tokens == expected


def test_without_a_limit_the_answer_may_fill_the_context(chat: Stage) -> None:
    chat.stub.replay(ids("one"))
    chat.post(PATH, messages=HI)
    submitted = chat.stub.submitted[0]
    assert submitted.sampling.max_tokens == 2048 - len(submitted.prompt_token_ids)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_of_zero_is_refused(chat: Stage, name: str) -> None:
    response = chat.post(PATH, messages=HI, **{name: 0})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


def test_null_means_left_out(chat: Stage) -> None:
    """Case 21: for every field that there is, the answer and what the scheduler gets are those without it."""
    base = {"messages": HI, "seed": 1}
    fields = {*ChatBody.model_fields, *ChatBody.unserved, *ChatBody.ignored} - {"messages"}
    found = []
    for body in [base, *(base | {name: None} for name in sorted(fields - {"seed"}))]:
        chat.stub.replay(ids("one two"))
        answer = chat.post(PATH, **body).json()
        [submit] = chat.stub.submitted
        found.append((answer["choices"], answer["usage"], submit.prompt_token_ids.tolist(), submit.sampling))
    assert len(found) > 60
    assert all(each == found[0] for each in found)
    chat.stub.replay(ids("one two"))
    assert chat.post(PATH, messages=HI, seed=None).json()["choices"] == found[0][0]


def test_content_as_parts_is_one_text(chat: Stage) -> None:
    prompts = []
    for content in ("Alpha Beta", [{"type": "text", "text": "Alpha "}, {"type": "text", "text": "Beta"}]):
        chat.stub.replay(ids("one"))
        assert chat.post(PATH, messages=[{"role": "user", "content": content}]).status_code == 200
        prompts.append(chat.stub.submitted[0].prompt_token_ids.tolist())
    assert prompts[0] == prompts[1]


CALLED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([*HI, {"role": "user", "content": 5}], "messages[1].content"),
        (["x"], "messages[0]"),
        ("x", "messages"),
        (None, "messages"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "user", "content": "x", "tool_calls": [CALLED]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].content"),
    ],
)
def test_messages_that_are_refused(chat: Stage, messages: Any, param: str) -> None:
    response = chat.post(PATH, messages=messages)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "roles",
    [["user", "system", "user"], ["system", "system", "user"], ["assistant"], ["user", "tool"], ["developer", "user"]],
)
def test_any_order_of_roles_is_answered_as_the_template_renders_it(
    chat: Stage, reference: PreTrainedTokenizerFast, roles: list[str]
) -> None:
    chat.stub.replay(ids("one"))
    call = {"tool": {"tool_call_id": "call_1"}}
    response = chat.post(
        PATH, messages=[{"role": role, "content": f"I am {role}", **call.get(role, {})} for role in roles]
    )
    assert response.status_code == 200
    rendered = [{"role": role.replace("developer", "system"), "content": f"I am {role}"} for role in roles]
    expected = reference.apply_chat_template(rendered, add_generation_prompt=True)["input_ids"]
    assert chat.stub.submitted[0].prompt_token_ids.tolist() == expected


def test_going_on_from_an_assistants_message(chat: Stage) -> None:
    messages = [*HI, {"role": "assistant", "content": "The capital of France is"}]
    for options in ({"add_generation_prompt": False}, {}):
        chat.stub.replay(ids(" Paris"))
        answer = chat.post(PATH, messages=messages, continue_final_message=True, **options).json()
        assert answer["choices"][0]["message"]["content"] == " Paris"
        prompt = TOKENIZER.decode(chat.stub.submitted[0].prompt_token_ids.tolist(), skip_special_tokens=False)
        assert prompt.endswith("The capital of France is")
    response = chat.post(PATH, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert response.status_code == 400


def logprobs_of(token: int) -> tuple[list[int], list[float]]:
    return [token, token, 70], [-0.5, -0.5, float("-inf")]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(chat: Stage, stream: bool) -> None:
    tokens = [*ids("a 🙂"), END]
    chat.stub.replay(tokens, FinishReason.EOS, logprobs=logprobs_of)
    if stream:
        events = chat.events(PATH, messages=HI, logprobs=True, top_logprobs=2)
        choices = [event["choices"][0] for event in events]
        content = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    else:
        content = chat.post(PATH, messages=HI, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"][
            "content"
        ]
    assert chat.stub.submitted[0].sampling.logprobs == 2
    assert len(content) == len(tokens)
    assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]).decode() == "a 🙂"
    assert content[-1]["token"] == "<|im_end|>"
    assert content[0]["logprob"] == -0.5
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -9999.0]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
def test_logprobs_that_are_refused(chat: Stage, options: dict[str, Any], param: str) -> None:
    response = chat.post(PATH, messages=HI, **options)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_model_without_a_template_says_so() -> None:
    with stage({"template": None}) as running:
        response = running.post(PATH, messages=HI)
        assert response.status_code == 400
        assert "no chat template" in response.json()["error"]["message"]
        running.stub.replay(ids("one"))
        assert running.post("/v1/completions", prompt="Hi").status_code == 200


def test_a_template_file_is_used(tmp_path: Any) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}>{{ m.content }}{% endfor %}")
    with stage({"template": None}, chat_template=file) as running:
        running.stub.replay(ids("one"))
        assert running.post(PATH, messages=HI).status_code == 200
        assert TOKENIZER.decode(running.stub.submitted[0].prompt_token_ids.tolist()) == ">Hi"


SHOUTING = "{% for message in messages %}{{ message.content | upper }}|{% endfor %}{{ word }}"


def test_a_requests_own_template_is_used_where_it_is_trusted() -> None:
    with stage(trust_request_chat_template=True) as running:
        body = {"messages": [{"role": "user", "content": "fox"}], "chat_template_kwargs": {"word": "end"}}
        found = running.post("/tokenize", **body, chat_template=SHOUTING).json()["tokens"]
        assert TOKENIZER.decode(found, skip_special_tokens=False) == "FOX|end"
        running.stub.replay(TOKENIZER.encode("!").ids)
        assert running.post(PATH, **body, chat_template=SHOUTING, max_tokens=1).status_code == 200
        assert running.stub.submitted[0].prompt_token_ids.tolist() == found
        for source in ("{% for", "{{ ''.__class__.__mro__ }}", "{{ raise_exception('no') }}"):
            response = running.post(PATH, **body, chat_template=source)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == "chat_template"


def test_a_requests_own_template_is_refused_where_it_is_not_trusted(chat: Stage) -> None:
    for path in (PATH, "/tokenize"):
        response = chat.post(path, messages=[{"role": "user", "content": "fox"}], chat_template=SHOUTING)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "chat_template"
