"""Grammars are compiled beside the step path, for every tokenizer that can be; the others are refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from pagemill_testing.prepared_models import byte_level_bpe, sentencepiece_bpe, word_pieces
from tokenizers import Tokenizer

from pagemill_worker import grammar_compiler
from pagemill_worker.grammar_compiler import GrammarCompiler, GrammarError

NO_OUTPUTS = np.zeros(0, np.int32)
LETTERS = LLMatcher.grammar_from_regex("[a-c]{2,4}")


def compiler(folder: Path, tokenizer: Tokenizer, *, eos: int = 2, extra: int = 0) -> GrammarCompiler:
    tokenizer.save(str(folder / "tokenizer.json"))
    return GrammarCompiler(folder, tokenizer.get_vocab_size(with_added_tokens=True) + extra, [eos])


def compile_now(compiler: GrammarCompiler, grammar: str, outputs: list[int] | None = None) -> LLMatcher:
    return compiler.start(grammar, np.array(outputs or [], np.int32)).result(60)


def allowed(matcher: LLMatcher) -> set[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


@pytest.mark.parametrize("make", [byte_level_bpe, sentencepiece_bpe], ids=lambda make: make.__name__)
@pytest.mark.parametrize("extra", [0, 61])
def test_the_first_token_begins_as_the_grammar_says(make: type, extra: int, tmp_path: Path) -> None:
    tokenizer = make()
    matcher = compile_now(compiler(tmp_path, tokenizer, extra=extra), LETTERS)
    found = allowed(matcher)
    assert {tokenizer.decode([i]) for i in found} >= {"a", "b", "c"}
    assert all(set(tokenizer.decode([i])) <= set("abc") for i in found), "no end, no padding, nothing else"
    matcher.consume_token(tokenizer.token_to_id("a"))
    matcher.consume_token(tokenizer.token_to_id("b"))
    assert 2 in allowed(matcher), "it may end"


def test_outputs_are_replayed(tmp_path: Path) -> None:
    tokenizer = byte_level_bpe()
    a = tokenizer.token_to_id("a")
    made = compiler(tmp_path, tokenizer)
    assert allowed(compile_now(made, LETTERS, [a, a, a, a])) == {2}
    assert len(allowed(compile_now(made, LETTERS, [a]))) > 2, "a matcher of its own, from the kept one"
    with pytest.raises(GrammarError, match="1 earlier tokens do not match"):
        compile_now(made, LETTERS, [tokenizer.token_to_id("z")])


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    made = compiler(tmp_path, byte_level_bpe())
    with pytest.raises(GrammarError, match="nope"):
        compile_now(made, LLMatcher.grammar_from_lark("start: nope"))
    with pytest.raises(GrammarError, match="WordPiece"):
        compile_now(compiler(tmp_path, word_pieces()), LETTERS)
    with pytest.raises(GrammarError, match="no end token"):
        compile_now(GrammarCompiler(tmp_path, 10, []), LETTERS)


def test_the_first_mask_is_computed_beside_the_step_path(tmp_path: Path) -> None:
    words = " ".join(f"r{i}" for i in range(1000))
    rules = "\n".join(f'r{i}: "a"? "b"? r{(i * 7 + 1) % 1000}?' for i in range(1000))
    made = compiler(tmp_path, byte_level_bpe())
    with pytest.raises(GrammarError, match=r"more than 20,000 items"):
        compile_now(made, LLMatcher.grammar_from_lark(f"start: {words}\n{rules}"))
    assert not made._kept


def test_only_so_many_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "KEPT", 2)
    made = compiler(tmp_path, byte_level_bpe())
    for word in "abcab":
        compile_now(made, LLMatcher.grammar_from_regex(word))
    assert list(made._kept) == [LLMatcher.grammar_from_regex(word) for word in "ab"]
