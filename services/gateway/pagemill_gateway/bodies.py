"""What all request bodies share: strict types, no unknown fields, and a name for every field that is at fault.

Names and meanings are OpenAI's, and vLLM's for what OpenAI does not have. A field that is known to either but not
served here is listed in ``unserved`` with the values that ask for nothing (``suffix: ""``); any other value is refused
by name. ``ignored`` fields change nothing about the answer. Everything else that is not declared is an error.
docs/api.md holds the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Accepts = Callable[[Any], bool]


def only(*values: object) -> Accepts:
    """Exactly these values; ``1`` is not ``True``."""
    return lambda value: any(type(value) is type(allowed) and value == allowed for allowed in values)


NOTHING = only()
OFF = only(False)


def field_error(param: str, message: str) -> PydanticCustomError:
    """An error about several fields that names one of them."""
    return PydanticCustomError("field", "{reason}", {"param": param, "reason": message})


class RequestBody(BaseModel):
    """Base of all bodies: strict types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    unserved: ClassVar[dict[str, Accepts]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
