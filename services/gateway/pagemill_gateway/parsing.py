"""Request bodies to validated models, with errors that name the field."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from pagemill_gateway.bodies import RequestBody
from pagemill_gateway.errors import ApiError

_MAX_SHOWN = 64
_PLAIN = frozenset({int, str, dict, bool})
"""Types of items in which no whole number can hide."""

R = TypeVar("R", bound=RequestBody)


def parse_body(cls: type[R], raw: bytes) -> R:
    """The request in ``raw``. A field that is null is one that was left out.

    Raises:
        ApiError: 400, naming the field where there is one.
    """
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if type(data) is not dict:
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    data = {name: _whole(value) for name, value in data.items() if value is not None}
    for name, accepts in cls.unserved.items():
        if name in data and not accepts(data.pop(name)):
            raise ApiError(
                400,
                f"`{name}` is not supported by this server with this value",
                param=name,
                code="unsupported_parameter",
            )
    for name in cls.ignored:
        data.pop(name, None)
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise _validation_error(error) from None


def _whole(value: Any) -> Any:
    """``16.0`` is the integer 16, as JSON Schema has it: some languages write no other. Also within lists."""
    if type(value) is float:
        return int(value) if value.is_integer() else value
    if type(value) is list and not _PLAIN.issuperset(map(type, value)):
        return [_whole(item) for item in value]
    return value


def _validation_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    param = str(context.get("param", "")) or param_name(first)
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        return ApiError(400, f"unrecognized request argument: {param[:_MAX_SHOWN]}", param=param[:_MAX_SHOWN])
    message = first["msg"].removeprefix("Value error, ")
    if not param or "param" in context:  # the message names its fields itself
        return ApiError(400, message, param=param or None, code="invalid_value")
    return ApiError(400, f"{param}: {message}{_shown(first)}", param=param, code="invalid_value")


def param_name(detail: ErrorDetails) -> str:
    """``messages[0].content``, as OpenAI writes it."""
    name = ""
    for part in detail["loc"]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in ("str", "int", "float", "bool") and not part.startswith(("function-", "list[", "dict[")):
            name += f".{part}" if name else part
    return name


def _shown(detail: ErrorDetails) -> str:
    value = detail.get("input")
    if detail["type"] == "missing" or not isinstance(value, str | int | float | bool | None):
        return ""
    text = repr(value)
    return f" (got {text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + '…'})"
