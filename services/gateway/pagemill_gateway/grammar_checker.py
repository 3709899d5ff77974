"""Whether a grammar or schema is acceptable, and how the worker gets it.

Sizes are checked at once; the rest, which may take a while, in threads of their own with a limit on the time, so that
nobody's stream waits for somebody else's schema. What is accepted here compiles in the worker, too: same library, same
limits, same tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from pagemill_gateway.errors import ApiError
from pagemill_gateway.json_schemas import (
    SchemaError,
    adapted,
    check_limits,
    patterns_of,
    place_of_fault,
    read_schema,
)
from pagemill_gateway.structured_outputs import Constraint
from pagemill_shared.errors import RequestError
from pagemill_shared.grammar_errors import NO_TEXT, TOO_COMPLEX, in_our_words
from pagemill_shared.grammar_limits import PARSER_LIMITS
from pagemill_shared.manifest import ModelManifest
from pagemill_shared.sampling import MAX_GRAMMAR

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SOURCE = 65_536
"""Most characters of a schema (as JSON), a regular expression, a grammar, all choices or all tools together."""
MAX_CHECK_S = 5.0
"""Most seconds that a check may take, from when it was asked for."""
_REMEMBERED = 256
"""Constraints that need no second check."""
MAX_SEARCH_S = 0.5
"""Most seconds that are spent on finding where in a schema a fault lies."""
_STEPS = 4
"""Tokens that a grammar is tried with."""
THREADS = 8
"""So many that a small schema need not wait for one that explodes: they share the processors."""

SPACING = r"(?: ?|\n[ \t]{0,32})"
"""Between the parts of JSON: nothing, a blank, or a line break with indentation. Without a bound small models write
blanks for ever."""


class GrammarChecker:
    """Checks for one model. Requests with the same constraint share one check, and what it has found.

    Args:
        tokenizer: gives ``tokenizer.json``; called when the first constraint comes.
    """

    def __init__(self, tokenizer: Callable[[], str], manifest: ModelManifest) -> None:
        self._tokenizer_json = tokenizer
        self._manifest = manifest
        self._loading = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar", initializer=_give_way)
        self._running: dict[Constraint, asyncio.Task[str | RequestError]] = {}
        self._found: OrderedDict[Constraint, str | RequestError] = OrderedDict()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def check(self, constraint: Constraint | None) -> str:
        """The grammar as the worker gets it; empty for no constraint. Takes at most ``MAX_CHECK_S``.

        Raises:
            ApiError: 400 naming the field, or 503 when the threads are taken by the constraints of others.
        """
        if constraint is None:
            return ""
        text = source_text(constraint)
        key = replace(constraint, source=text, parts=tuple(replace(part, source=None) for part in constraint.parts))
        found = self._found.get(key)
        if found is None:
            if key not in self._running:
                self._running[key] = asyncio.ensure_future(self._find(key, constraint, text))
            found = await asyncio.shield(self._running[key])
        else:
            self._found.move_to_end(key)
        if isinstance(found, RequestError):
            raise ApiError.of(found)
        return found

    async def _find(self, key: Constraint, constraint: Constraint, text: str) -> str | RequestError:
        """The grammar or why it is refused. What was found without haste is remembered."""
        begun: list[float] = []
        loop = asyncio.get_running_loop()
        found: str | RequestError
        try:
            if "_loaded" not in self.__dict__:  # reading the tokenizer is not this grammar's fault
                await loop.run_in_executor(self._threads, self._tokenizer, constraint)
            work = loop.run_in_executor(self._threads, self._compile, constraint, text, begun)
            found = await asyncio.wait_for(work, MAX_CHECK_S)
        except TimeoutError:
            # One that was begun late is not known to be at fault: most of the time went to those before it.
            if not begun or time.monotonic() - begun[0] < MAX_CHECK_S / 2:
                message = f"{constraint.field}: too many grammars are being checked; try again"
                return RequestError(message, code="grammar_checker_busy", param=constraint.field)
            return _refusal(constraint.field, f"was not compiled within {MAX_CHECK_S:g} s")
        except RequestError as error:  # without the frames that it came through, which hold the matcher
            found = RequestError(error.message, code=error.code, param=error.param)
        finally:
            del self._running[key]
        self._found[key] = found
        if len(self._found) > _REMEMBERED:
            self._found.popitem(last=False)
        return found

    def _compile(self, constraint: Constraint, text: str, begun: list[float]) -> str:
        begun.append(time.monotonic())
        tokenizer = self._tokenizer(constraint)
        try:
            grammar = self._tried(constraint, text, tokenizer)
        except RequestError:
            for part in constraint.parts:
                self._tried(part, source_text(part), tokenizer)
            raise
        self._check_schemas(constraint, tokenizer)
        return grammar

    def _check_schemas(self, constraint: Constraint, tokenizer: LLTokenizer) -> None:
        """Looks into the schemas, and tries every pattern by itself: within them its turn may come late."""
        for part in constraint.parts or (constraint,):
            if part.kind != "json":
                continue
            schema = read_schema(part.source)
            try:
                check_limits(schema)
            except SchemaError as error:
                raise _refusal(part.field, str(error)) from None
            for pattern in sorted(patterns_of(schema)):
                alone = json.dumps({"type": "string", "pattern": pattern})
                try:
                    self._tried(replace(part, parts=()), alone, tokenizer)
                except RequestError as error:
                    reason = error.message.removeprefix(f"{part.field}: ")
                    if reason.startswith(TOO_COMPLEX):  # one that nothing matches may stand in a branch
                        raise _refusal(part.field, f"the pattern {pattern!r:.100} {reason}") from None

    def _tried(self, constraint: Constraint, text: str, tokenizer: LLTokenizer) -> str:
        """The grammar, once it has let a few tokens through.

        Raises:
            RequestError: it does not.
        """
        grammar = as_grammar(constraint, text)
        reason = self._fault(grammar, tokenizer)
        if reason is None:
            return grammar
        place = ""
        if constraint.kind == "json" and not reason.startswith(TOO_COMPLEX):  # which many tries would find too slowly
            until = time.monotonic() + MAX_SEARCH_S

            def at_fault(part: dict[str, Any]) -> bool:
                if time.monotonic() > until:
                    return False
                try:
                    return self._fault(as_grammar(constraint, json.dumps(part)), tokenizer) == reason
                except RequestError:  # by itself it is none
                    return False

            place = place_of_fault(read_schema(text), at_fault)
        raise _refusal(constraint.field, place + reason)

    def _fault(self, grammar: str, tokenizer: LLTokenizer) -> str | None:
        """Why the first tokens of the grammar cannot be had."""
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
        for _step in range(_STEPS):
            mask = b"" if matcher.is_error() else matcher.compute_bitmask()
            if matcher.is_error():
                return in_our_words(matcher.get_error())
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
            if not allowed.size:
                return NO_TEXT
            going_on = allowed[~np.isin(allowed, self._manifest.eos_token_ids)]
            if not going_on.size:
                break
            matcher.consume_token(int(going_on[0]))  # that a text with one way on is too long shows only then
        return None

    def _tokenizer(self, constraint: Constraint) -> LLTokenizer:
        try:
            with self._loading:
                return self._loaded
        except ValueError as error:
            raise RequestError(
                f"{constraint.field} cannot be used with this model: {in_our_words(str(error))}",
                code="unsupported_parameter",
                param=constraint.field,
            ) from None

    @cached_property
    def _loaded(self) -> LLTokenizer:
        if not self._manifest.eos_token_ids:
            raise ValueError("it has no end token")
        return LLTokenizer(self._tokenizer_json(), eos_token=list(self._manifest.eos_token_ids))


def _give_way() -> None:
    """Streams that run come before grammars to come: where the processors are busy they get a third of a share.
    Linux has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)


