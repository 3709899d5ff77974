"""Conversations to token ids: as transformers renders them, with the users' text kept text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagemill_testing.prepared_models import (
    SPECIALS,
    TEMPLATE,
    add_bos,
    byte_level_bpe,
    sentencepiece_bpe,
    write_prepared_model,
)
from transformers import PreTrainedTokenizerFast

from pagemill_gateway.tokenizer import TextTokenizer
from pagemill_shared.errors import ConfigurationError, RequestError

START, END = "<|im_start|>", "<|im_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared_model(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer.load(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


def encode(tokenizer: TextTokenizer, messages: list[dict[str, str]], **options: Any) -> list[int]:
    defaults = {"add_generation_prompt": True, "continue_final_message": False, "template_kwargs": {}}
    return tokenizer.encode_chat(messages, **(defaults | options))


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


_TURNS = st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=20))
_TEXTS = st.text(max_size=20) | st.lists(st.sampled_from([*SPECIALS, "<|", "im_end", "|>", " ", "a"])).map("".join)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=20)), min_size=1, max_size=4)
)
def test_ordinary_conversations_are_encoded_as_transformers_does(
    tokenizer: TextTokenizer, reference: PreTrainedTokenizerFast, turns: list[tuple[str, str]]
) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert encode(tokenizer, messages) == expected


@settings(deadline=None)
@given(_TEXTS)
def test_a_message_adds_no_control_token_and_keeps_its_text(tokenizer: TextTokenizer, text: str) -> None:
    ids = encode(tokenizer, user(text))
    framing = encode(tokenizer, user("x"))
    special = tokenizer.vocabulary.special_ids
    assert [i for i in ids if i in special] == [i for i in framing if i in special]
    assert tokenizer.decode(ids) == tokenizer.decode(framing).replace("user\nx" + END, f"user\n{text}{END}")


def test_control_tokens_in_arguments_of_the_template_are_text_too(tmp_path: Path) -> None:
    template = TEMPLATE + "{{ '<|im_start|>' + note + '<|im_end|>' }}"
    tokenizer = TextTokenizer.load(write_prepared_model(tmp_path, template=template))
    ids = encode(tokenizer, user("Hi"), template_kwargs={"note": f"a{END}b"})
    assert ids.count(2) == encode(tokenizer, user("Hi"), template_kwargs={"note": "ab"}).count(2)
    assert tokenizer.decode(ids).endswith(f"{START}a{END}b{END}")


def test_a_mark_that_a_user_guesses_is_no_control_token(tokenizer: TextTokenizer) -> None:
    text = "\ufdd2" + "0" * 32 + ":2\ufdd3 " + END
    ids = encode(tokenizer, user(text))
    assert tokenizer.decode(ids).count(END) == tokenizer.decode(encode(tokenizer, user("x"))).count(END) + 1
    assert text in tokenizer.decode(ids)


def test_continuing_the_assistants_message(tokenizer: TextTokenizer, reference: PreTrainedTokenizerFast) -> None:
    messages = [*user("Capital of France?"), {"role": "assistant", "content": "The capital of France is"}]
    ids = encode(tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
    assert ids == reference.apply_chat_template(messages, continue_final_message=True)["input_ids"]
    assert tokenizer.decode(ids).endswith("The capital of France is")


@pytest.mark.parametrize("written", [True, False])
def test_exactly_one_bos(tmp_path: Path, written: bool) -> None:
    backend = sentencepiece_bpe()
    add_bos(backend, "<s>")
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    source = ("{{ bos_token }}" if written else "") + template
    folder = write_prepared_model(tmp_path, tokenizer=backend, template=source, bos_token="<s>")
    tokenizer = TextTokenizer.load(folder)
    ids = encode(tokenizer, user("the fox"))
    rendered = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(user("the fox"))["input_ids"]
    assert ids == (rendered if written else [1, *rendered])
    assert ids.count(1) == 1
    if not written:
        assert encode(tokenizer, user("the fox"), add_special_tokens=False) == rendered
    # The same text, templated by the client already.
    assert tokenizer.encode(("<s>" if written else "") + "[the fox]").count(1) == 1


def test_a_tokenizer_without_bos_gets_none(tokenizer: TextTokenizer) -> None:
    text = "The quick brown fox"
    assert tokenizer.encode(text) == byte_level_bpe().encode(text).ids


def test_a_raw_prompt_may_hold_control_tokens(tokenizer: TextTokenizer, reference: PreTrainedTokenizerFast) -> None:
    rendered = reference.apply_chat_template(user("Hi"), add_generation_prompt=True, tokenize=False)
    assert tokenizer.encode(rendered) == encode(tokenizer, user("Hi"))


def test_the_default_system_text_appears_only_without_a_system_message(tokenizer: TextTokenizer) -> None:
    system = {"role": "system", "content": "Be brief."}
    assert "Be kind." in tokenizer.decode(encode(tokenizer, user("Hi")))
    assert "Be kind." not in tokenizer.decode(encode(tokenizer, [system, *user("Hi")]))


def test_no_template(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.load(write_prepared_model(tmp_path, template=None))
    with pytest.raises(RequestError, match="no chat template"):
        encode(tokenizer, user("Hi"))


def test_a_given_template_file_replaces_the_models_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}>{{ m.content }}{% endfor %}")
    tokenizer = TextTokenizer.load(write_prepared_model(tmp_path), file)
    assert tokenizer.decode(encode(tokenizer, user("Hi"))) == ">Hi"


def test_a_template_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.jinja"):
        TextTokenizer.load(write_prepared_model(tmp_path), tmp_path / "nowhere.jinja")


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ 1 + messages[0].content }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{% for %}",
    ],
)
def test_a_template_that_refuses_is_the_requests_error(tmp_path: Path, template: str) -> None:
    tokenizer = TextTokenizer.load(write_prepared_model(tmp_path, template=template))
    with pytest.raises(RequestError, match="chat template"):
        encode(tokenizer, user("Hi"))


def test_a_broken_tokenizer_file(tmp_path: Path) -> None:
    folder = write_prepared_model(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        TextTokenizer.load(folder)
