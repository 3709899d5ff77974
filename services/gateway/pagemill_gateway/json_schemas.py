"""JSON schemas that requests bring: whether they are valid, whatever is made of them then."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any, NoReturn

import jsonschema_rs

DRAFTS = frozenset(
    {
        "http://json-schema.org/draft-04/schema",
        "http://json-schema.org/draft-06/schema",
        "http://json-schema.org/draft-07/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "https://json-schema.org/draft/2020-12/schema",
    }
)
"""What ``$schema`` may name. Nothing is ever fetched."""
NEWEST = "https://json-schema.org/draft/2020-12/schema"
OPTIONS_KEYWORD = "x-guidance"
"""Where the library that makes grammars looks for options. They are ours to set."""
LEAST_INTEGER, MOST_INTEGER = -(2**63), 2**64 - 1
"""Whole numbers that a schema may hold."""

MAX_DIGITS = 4300
"""Most digits of a whole number in JSON text; what Python makes an integer of."""
MOST_LENGTH = 2**32 - 1
"""Greatest minLength that a grammar can keep, and what a greater maxLength counts as."""
MOST_BOUND = 2**63 - 1024
"""Largest bound of a number, of either sign, that a grammar can keep; wider ones count as this."""

_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_LOWER, _UPPER = frozenset({"minimum", "exclusiveMinimum"}), frozenset({"maximum", "exclusiveMaximum"})
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SHARED = ("$schema", "$defs", "definitions")
_DATA = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose values are data, which may have keys of any name."""
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_MAX_SHOWN = 200
_Place = tuple[str | int, ...]


class _Holds(Enum):
    """What an object within a schema is."""

    SCHEMA = auto()
    SCHEMAS_BY_NAME = auto()
    DATA = auto()


_INNER = {_Holds.SCHEMAS_BY_NAME: _Holds.SCHEMA, _Holds.DATA: _Holds.DATA}
_TYPES = "array, boolean, integer, null, number, object, string"


class SchemaError(ValueError):
    """It is no valid JSON schema; the message tells where and why."""


def read_schema(source: dict[str, Any] | bool | str) -> dict[str, Any]:
    """The valid schema that ``source`` is, or is the JSON text of.

    Raises:
        SchemaError: it is none, or allows nothing.
    """
    schema = _parsed(source) if isinstance(source, str) else source
    if schema is True:
        return {}
    if schema is False:
        raise SchemaError("the schema false allows no answer at all")
    if not isinstance(schema, dict):
        raise SchemaError("a JSON schema must be an object, true or false")
    check_schema(schema)
    return schema


def check_schema(schema: dict[str, Any]) -> None:
    """
    Raises:
        SchemaError: it is no valid schema of its draft, or has keywords or numbers that it may not have here.
    """
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise SchemaError("half a surrogate pair is no text") from None
    except RecursionError:
        raise SchemaError("is nested too deeply") from None
    for place, keyword, value in _walk(schema):
        if keyword == OPTIONS_KEYWORD:
            raise SchemaError(f"{_named(place)}{OPTIONS_KEYWORD} is not supported")
        if keyword is None:
            _check_number(place, value)
    draft = schema.get("$schema", NEWEST)
    if isinstance(draft, str) and draft.removesuffix("#") not in DRAFTS:
        raise SchemaError(f"$schema: {_shown(draft)} is not known; known are {', '.join(sorted(DRAFTS))}")
    try:
        jsonschema_rs.meta.validate({**schema, "$schema": draft})
    except jsonschema_rs.ValidationError as error:
        _fail(error)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"cannot be read: {_shown(str(error))}") from None


def patterns_of(schema: dict[str, Any]) -> set[str]:
    """The regular expressions in a valid schema."""
    found: set[str] = set()
    for _, keyword, value in _walk(schema):
        if keyword == "pattern" and isinstance(value, str):  # within an unknown keyword it may be anything
            found.add(value)
        elif keyword == "patternProperties" and isinstance(value, dict):
            found.update(value)
    return found


