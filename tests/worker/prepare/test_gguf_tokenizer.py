from __future__ import annotations

import json
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagemill_testing.tiny_gguf import (
    TRAINING_TEXT,
    UNUSED,
    TinyGguf,
    Vocabulary,
    byte_level_vocabulary,
    sentencepiece_vocabulary,
)
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.gguf_file import GgufFile
from pagemill_worker.prepare.gguf_tokenizer import GgufTokenizer, read_tokenizer
from pagemill_worker.prepare.pre_tokenizers import PRE_TOKENIZERS

SPACE = "▁"
_CHARACTERS = " \n\tabdefhinosuxTB19²٣é´\u0301ß語狐й🙂\u200d'.,;<|>/\u00a0"
TEXTS = st.text(alphabet=st.sampled_from(_CHARACTERS), max_size=60) | st.text(max_size=30)


def read(vocabulary: Vocabulary, **changes: Any) -> GgufTokenizer:
    metadata = {**vocabulary.metadata, **{f"tokenizer.{key.replace('__', '.')}": v for key, v in changes.items()}}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return read_tokenizer(GgufFile(Path("m.gguf"), metadata, {}), 128)


def loaded(vocabulary: Vocabulary, **changes: Any) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(read(vocabulary, **changes).tokenizer))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """The text of each token, as far as it is whole characters."""
    return [tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.encode(text).ids]


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return loaded(byte_level_vocabulary("smollm"))


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    return loaded(sentencepiece_vocabulary(), ggml__add_bos_token=False)


class TestByteLevel:
    @settings(max_examples=300, deadline=None)
    @given(text=TEXTS)
    def test_decoding_gives_back_every_text(self, smollm: Tokenizer, text: str) -> None:
        assert smollm.decode(smollm.encode(text).ids, skip_special_tokens=False) == text

    @settings(max_examples=300, deadline=None)
    @given(text=TEXTS)
    def test_digits_of_every_script_stand_alone(self, smollm: Tokenizer, text: str) -> None:
        encoding = smollm.encode(text)
        for start, end in encoding.offsets:
            span = text[start:end]
            assert len(span) == 1 or not any(unicodedata.category(char).startswith("N") for char in span)

    def test_numbers_are_cut_as_the_pre_tokenizer_says(self) -> None:
        cuts = {
            pre: [text for text, _ in loaded(byte_level_vocabulary(pre)).pre_tokenizer.pre_tokenize_str("it's 12345")]
            for pre in ("smollm", "gpt-2", "llama-bpe", "tekken", "dbrx", "gpt-4o")
        }
        assert cuts == {
            "smollm": ["it", "'s", "Ġ", "1", "2", "3", "4", "5"],
            "gpt-2": ["it", "'s", "Ġ12345"],
            "llama-bpe": ["it", "'s", "Ġ", "123", "45"],
            "tekken": ["it", "'s", "Ġ", "1", "2", "3", "4", "5"],
            "dbrx": ["it", "'s", "Ġ", "123", "45"],
            "gpt-4o": ["it's", "Ġ", "123", "45"],
        }

    @pytest.mark.parametrize("pre", PRE_TOKENIZERS)
    def test_every_pre_tokenizer_keeps_the_text(self, pre: str) -> None:
        tokenizer = loaded(byte_level_vocabulary(pre))
        for text in TRAINING_TEXT:
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text

    def test_added_tokens_are_found_in_the_text(self, smollm: Tokenizer) -> None:
        assert pieces(smollm, "a<|im_start|><tool>b") == ["a", "<|im_start|>", "<tool>", "b"]
        ids = smollm.encode("<|im_end|>x<tool>").ids
        assert smollm.decode(ids, skip_special_tokens=True) == "x<tool>"  # user-defined is not special

    def test_whole_words_win_over_merges_where_the_model_says_so(self) -> None:
        vocabulary = byte_level_vocabulary("llama-bpe")
        tokens = [*vocabulary.metadata["tokenizer.ggml.tokens"], "xyzzy"]
        kinds = [*vocabulary.metadata["tokenizer.ggml.token_type"], 1]
        for pre, count in (("llama-bpe", 1), ("smaug-bpe", 5)):
            tokenizer = loaded(vocabulary, ggml__tokens=tokens, ggml__token_type=kinds, ggml__pre=pre)
            assert len(tokenizer.encode("xyzzy", add_special_tokens=False).ids) == count

    def test_tokens_with_a_role_are_special_whatever_their_mark(self) -> None:
        tokenizer = loaded(byte_level_vocabulary(), ggml__token_type=None)
        ids = tokenizer.encode("a<|im_end|>").ids
        assert ids[-1] == 2
        assert tokenizer.decode(ids) == "a"
        assert 3 not in tokenizer.encode("<tool>").ids

    def test_unused_tokens_have_no_text(self) -> None:
        vocabulary = byte_level_vocabulary()
        size = vocabulary.size
        tokens = [*vocabulary.metadata["tokenizer.ggml.tokens"], "[PAD1]", "[PAD1]"]
        kinds = [*vocabulary.metadata["tokenizer.ggml.token_type"], UNUSED, UNUSED]
        tokenizer = loaded(vocabulary, ggml__tokens=tokens, ggml__token_type=kinds)
        assert tokenizer.get_vocab_size() == size
        assert tokenizer.id_to_token(size) is None

    @pytest.mark.parametrize(
        ("changes", "cause"),
        [
            ({"ggml__model": "bert"}, "kind 'bert'; supported: gpt2, llama"),
            ({"ggml__model": None}, "tokenizer.ggml.model is missing"),
            ({"ggml__pre": None}, "pre-tokenizer 'default'.*old converter"),
            ({"ggml__pre": "chameleon"}, "pre-tokenizer 'chameleon'; supported: gpt-2, "),
            ({"ggml__tokens": ["a", 1]}, "tokens is not a list of str"),
            ({"ggml__tokens": ["a", "b", "b"], "ggml__token_type": [1, 1, 1]}, "the same token twice"),
            ({"ggml__token_type": [1, 1]}, r"\d+ tokens but 2 token types"),
            ({"ggml__merges": ["a b c"]}, "'a b c' merges no two tokens to a third"),
            ({"ggml__merges": ["a \x00"]}, "merges no two tokens to a third"),
            ({"ggml__bos_token_id": -1}, "bos_token_id is -1"),
            ({"chat_templates": ["../../x"]}, r"tokenizer.chat_template.../../x is missing"),
        ],
    )
    def test_damage_is_named(self, changes: dict[str, Any], cause: str) -> None:
        with pytest.raises(ConfigurationError, match=rf"m\.gguf.*{cause}"):
            read(byte_level_vocabulary(), **changes)


