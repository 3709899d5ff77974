"""Schemas of requests: valid ones pass as they are, the others are told apart by place and cause."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_gateway.json_schemas import (
    MOST_BOUND,
    MOST_LENGTH,
    NO_ARGUMENTS,
    SchemaError,
    adapted,
    arguments_schema,
    check_limits,
    check_parameters,
    check_schema,
    patterns_of,
    read_schema,
)

HIDDEN = {"x-guidance": {"lenient": True}}
SUBSCHEMAS = ["items", "not", "additionalProperties", "contains", "propertyNames", "if"]
LISTS = ["anyOf", "allOf", "oneOf", "prefixItems"]
MAPS = ["properties", "patternProperties", "$defs", "dependentSchemas"]
DATA = ["const", "default"]


@st.composite
def placed(draw: st.DrawFn) -> tuple[dict[str, Any], bool]:
    """A schema that has x-guidance somewhere, and whether it stands there as a keyword."""
    steps = draw(st.lists(st.sampled_from([*SUBSCHEMAS, *LISTS, *MAPS]), max_size=6))
    innermost = draw(st.sampled_from(["keyword", "name", "data"]))
    schema: dict[str, Any] = {
        "keyword": dict(HIDDEN),
        "name": {"properties": {"x-guidance": {"type": "integer"}}},
        "data": {draw(st.sampled_from(DATA)): [HIDDEN], "enum": [HIDDEN]},
    }[innermost]
    for step in steps:
        name = draw(st.sampled_from(["a", *MAPS, *DATA, "enum"]))
        inner: Any = {name: schema} if step in MAPS else [{"type": "string"}, schema] if step in LISTS else schema
        schema = {"title": "x-guidance", step: inner}
    return schema, innermost == "keyword"


@given(placed())
def test_options_of_the_library_are_found_at_any_depth_and_nowhere_else(case: tuple[dict[str, Any], bool]) -> None:
    schema, is_keyword = case
    if is_keyword:
        with pytest.raises(SchemaError, match="x-guidance is not supported"):
            check_schema(schema)
    else:
        check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "strin"}, 'type: "strin" is no type; types are array, boolean'),
        ({"properties": {"a": {"items": {"type": ["string", 7]}}}}, "properties.a.items.type"),
        ({"properties": [1]}, 'properties: [1] is not of type "object"'),
        ({"anyOf": [{}, {"minLength": -1}]}, "anyOf[1].minLength: -1 is less than the minimum of 0"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"$schema": "https://example.org/mine"}, "$schema: https://example.org/mine is not known"),
        ({"$schema": 7}, "$schema: 7"),
        ({"minimum": math.inf}, "minimum: a number must be finite"),
        ({"enum": [1, {"a": [-math.inf]}]}, "enum[1].a[0]: a number must be finite"),
        ({"maximum": 10**400}, "maximum: a whole number must be from -2^63 to 2^64 - 1"),
        ({"title": "\ud800"}, "surrogate"),
    ],
)
def test_invalid(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(SchemaError) as error:
        check_schema(schema)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": ["string", "null"], "unknown": {"x": 1e300}},
        {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "minimum": -(2**63), "maximum": 2**64 - 1},
        {"properties": {"type": {"type": "string"}, "enum": {"minimum": 1}}},
    ],
)
def test_valid(schema: dict[str, Any]) -> None:
    check_schema(schema)
    assert read_schema(json.dumps(schema)) == schema


def test_unknown_drafts_are_not_fetched_wherever_they_are_named() -> None:
    with pytest.raises(SchemaError, match="not known"):
        check_schema({"$schema": "http://127.0.0.1:9/schema"})
    check_schema({"properties": {"a": {"$schema": "http://127.0.0.1:9/schema", "$ref": "http://127.0.0.1:9/a"}}})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (False, "allows no answer"),
        ("false", "allows no answer"),
        ("[1]", "must be an object"),
        ("{", "is no JSON"),
        ('{"minimum": NaN}', "must be finite"),
        ('{"minimum": 1e999}', "must be finite"),
        ("[" * 100_000, "nested too deeply"),
        ('{"minimum": ' + "1" * 4301 + "}", "has a number of too many digits: more than 4,300"),
    ],
)
def test_what_is_no_schema(source: Any, words: str) -> None:
    with pytest.raises(SchemaError, match=words):
        read_schema(source)


@pytest.mark.parametrize("source", [True, "true", {}, "{}"])
def test_what_allows_anything(source: Any) -> None:
    assert read_schema(source) == {}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": ["object", "null"]},
        {"enum": ["a"]},
        {"oneOf": [{"type": "string"}]},
        {"properties": {}},
        {"type": None},
    ],
)
def test_parameters_that_are_no_object(schema: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match='must have "type": "object"'):
        check_parameters(schema)


@pytest.mark.parametrize(
    ("parameters", "takes_some"),
    [
        (None, False),
        ({}, False),
        ({"type": "object", "properties": {}}, False),
        ({"type": "object", "title": "Now", "properties": {}, "required": []}, False),
        ({"type": "object"}, True),
        ({"type": "object", "properties": {}, "additionalProperties": True}, True),
        ({"type": "object", "properties": {"a": {}}}, True),
    ],
)
def test_functions_that_take_nothing(parameters: dict[str, Any] | None, takes_some: bool) -> None:
    assert arguments_schema(parameters) == (parameters if takes_some else NO_ARGUMENTS)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"minItems": 2.0, "maxItems": -0.0, "uniqueItems": False}, {"minItems": 2, "maxItems": 0}),
        ({"anyOf": [{"maxLength": 5.0, "maxItems": 1e300}]}, {"anyOf": [{"maxLength": 5, "maxItems": 2**64 - 1}]}),
        ({"maxLength": 10**18}, {"maxLength": MOST_LENGTH}),
        ({"minimum": -(2**63), "maximum": 1e300}, {"minimum": -MOST_BOUND, "maximum": MOST_BOUND}),
        ({"exclusiveMinimum": -1e19, "exclusiveMaximum": 2**64 - 1},
         {"exclusiveMinimum": -MOST_BOUND, "exclusiveMaximum": MOST_BOUND}),
    ],
)  # fmt: skip
def test_numbers_are_made_what_grammars_can_be_made_of(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    check_schema(schema)
    check_limits(schema)
    before = json.dumps(schema)
    assert [(key, type(value), value) for key, value in adapted(schema).items()] == [
        (key, type(value), value) for key, value in expected.items()
    ]
    assert json.dumps(schema) == before, "the template sees what the client wrote"


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": True, "minimum": 1.5, "maximum": 10.0, "multipleOf": 2.0},
        {"const": {"uniqueItems": False, "maxLength": 5.0}, "enum": [{"minimum": -1e300}]},
        {"properties": {"uniqueItems": {"type": "string"}, "maxLength": {}}},
        {"x-mine": {"minLength": "much", "maxLength": [5.5], "minItems": 5.5, "minimum": {}, "pattern": [1]}},
        {"x-mine": {"patternProperties": 5, "pattern": {}, "maximum": None}},
        {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True},
    ],
)
def test_all_else_is_left_as_it_is(schema: dict[str, Any]) -> None:
    check_schema(schema)
    check_limits(schema)
    assert adapted(schema) == schema
    assert not patterns_of(schema)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"minLength": 2**32}, "minLength: can be enforced up to 4,294,967,295"),
        ({"items": {"minimum": 1e19}}, "items.minimum: can be enforced from -9,223"),
        ({"anyOf": [{"exclusiveMaximum": -(2**63)}]}, "anyOf[0].exclusiveMaximum: can be enforced from -9,223"),
    ],
)
def test_limits_that_no_grammar_can_keep(schema: dict[str, Any], words: str) -> None:
    check_schema(schema)
    with pytest.raises(SchemaError) as error:
        check_limits(schema)
    assert str(error.value).startswith(words)