def adapted(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy of a valid schema as the library that makes grammars takes it: counts as integers, nothing that asks for
    nothing, and limits that are wider than it can count as the widest that it can."""
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    for _, inner, holds in _values(copy):
        if not isinstance(inner, dict) or holds is not _Holds.SCHEMA:
            continue
        if inner.get("uniqueItems") is False:
            del inner["uniqueItems"]
        for keyword, value in inner.items():
            if _is_number(value):  # not so within an unknown keyword, nor draft 4's exclusive ones
                inner[keyword] = _adapted_number(keyword, value)
    return copy


def _adapted_number(keyword: str, value: float) -> float:
    if keyword in _COUNTS and value == int(value):
        return min(int(value), MOST_LENGTH if keyword == "maxLength" else MOST_INTEGER)
    if keyword in _LOWER:
        return max(value, -MOST_BOUND)
    return min(value, MOST_BOUND) if keyword in _UPPER else value


def check_limits(schema: dict[str, Any]) -> None:
    """
    Raises:
        SchemaError: a limit in a valid schema cannot be kept by a grammar.
    """
    for place, keyword, value in _walk(schema):
        if keyword is None or not _is_number(value):
            continue
        if keyword == "minLength" and value > MOST_LENGTH:
            raise SchemaError(f"{_named((*place, keyword))}can be enforced up to {MOST_LENGTH:,}")
        if (keyword in _LOWER and value > MOST_BOUND) or (keyword in _UPPER and value < -MOST_BOUND):
            raise SchemaError(
                f"{_named((*place, keyword))}can be enforced from {-MOST_BOUND:,} to {MOST_BOUND:,} (2^63 - 1024)"
            )


def place_of_fault(schema: dict[str, Any], at_fault: Callable[[dict[str, Any]], bool]) -> str:
    """Where in a valid schema that is at fault the innermost schema lies that is so by itself, as ``properties.a: ``;
    empty if that is the whole.

    Args:
        at_fault: whether a schema has the fault. Called for the schemas along the way and those beside them.
    """
    shared: dict[str, Any] = {name: schema[name] for name in _SHARED if name in schema}
    place: _Place = ()
    inner: dict[str, Any] | None = schema
    while inner is not None:
        found, inner = inner, None
        for step, part in _schemas_in(found):
            if at_fault({**shared, **part}):
                place, inner = (*place, *step), part
                break
    return _named(place)


def check_parameters(schema: dict[str, Any]) -> None:
    """Whether ``schema`` can describe the arguments of a function, which are always an object.

    Raises:
        SchemaError: it cannot.
    """
    kind = schema.get("type")
    if kind != "object":
        found = f"is {_shown(json.dumps(kind))}" if "type" in schema else "is missing"
        raise SchemaError(f'arguments are an object: the schema must have "type": "object", but its type {found}')
    check_schema(schema)


def arguments_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """What the arguments of a function with these parameters must match. Parameters that are left out or empty, or
    list no property and say nothing of others, are none: a small model would make some up."""
    said = set(parameters or ()) - {"title", "description", "$schema"}
    if parameters and not ("properties" in said and said <= {"type", "properties", "required"}):
        return parameters
    return parameters if parameters and parameters["properties"] else NO_ARGUMENTS


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise SchemaError("is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise SchemaError(f"is no JSON: {error}") from None
    except ValueError:  # Python makes no integer of it
        raise SchemaError(f"has a number of too many digits: more than {MAX_DIGITS:,}") from None


def _walk(schema: dict[str, Any]) -> Iterator[tuple[_Place, str | None, Any]]:
    """Every keyword with its value and the place of its schema, and every number, without a keyword, with its own."""
    for place, value, holds in _values(schema):
        if isinstance(value, dict) and holds is _Holds.SCHEMA:
            for key, item in value.items():
                yield place, key, item
        elif _is_number(value):
            yield place, None, value


def _values(schema: dict[str, Any]) -> Iterator[tuple[_Place, Any, _Holds]]:
    """The schema and every value in it, outer ones first: what the caller changes in an object is gone on with."""
    left: list[tuple[_Place, Any, _Holds]] = [((), schema, _Holds.SCHEMA)]
    while left:
        place, value, holds = left.pop()
        yield place, value, holds
        left += _inside(place, value, holds)


def _schemas_in(schema: dict[str, Any]) -> Iterator[tuple[_Place, dict[str, Any]]]:
    """The schemas directly within ``schema``, and the steps to them."""
    left = _inside((), schema, _Holds.SCHEMA)[::-1]
    while left:
        place, value, holds = left.pop()
        if isinstance(value, dict) and holds is _Holds.SCHEMA:
            yield place, value
        else:
            left += _inside(place, value, holds)[::-1]


def _inside(place: _Place, value: Any, holds: _Holds) -> list[tuple[_Place, Any, _Holds]]:
    """What the value at ``place`` consists of."""
    if isinstance(value, list):
        return [((*place, index), item, holds) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return []
    return [
        ((*place, key), item, _held_by(key) if holds is _Holds.SCHEMA else _INNER[holds]) for key, item in value.items()
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _held_by(keyword: str) -> _Holds:
    if keyword in _SCHEMAS_BY_NAME:
        return _Holds.SCHEMAS_BY_NAME
    return _Holds.DATA if keyword in _DATA else _Holds.SCHEMA


def _check_number(place: _Place, value: float) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise SchemaError(f"{_named(place)}a number must be finite, at most about 1.8e308")
    if isinstance(value, int) and not LEAST_INTEGER <= value <= MOST_INTEGER:
        raise SchemaError(f"{_named(place)}a whole number must be from -2^63 to 2^64 - 1")


def _fail(error: jsonschema_rs.ValidationError) -> NoReturn:
    place = tuple(error.instance_path)
    if "type" in place[-2:] and error.kind.name in ("anyOf", "enum"):
        raise SchemaError(f"{_named(place)}{_shown(json.dumps(error.instance))} is no type; types are {_TYPES}")
    raise SchemaError(f"{_named(place)}{_shown(error.message)}")


def _named(place: _Place) -> str:
    name = ""
    for part in place:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return f"{_shown(name)}: " if name else ""


def _shown(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
