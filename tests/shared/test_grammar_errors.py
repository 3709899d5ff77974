"""Messages of the grammar library as clients read them: cause and numbers, no advice and no drawings."""

from __future__ import annotations

import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from pagemill_testing.prepared_models import byte_level_bpe

from pagemill_shared.grammar_errors import MAX_REASON, in_our_words
from pagemill_shared.grammar_limits import PARSER_LIMITS

RAW = re.compile(
    r"Some\(|Failed to|decimal lit|"
    r"coerce_one_of|<non-verbose|NoExtension|Unimplemented|retriev|\^\s*$|limits\.|in regex|registry|LL[A-Z]"
)
"""What only its own users would understand."""


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(byte_level_bpe().to_str(), eos_token=[2])


def failure(tokenizer: LLTokenizer, grammar: str) -> str:
    """What the library says of ``grammar``, at once or within a few tokens."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    for _ in range(3):
        if matcher.is_error():
            break
        mask = matcher.compute_bitmask()
        if not matcher.is_error():
            matcher.consume_token(next(i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1))
    assert matcher.is_error()
    message: str = matcher.get_error()
    return message


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {}, "if": {}}, "cannot be enforced with if, not"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "with anyOf it can"),
        ({"minLength": 3, "maxLength": 2, "type": "string"}, "no text matches it: minLength (3) is greater"),
        ({"type": "string", "format": "nope"}, "the format 'nope' is not known"),
        ({"$ref": "#/nope"}, "'/nope', where nothing is"),
        ({"$ref": "https://example.org/a"}, "nothing outside is read"),
        ({"type": "string", "pattern": "a(?=b)"}, "look-around"),
        ({"type": "string", "pattern": "[a--a]"}, "no text matches it"),
        ({"patternProperties": {"(": {}}}, "a regular expression is not valid: unclosed group"),
        ({"type": "number", "multipleOf": 1e-300}, "multipleOf has too many digits"),
        ({"enum": []}, "no text matches it: an enum is empty"),
        ({"type": "number", "minimum": 1e18}, "minimum and maximum (here 1e18 and none) cannot be enforced: a minimum"),
        ({"type": "integer", "maximum": -(10**18)}, "(here none and -1000000000000000000) cannot be enforced"),
        ({"type": "number", "minimum": 1e-250}, "more than 250 brackets in each other; a minimum or maximum"),
        ({"type": "string", "pattern": "a{4294967296}"}, "a repetition can be at most 4,294,967,295 times"),
        ({"enum": [[i] for i in range(2500)]}, "is too complex: more than 2,000 items"),
    ],
)
def test_schemas(tokenizer: LLTokenizer, schema: dict[str, Any], words: str) -> None:
    said = in_our_words(failure(tokenizer, LLMatcher.grammar_from_json_schema(schema)))
    assert words in said
    assert not RAW.search(said)


@pytest.mark.parametrize(
    ("regex", "words"),
    [
        ("(a", "unclosed group"),
        ("a{3,2}", "invalid repetition count range"),
        ("a\\b", "look-around"),
        ("[a--a]", "no text matches it"),
        ("a{1000000}", "cost more than 150,000 steps"),
    ],
)
def test_regular_expressions(tokenizer: LLTokenizer, regex: str, words: str) -> None:
    said = in_our_words(failure(tokenizer, LLMatcher.grammar_from_regex(regex)))
    assert words in said
    assert not RAW.search(said)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("start: nope", 'line 1, column 8: unknown name: "nope"'),
        ('start: x\nx: "', "line 2, column 5"),
        ("start: <nope>", "no control token of this model"),
        ('%import common.NOPE\nstart: "a"', "common.NOPE cannot be imported"),
        ("start: x\nx: x", "no text matches it"),
    ],
)
def test_grammars(tokenizer: LLTokenizer, grammar: str, words: str) -> None:
    said = in_our_words(failure(tokenizer, grammar_from("grammar", grammar)))
    assert words in said
    assert not RAW.search(said)


def test_what_is_not_known_is_one_bounded_line() -> None:
    assert in_our_words("something\n  new <non-verbose/>") == "something new"
    assert len(in_our_words("x" * 5000)) == MAX_REASON
