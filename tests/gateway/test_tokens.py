"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest
from pagemill_testing.gateway_server import Stage, stage
from pagemill_testing.prepared_models import add_bos, byte_level_bpe, sentencepiece_bpe
from transformers import PreTrainedTokenizerFast

from pagemill_gateway.token_bodies import TokenizeChatBody
from pagemill_shared.manifest import prepared_folder

TOKENIZER = byte_level_bpe()
HI = [{"role": "user", "content": "Hi <|im_end|>"}]


def test_a_prompt_there_and_back(api: Stage) -> None:
    text = "The quick 日本語 🙂"
    answer = api.post("/tokenize", model="tiny", prompt=text).json()
    assert answer == {
        "count": len(TOKENIZER.encode(text).ids),
        "max_model_len": 2048,
        "tokens": TOKENIZER.encode(text).ids,
        "token_strs": None,
    }
    assert api.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": text}


def test_token_strings(api: Stage) -> None:
    answer = api.post("/tokenize", prompt="a fox", return_token_strs=True).json()
    assert answer["token_strs"] == TOKENIZER.encode("a fox").tokens


def test_messages_are_what_chat_would_send(api: Stage) -> None:
    tokens = api.post("/tokenize", messages=HI).json()["tokens"]
    api.stub.replay([70])
    assert api.post("/v1/chat/completions", messages=HI).status_code == 200
    assert api.stub.submitted[0].prompt_token_ids.tolist() == tokens
    bare = api.post("/tokenize", messages=HI, add_generation_prompt=False).json()["tokens"]
    assert tokens[: len(bare)] == bare
    assert len(bare) < len(tokens)


def test_usage_agrees_with_tokenize_and_bos_is_one() -> None:
    backend = sentencepiece_bpe()
    add_bos(backend, "<s>")
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    with stage({"tokenizer": backend, "template": template, "bos_token": "<s>"}) as api:
        api.stub.replay([70])
        reference = PreTrainedTokenizerFast.from_pretrained(prepared_folder(api.folder, "bundled"))
        messages = [{"role": "user", "content": "the fox"}]
        expected = reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert expected.count(1) == 1
        assert api.post("/tokenize", messages=messages).json()["tokens"] == expected
        chat = api.post("/v1/chat/completions", messages=messages).json()
        raw = api.post("/v1/completions", prompt="<s>[the fox]").json()
        assert chat["usage"]["prompt_tokens"] == raw["usage"]["prompt_tokens"] == len(expected)
        assert [submit.prompt_token_ids.tolist() for submit in api.stub.submitted] == [expected, expected]
        assert api.post("/tokenize", prompt="the fox").json()["tokens"][0] == 1
        assert 1 not in api.post("/tokenize", prompt="the fox", add_special_tokens=False).json()["tokens"]


@pytest.mark.parametrize("tokens", [None, "x", [10**6], [-1], [True], [1.5], ["a"]])
def test_tokens_that_are_refused(api: Stage, tokens: object) -> None:
    response = api.post("/detokenize", tokens=tokens)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("tokens")


def test_neither_prompt_nor_messages(api: Stage) -> None:
    assert api.post("/tokenize").json()["error"]["param"] == "prompt"
    assert api.post("/tokenize", prompt="x", tools=[{"type": "function"}]).status_code == 400


CHAT_FIELDS = sorted(TokenizeChatBody.model_fields.keys() | TokenizeChatBody.unserved)


def _tokens(api: Stage, **fields: Any) -> Any:
    return api.post("/tokenize", prompt="the fox", **fields).json()["tokens"]


@pytest.mark.parametrize("name", CHAT_FIELDS)
def test_null_beside_a_prompt_is_the_default(api: Stage, name: str) -> None:
    assert _tokens(api, **{name: None}) == _tokens(api)


def test_null_beside_messages_is_the_default(api: Stage) -> None:
    messages = [{"role": "user", "content": "the fox"}]
    expected = api.post("/tokenize", messages=messages).json()
    nothing = dict.fromkeys(["prompt", *CHAT_FIELDS])
    assert api.post("/tokenize", **{**nothing, "messages": messages}).json() == expected
    assert api.post("/tokenize", **nothing).json()["error"]["message"] == "prompt: is missing"
