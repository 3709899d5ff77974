"""Incremental detokenization: joined pieces equal the whole text, no half characters, bounded work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagemill_testing.prepared_models import byte_level_bpe, sentencepiece_bpe, word_pieces
from tokenizers import Tokenizer

from pagemill_gateway.detokenizer import Detokenizer, TableDetokenizer, WindowDetokenizer, new_detokenizer
from pagemill_gateway.vocabulary import Vocabulary, build_vocabulary, byte_level_alphabet

BYTE_LEVEL = cache(byte_level_bpe)
SENTENCEPIECE = cache(sentencepiece_bpe)
WORD_PIECES = cache(word_pieces)


@cache
def vocabulary(make: Callable[[], Tokenizer]) -> Vocabulary:
    return build_vocabulary(make())


def detokenizer(make: Callable[[], Tokenizer], skip_special_tokens: bool = True) -> Detokenizer:
    return new_detokenizer(make(), vocabulary(make), skip_special_tokens=skip_special_tokens)


def byte_token(byte: int) -> int:
    """Id of the token that is this one byte."""
    characters = {value: character for character, value in byte_level_alphabet().items()}
    token: int = BYTE_LEVEL().token_to_id(characters[byte])
    return token


def pieces(detok: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detok.push(i) for i in ids), detok.finish()]


@given(st.lists(st.integers(0, 699), max_size=40), st.booleans())
def test_byte_level_pieces_join_to_the_whole_decode(ids: list[int], skip: bool) -> None:
    ids = [i % BYTE_LEVEL().get_vocab_size() for i in ids]
    joined = "".join(pieces(detokenizer(BYTE_LEVEL, skip), ids))
    assert joined == BYTE_LEVEL().decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=30))
def test_byte_level_text_comes_back_without_half_characters(text: str) -> None:
    ids = BYTE_LEVEL().encode(text, add_special_tokens=False).ids
    parts = pieces(detokenizer(BYTE_LEVEL, skip_special_tokens=False), ids)
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("text", ["🙂🙂🙂🙂🙂🙂🙂🙂", "日本語日本語日本語", "👩‍🚀👩‍🚀👩‍🚀", "naïve Zürich"])
def test_no_piece_ends_within_a_character(text: str) -> None:
    parts = pieces(detokenizer(BYTE_LEVEL), [byte_token(byte) for byte in text.encode()])
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@given(st.lists(st.integers(0, 400), max_size=40))
def test_sentencepiece_pieces_join_to_the_whole_text(ids: list[int]) -> None:
    ids = [i % SENTENCEPIECE().get_vocab_size() for i in ids]
    table = vocabulary(SENTENCEPIECE).token_bytes
    assert table is not None
    special = vocabulary(SENTENCEPIECE).special_ids
    whole = b"".join(table[i] for i in ids if i not in special).decode("utf-8", "replace")
    assert "".join(pieces(detokenizer(SENTENCEPIECE), ids)) == whole


@given(st.text("the fox.,", max_size=30))
def test_sentencepiece_text_equals_the_tokenizers_own_save_for_the_first_blank(text: str) -> None:
    ids = SENTENCEPIECE().encode(text, add_special_tokens=False).ids
    assert "".join(pieces(detokenizer(SENTENCEPIECE), ids)).removeprefix(" ") == SENTENCEPIECE().decode(ids)


def test_the_blank_before_the_first_word_of_a_continuation_stays() -> None:
    fox = SENTENCEPIECE().token_to_id("\u2581fox")
    assert detokenizer(SENTENCEPIECE).push(fox) == " fox"


@given(st.lists(st.integers(0, 9), max_size=40))
def test_the_general_path_joins_to_the_whole_decode(ids: list[int]) -> None:
    assert isinstance(detokenizer(WORD_PIECES), WindowDetokenizer)
    joined = "".join(pieces(detokenizer(WORD_PIECES), ids))
    assert joined == WORD_PIECES().decode(ids)


def test_the_general_path_goes_on_from_the_prompt() -> None:
    prompt = [WORD_PIECES().token_to_id("the")]
    detok = new_detokenizer(WORD_PIECES(), vocabulary(WORD_PIECES), skip_special_tokens=True, prompt=prompt)
    assert [detok.push(WORD_PIECES().token_to_id(word)) for word in ("fox", "jump", "##s")] == [" fox", " jump", "s"]


@settings(deadline=None)
@given(st.lists(st.integers(0, 699), max_size=30))
def test_both_paths_agree(ids: list[int]) -> None:
    ids = [i % BYTE_LEVEL().get_vocab_size() for i in ids]
    window = WindowDetokenizer(BYTE_LEVEL(), vocabulary(BYTE_LEVEL), vocabulary(BYTE_LEVEL).special_ids, ())
    text = "".join(pieces(window, ids))
    if "\ufffd" not in text:  # how broken bytes are counted may depend on the window
        assert text == "".join(pieces(detokenizer(BYTE_LEVEL), ids))


class Calls:
    """Counts the Python and C calls of a block, a measure of work that no clock disturbs."""

    def __enter__(self) -> Calls:
        self.count = 0
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, _frame: object, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            self.count += 1


@pytest.mark.parametrize("byte", [0x80, 0xF0, 0xE3, 0xFF])
@pytest.mark.parametrize("general", [False, True])
def test_a_lone_byte_token_for_ever_costs_bounded_work_and_blocks_nothing(byte: int, general: bool) -> None:
    tokenizer = BYTE_LEVEL()
    lone = byte_token(byte)
    lengths: list[int] = []

    class Counting:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            lengths.append(len(ids))
            return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    detok: Detokenizer = (
        WindowDetokenizer(Counting(), vocabulary(BYTE_LEVEL), vocabulary(BYTE_LEVEL).special_ids, ())  # type: ignore[arg-type]
        if general
        else TableDetokenizer(vocabulary(BYTE_LEVEL), vocabulary(BYTE_LEVEL).special_ids)
    )
    costs, out = [], ""
    for _ in range(4000):
        with Calls() as calls:
            out += detok.push(lone)
        costs.append(calls.count)
    assert max(costs[3900:]) <= max(costs[100:200])
    assert max(lengths, default=0) <= 32
    plain = tokenizer.encode("the plain text", add_special_tokens=False).ids
    assert "".join(map(detok.push, plain)).endswith("the plain text")
    assert len(out) >= 4000 - 16


def test_padding_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert detokenizer(BYTE_LEVEL).push(1_000_000) == ""


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<|im_end|>b")])
def test_control_tokens_show_only_when_asked_for(skip: bool, text: str) -> None:
    ids = [BYTE_LEVEL().token_to_id(token) for token in ("a", "<|im_end|>", "b")]
    assert "".join(pieces(detokenizer(BYTE_LEVEL, skip), ids)) == text
