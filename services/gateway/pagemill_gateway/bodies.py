"""What all request bodies share: strict types, no unknown fields, and a name for every field that is at fault.

Names and meanings are OpenAI's, and vLLM's for what OpenAI does not have. A field that is known to either but not
served here is listed in ``unserved`` with the values that ask for nothing (``suffix: ""``); any other value is refused
by name. ``ignored`` fields change nothing about the answer. Everything else that is not declared is an error.
docs/api.md holds the table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError


@dataclass(frozen=True, slots=True)
class Accepts:
    """Exactly these values; ``1`` is not ``True``."""

    values: tuple[object, ...]

    def __call__(self, value: object) -> bool:
        return any(type(value) is type(allowed) and value == allowed for allowed in self.values)

    def refusal(self, name: str) -> str:
        """What a client is told that sent another value for the field ``name``."""
        served = [json.dumps(value) for value in self.values if value]  # an empty value asks for nothing
        if not served:
            return f"`{name}` is not supported by this server"
        return f"`{name}` is not supported by this server, but for {' and '.join(served)}"


def only(*values: object) -> Accepts:
    return Accepts(values)


NOTHING = only()
OFF = only(False)


def field_error(param: str, message: str) -> PydanticCustomError:
    """An error about several fields that names one of them."""
    return PydanticCustomError("field", "{reason}", {"param": param, "reason": message})


def item_error(item: tuple[str | int, ...], message: str) -> PydanticCustomError:
    """An error about a part of the field that is validated: the names and positions that lead to it."""
    return PydanticCustomError("item", "{reason}", {"item": item, "reason": message})


def at_most(count: int) -> BeforeValidator:
    """Of an object's entries, checked before each of them is: a million bad ones would be a million errors."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"at most {count} entries are allowed, not {len(value)}")
        return value

    return BeforeValidator(check)


class RequestBody(BaseModel):
    """Base of all bodies: strict types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    unserved: ClassVar[dict[str, Accepts]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    elsewhere: ClassVar[frozenset[str]] = frozenset()
    """Fields of another body that the same endpoint takes: null is the default here, too."""

    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema of what is accepted: null for a field that may be left out, and the fields that are not served."""
        schema = handler(core_schema)
        whole = handler.resolve_ref_schema(schema)
        properties = whole["properties"]
        required = set(whole.get("required", ()))
        for name, field in properties.items():
            if name not in required:
                properties[name] = nullable(field)
        for name, accepts in cls.unserved.items():
            properties[name] = {
                "enum": [*accepts.values, None],
                "description": "Not served: only what asks for nothing is accepted.",
            }
        for name in sorted(cls.ignored):
            properties[name] = {"description": "Accepted and ignored."}
        for name in sorted(cls.elsewhere - properties.keys()):
            properties[name] = {"type": "null"}
        return schema


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of the same values and of null."""
    if schema.get("type") == "null" or {"type": "null"} in schema.get("anyOf", ()):
        return schema
    kept: dict[str, Any] = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    inner = {key: value for key, value in schema.items() if key not in kept}
    branches = inner["anyOf"] if set(inner) == {"anyOf"} else [inner]
    return {"anyOf": [*branches, {"type": "null"}], **kept}
