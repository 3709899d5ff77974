"""What may be a request's id: it goes into logs, into a header of the response, and into the scheduler's state."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

MAX_LENGTH = 256
_ALLOWED = re.compile(rf"[\x21-\x7e]{{1,{MAX_LENGTH}}}\Z")


def is_request_id(text: str) -> bool:
    """Whether ``text`` is printable ASCII without blanks, and neither empty nor too long."""
    return _ALLOWED.match(text) is not None


def _checked(text: str) -> str:
    if not is_request_id(text):
        raise ValueError(f"must be 1 to {MAX_LENGTH} printable ASCII characters without blanks")
    return text


RequestId = Annotated[
    str,
    AfterValidator(_checked),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_LENGTH, "pattern": "^[!-~]+$"}),
]