def test_an_unused_token_has_no_role() -> None:
    vocabulary = byte_level_vocabulary()
    kinds = [3, 3, UNUSED, *vocabulary.metadata["tokenizer.ggml.token_type"][3:]]
    with pytest.raises(ConfigurationError, match=r"m\.gguf is damaged: its eos token 2 is marked as unused"):
        read(vocabulary, ggml__token_type=kinds)


def best_score_first(vocabulary: Vocabulary, text: str) -> list[str]:
    """SentencePiece's rule, slow and obvious: join the two neighbours whose whole has the highest score, leftmost
    first, until none is a piece."""
    meta = vocabulary.metadata
    rank = dict(zip(meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.scores"], strict=True))
    symbols = list(text.replace(" ", SPACE))
    while True:
        joins = [(-rank[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in rank]
        if not joins:
            return [part for s in symbols for part in ([s] if s in rank else [f"<0x{b:02X}>" for b in s.encode()])]
        at = min(joins)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


class TestSentencePiece:
    @settings(max_examples=300, deadline=None)
    @given(text=TEXTS.filter(lambda text: "<" not in text))
    def test_joins_the_best_piece_first(self, sentencepiece: Tokenizer, text: str) -> None:
        expected = best_score_first(sentencepiece_vocabulary(), " " + text) if text else []
        assert sentencepiece.encode(text).tokens == expected

    @settings(max_examples=300, deadline=None)
    @given(text=TEXTS.filter(lambda text: not any(name in text for name in (SPACE, "<tool>", "<s>", "</s>", "<unk>"))))
    def test_decoding_gives_back_every_text(self, sentencepiece: Tokenizer, text: str) -> None:
        assert sentencepiece.decode(sentencepiece.encode(text).ids) == text

    def test_every_stretch_between_special_tokens_begins_with_a_space(self, sentencepiece: Tokenizer) -> None:
        ids = sentencepiece.encode("fox<s>fox").ids
        assert ids[: len(ids) // 2] == ids[len(ids) // 2 + 1 :]
        without = loaded(sentencepiece_vocabulary(), ggml__add_space_prefix=False, ggml__add_bos_token=False)
        assert without.decode(without.encode("fox").ids) == "fox"
        assert without.encode(" fox").ids == ids[: len(ids) // 2]

    def test_scores_of_another_length_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="tokens but 2 scores"):
            read(sentencepiece_vocabulary(), ggml__scores=[0.0, 1.0])


class TestBeginAndEnd:
    @pytest.mark.parametrize(
        ("vocabulary", "flags", "begins", "ends"),
        [
            (byte_level_vocabulary("smollm"), {"ggml__add_bos_token": None}, False, False),
            (byte_level_vocabulary("smollm"), {"ggml__add_bos_token": True, "ggml__add_eos_token": True}, True, True),
            (byte_level_vocabulary("llama-bpe"), {"ggml__add_bos_token": None}, True, False),
            (byte_level_vocabulary("llama-bpe"), {"ggml__add_bos_token": False}, False, False),
            (sentencepiece_vocabulary(), {}, True, False),
            (sentencepiece_vocabulary(), {"ggml__add_bos_token": False}, False, False),
            (sentencepiece_vocabulary(), {"ggml__bos_token_id": None}, False, False),
        ],
    )
    def test_transformers_and_tokenizers_add_the_same(
        self, tmp_path: Path, vocabulary: Vocabulary, flags: dict[str, Any], begins: bool, ends: bool
    ) -> None:
        read_one = read(vocabulary, **flags)
        plain = Tokenizer.from_str(json.dumps(read_one.tokenizer))
        (tmp_path / "tokenizer.json").write_text(json.dumps(read_one.tokenizer))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(read_one.config))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        auto = AutoTokenizer.from_pretrained(tmp_path)
        bare = plain.encode("the fox", add_special_tokens=False).ids
        expected = [1] * begins + bare + [2] * ends
        assert plain.encode("the fox").ids == expected
        assert auto("the fox").input_ids == expected
        assert auto("the fox", add_special_tokens=False).input_ids == bare
        assert auto.eos_token_id == 2
        assert auto.bos_token_id == (None if "ggml__bos_token_id" in flags else 1)


def test_chat_templates_are_kept_to_the_byte() -> None:
    default, tools = "{% for m in messages %}\r\n{{ m['content'] }}é\n\n{% endfor %}\n", "{{ tools }}"
    found = read(
        byte_level_vocabulary(), chat_template=default, chat_templates=["tool_use"], chat_template__tool_use=tools
    )
    assert found.templates == {"default": default, "tool_use": tools}
    assert read(byte_level_vocabulary()).templates == {}


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=5))
def test_transformers_own_conversion_agrees_on_texts_without_digits(
    converted: tuple[Any, Tokenizer], texts: list[str]
) -> None:
    """It knows no digit rule for this pre-tokenizer, hence without."""
    theirs, ours = converted
    for text in texts:
        plain = "".join(char for char in text if not unicodedata.category(char).startswith("N"))
        assert ours.encode(plain).ids == theirs(plain).input_ids


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    folder = tmp_path_factory.mktemp("converted")
    TinyGguf().write(folder / "tiny.gguf")
    return AutoTokenizer.from_pretrained(folder, gguf_file="tiny.gguf"), loaded(byte_level_vocabulary())


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS.keys() - {"smollm", "starcoder", "refact", "gpt-2", "olmo"}))
def test_words_are_cut_as_in_transformers_own_conversion(pre: str) -> None:
    """It has a table of its own, where it knows the name."""
    splits = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS
    [split] = [step["pattern"]["Regex"] for step in PRE_TOKENIZERS[pre].steps if step["type"] == "Split"]
    assert split == splits[pre]
