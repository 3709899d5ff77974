"""Grammars to matchers, in threads beside the step path."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from pagemill_shared.errors import PagemillError
from pagemill_shared.grammar_errors import in_our_words
from pagemill_shared.grammar_limits import PARSER_LIMITS
from pagemill_shared.schema import Int32Array

KEPT = 64
"""Compiled grammars that are kept for requests to come."""
_THREADS = 2


class GrammarError(PagemillError):
    """The grammar cannot be compiled, or the outputs so far do not match it."""


class GrammarCompiler:
    """Compiles for one model's tokenizer, which is read when the first grammar comes.

    Args:
        folder: the prepared model.
        vocab_size: the model's; tokens beyond the tokenizer's own are never allowed.
        eos_token_ids: what may come once a grammar is complete.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._folder, self._vocab_size, self._eos_token_ids = folder, vocab_size, list(eos_token_ids)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()

    def start(self, grammar: str, outputs: Int32Array) -> Future[LLMatcher]:
        """A matcher of its own that has taken in ``outputs``. The future may hold a GrammarError."""
        return self._threads.submit(self._compile, grammar, outputs)

    def _compile(self, grammar: str, outputs: Int32Array) -> LLMatcher:
        matcher = self._fresh(grammar)
        matcher.consume_tokens(outputs.tolist())
        if matcher.is_error():
            reason = in_our_words(matcher.get_error())
            raise GrammarError(f"{len(outputs)} earlier tokens do not match the grammar: {reason}")
        matcher.compute_bitmask()
        return matcher

    def _fresh(self, grammar: str) -> LLMatcher:
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is not None:
                self._kept.move_to_end(grammar)
                return kept.deep_copy()
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()  # the dearest one: it is kept, so that it costs no step of a row anything
        if matcher.is_error():
            raise GrammarError(in_our_words(matcher.get_error()))
        with self._lock:
            self._kept[grammar] = matcher
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return matcher.deep_copy()

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        if not self._eos_token_ids:
            raise GrammarError("the model has no end token")
        tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        size = max(self._vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        try:
            return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=self._eos_token_ids)
        except ValueError as error:
            raise GrammarError(f"grammars cannot be used with this model's tokenizer: {error}") from None
