"""Whether a grammar or schema is acceptable, and how the worker gets it.

Sizes are checked at once; the rest, which may take a while, in threads of their own with a limit on the time, so that
nobody's stream waits for somebody else's schema. What is accepted here compiles in the worker, too: same library, same
limits, same tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from pagemill_gateway.errors import ApiError
from pagemill_gateway.structured_outputs import Constraint
from pagemill_shared.errors import RequestError
from pagemill_shared.grammar_limits import PARSER_LIMITS
from pagemill_shared.manifest import ModelManifest
from pagemill_shared.sampling import MAX_GRAMMAR

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SOURCE = 65_536
"""Most characters of a schema (as JSON), a regular expression, a grammar, all choices or all tools together."""
MAX_CHECK_S = 5.0
"""Most seconds that a check may take."""
_REMEMBERED = 256
"""Accepted constraints that need no second check."""
_MAX_REASON = 300
_THREADS = 2

SPACING = r"(?: ?|\n[ \t]{0,32})"
"""Between the parts of JSON: nothing, a blank, or a line break with indentation. Without a bound small models write
blanks for ever."""


class GrammarChecker:
    """Checks for one model.

    Args:
        tokenizer: gives ``tokenizer.json``; called when the first constraint comes.
    """

    def __init__(self, tokenizer: Callable[[], str], manifest: ModelManifest) -> None:
        self._tokenizer_json = tokenizer
        self._manifest = manifest
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._accepted: OrderedDict[tuple[str, bool, str], str] = OrderedDict()
        """Grammars by kind, spacing and text."""

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def check(self, constraint: Constraint | None) -> str:
        """The grammar as the worker gets it; empty for no constraint.

        Raises:
            ApiError: 400 naming the field, or 503 when the threads are taken by the constraints of others.
        """
        if constraint is None:
            return ""
        text = source_text(constraint)
        key = (constraint.kind, constraint.spaced, text)
        known = self._accepted.get(key)
        if known is not None:
            self._accepted.move_to_end(key)
            return known
        begun = threading.Event()
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._compile, constraint, text, begun)
        try:
            grammar = await asyncio.wait_for(work, MAX_CHECK_S)
        except TimeoutError:
            if not begun.is_set():
                message = f"{constraint.field}: too many grammars are being checked; try again"
                raise ApiError(503, message, param=constraint.field, code="grammar_checker_busy") from None
            raise ApiError.of(_refusal(constraint, f"takes more than {MAX_CHECK_S:.0f} s to compile")) from None
        except RequestError as error:
            raise ApiError.of(error) from None
        self._accepted[key] = grammar
        if len(self._accepted) > _REMEMBERED:
            self._accepted.popitem(last=False)
        return grammar

    def _compile(self, constraint: Constraint, text: str, begun: threading.Event) -> str:
        begun.set()
        grammar = as_grammar(constraint, text)
        limits = LLParserLimits(**PARSER_LIMITS)
        matcher = LLMatcher(self._tokenizer(constraint), grammar, log_level=0, limits=limits)
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise _refusal(constraint, _first_lines(matcher.get_error()))
        if not np.frombuffer(mask, np.uint8).any():
            raise _refusal(constraint, "no text matches it")
        return grammar

    def _tokenizer(self, constraint: Constraint) -> LLTokenizer:
        try:
            return self._loaded
        except ValueError as error:
            raise RequestError(
                f"{constraint.field} cannot be used with this model: {_first_lines(str(error))}",
                code="unsupported_parameter",
                param=constraint.field,
            ) from None

    @cached_property
    def _loaded(self) -> LLTokenizer:
        if not self._manifest.eos_token_ids:
            raise ValueError("it has no end token")
        return LLTokenizer(self._tokenizer_json(), eos_token=list(self._manifest.eos_token_ids))


def source_text(constraint: Constraint) -> str:
    """What the constraint was made from, as one text.

    Raises:
        ApiError: it is too large.
    """
    source = constraint.source
    text = source if isinstance(source, str) else json.dumps(source, ensure_ascii=False)
    if len(text) > MAX_SOURCE:
        reason = f"has {len(text)} characters, at most {MAX_SOURCE} are allowed"
        raise ApiError.of(_refusal(constraint, reason))
    return text


def as_grammar(constraint: Constraint, text: str) -> str:
    """``constraint``, whose source is ``text``, as llguidance reads it.

    Raises:
        RequestError: it is no such thing.
    """
    try:
        grammar = _grammar(constraint, text)
    except (ValueError, RecursionError) as error:
        raise _refusal(constraint, _first_lines(str(error))) from None
    if len(grammar) > MAX_GRAMMAR:
        raise _refusal(constraint, f"makes a grammar of {len(grammar)} characters, at most {MAX_GRAMMAR} are allowed")
    return grammar


def _grammar(constraint: Constraint, text: str) -> str:
    if constraint.kind == "json":
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise ValueError("a JSON schema must be an object")
        return LLMatcher.grammar_from_json_schema(schema, overrides=json_options(spaced=constraint.spaced))
    if constraint.kind == "lark":
        return LLMatcher.grammar_from_lark(text)
    if constraint.kind == "choice":
        if "" in constraint.source:
            raise ValueError("a choice must not be empty")
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(lark_string, constraint.source)))
    if not text:
        raise ValueError("must not be empty")
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    return grammar_from("grammar", text)


def json_options(*, spaced: bool) -> JsonCompileOptions:
    """How llguidance makes a grammar of a JSON schema."""
    return {"whitespace_pattern": SPACING} if spaced else {"whitespace_flexible": False}


def lark_string(text: str) -> str:
    """``text`` as a terminal of Lark, which reads JSON strings."""
    return json.dumps(text)


def _refusal(constraint: Constraint, reason: str) -> RequestError:
    return RequestError(f"{constraint.field}: {reason}", code="invalid_value", param=constraint.field)


def _first_lines(text: str) -> str:
    return " ".join(text.split())[:_MAX_REASON]
