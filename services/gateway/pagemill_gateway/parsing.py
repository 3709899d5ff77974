"""Request bodies to validated models, with errors that name the field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from pagemill_gateway.bodies import RequestBody
from pagemill_gateway.errors import ApiError
from pagemill_gateway.json_schemas import MAX_DIGITS

_MAX_SHOWN = 64
_MAX_FAULTS = 5000
MAX_DEPTH = 200
"""Most objects and lists of a body that stand in each other; what pydantic's reader takes."""
_PLAIN = frozenset({int, str, dict, bool})
"""Types of items in which no whole number can hide."""

_NOTHING = object()

R = TypeVar("R", bound=RequestBody)


def parse_body(cls: type[R], raw: bytes) -> R:
    """The request in ``raw``. A known field that is null is one that was left out.

    Raises:
        ApiError: 400, naming the field where there is one.
    """
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body {_no_json(str(error))}", code="invalid_json") from None
    if type(data) is not dict:
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    known = cls.model_fields.keys() | cls.unserved.keys() | cls.ignored
    nullable = known | cls.elsewhere
    data = {name: _whole(value) for name, value in data.items() if value is not None or name not in nullable}
    for name, accepts in cls.unserved.items():
        if name in data and not accepts(data.pop(name)):
            raise ApiError(400, accepts.refusal(name), param=name, code="unsupported_parameter")
    for name in cls.ignored:
        data.pop(name, None)
    for name in data:
        if name not in known:
            shown = name[:_MAX_SHOWN]
            raise ApiError(400, f"unrecognized request argument: {shown}", param=shown, code="unknown_parameter")
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise _validation_error(data, error) from None


def _no_json(reason: str) -> str:
    """What the JSON reader says, in words that tell a limit from a fault."""
    if reason.startswith("recursion limit exceeded"):
        return f"is nested too deeply: more than {MAX_DEPTH} objects and lists in each other"
    if reason.startswith("number out of range"):
        return f"has a number of too many digits: more than {MAX_DIGITS:,}"
    return f"is not valid JSON: {reason}"


def _whole(value: Any) -> Any:
    """``16.0`` is the integer 16, as JSON Schema has it: some languages write no other. Also within lists."""
    if type(value) is float:
        return int(value) if value.is_integer() else value
    if type(value) is list and not _PLAIN.issuperset(map(type, value)):
        return [_whole(item) for item in value]
    return value


def _validation_error(data: dict[str, Any], error: ValidationError) -> ApiError:
    if error.error_count() > _MAX_FAULTS:  # pydantic can only tell of all of them, at some microseconds each
        message = f"the body has {error.error_count()} faults: an object in it has far too many fields"
        return ApiError(400, message, code="invalid_value")
    first, *others = _same_fault(data, error.errors(include_url=False))
    context = first.get("ctx", {})
    param = str(context.get("param", "")) or param_name(field_path(data, first))
    message = " or ".join(
        [_words(first), *dict.fromkeys(_words(other).removeprefix("Input should be ") for other in others)]
    )
    if not param or "param" in context:  # the message names its fields itself
        return ApiError(400, message, param=param or None, code="invalid_value")
    return ApiError(400, f"{param}: {message}{_shown(first)}", param=param, code="invalid_value")


def _same_fault(data: dict[str, Any], details: list[ErrorDetails]) -> list[ErrorDetails]:
    """The errors that belong to the first fault.

    Where a value may be of several kinds there is one for each kind. The one that went furthest into the value is of
    the kind that was meant; those that went equally far say together what may stand there.
    """
    path = field_path(data, details[0])
    for detail in details:
        other = field_path(data, detail)
        if len(other) > len(path) and other[: len(path)] == path:
            path = other
    found = [detail for detail in details if field_path(data, detail) == path]
    other_kinds = [detail for detail in found if detail["type"].endswith(("_type", "literal_error"))]
    meant = [detail for detail in found if detail not in other_kinds]
    return meant[:1] or other_kinds


def field_path(data: Any, detail: ErrorDetails) -> tuple[str | int, ...]:
    """Where in ``data`` the fault is: the names and positions that the client wrote (or left out, at the end).

    pydantic puts names of its own between them, for the kinds that a value may be of. A validator of ours says itself
    which part of a field is at fault (``bodies.item_error``).
    """
    path: list[str | int] = []
    loc = detail["loc"]
    for place, part in enumerate(loc):
        inside = _item(data, part)
        if inside is not _NOTHING:
            data = inside
        elif place < len(loc) - 1 or not isinstance(data, dict) or detail["type"] not in ("missing", "value_error"):
            continue
        path.append(part)
    return (*path, *detail.get("ctx", {}).get("item", ()))


def _item(data: Any, part: str | int) -> Any:
    if isinstance(part, int):
        return data[part] if isinstance(data, list) and part < len(data) else _NOTHING
    return data.get(part, _NOTHING) if isinstance(data, dict) else _NOTHING


def param_name(path: Iterable[str | int]) -> str:
    """``messages[0].content``, as OpenAI writes it."""
    name = ""
    for part in path:
        if isinstance(part, int):
            name += f"[{part}]"
        else:
            name += f".{part}" if name else part
    return name


def _words(detail: ErrorDetails) -> str:
    if detail["type"] in ("model_type", "dict_type"):  # pydantic's words name a class of ours, or Python's
        return "Input should be an object"
    if detail["type"] == "missing":
        return "is missing"
    return detail["msg"].removeprefix("Value error, ")


def _shown(detail: ErrorDetails) -> str:
    value = detail.get("input")
    if detail["type"] == "missing" or not isinstance(value, str | int | float):
        return ""
    text = repr(value)
    return f" (got {text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + '…'})"