def schema_of(constraint: Constraint) -> dict[str, Any]:
    """The schema of a constraint of kind ``json``.

    Raises:
        ApiError: it is none, or too large.
    """
    try:
        source_text(constraint)
        return read_schema(constraint.source)
    except SchemaError as error:
        raise ApiError.of(_refusal(constraint.field, str(error))) from None


def source_text(constraint: Constraint) -> str:
    """What the constraint was made from, as one text.

    Raises:
        ApiError: it is too large.
    """
    source = constraint.source
    text = source if isinstance(source, str) else json.dumps(source, ensure_ascii=False)
    if len(text) > MAX_SOURCE:
        reason = f"has {len(text)} characters, at most {MAX_SOURCE} are allowed"
        raise ApiError.of(_refusal(constraint.field, reason))
    return text


def as_grammar(constraint: Constraint, text: str) -> str:
    """``constraint``, whose source is ``text``, as llguidance reads it.

    Raises:
        RequestError: it is no such thing.
    """
    try:
        grammar = _grammar(constraint, text)
    except SchemaError as error:
        raise _refusal(constraint.field, str(error)) from None
    except (ValueError, RecursionError) as error:
        raise _refusal(constraint.field, in_our_words(str(error))) from None
    if len(grammar) > MAX_GRAMMAR:
        raise _refusal(
            constraint.field, f"makes a grammar of {len(grammar)} characters, at most {MAX_GRAMMAR} are allowed"
        )
    return grammar


def _grammar(constraint: Constraint, text: str) -> str:
    if constraint.kind == "json":
        schema = read_schema(text)
        check_limits(schema)
        return LLMatcher.grammar_from_json_schema(adapted(schema), overrides=json_options(spaced=constraint.spaced))
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


def _refusal(field: str, reason: str) -> RequestError:
    return RequestError(f"{field}: {reason}", code="invalid_value", param=field)
