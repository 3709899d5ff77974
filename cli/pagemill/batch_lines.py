"""The lines of OpenAI's batch format: requests in, results out. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from pagemill.server_api import UnsendableError, check_sendable

RETRIED = frozenset({429, 503})
"""Statuses that say: later."""
_UNSETTLED = RETRIED | {408, 500, 502, 504}
"""Statuses after which another run may fare better."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input.

    Attributes:
        line: its number, from 1.
        url: the path on the server.
    """

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request, and why."""

    line: int
    reason: str


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: Annotated[str, Field(pattern=r"^/v1/[A-Za-z0-9_/-]+$")]
    body: dict[str, Any]


def read_requests(lines: Iterable[bytes]) -> Iterator[BatchRequest | BadLine]:
    """Each line as a request or as what is wrong with it; blank lines are skipped."""
    places: dict[str, int] = {}
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            line = _Line.model_validate(json.loads(raw, parse_constant=_no_number))
            check_sendable(line.body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            yield BadLine(number, f"{'.'.join(map(str, first['loc'])) or 'the line'}: {_words(first)}")
            continue
        except UnsendableError as error:
            yield BadLine(number, f"body: {error}")
            continue
        except RecursionError:
            yield BadLine(number, "not valid JSON: it is nested too deeply")
            continue
        except ValueError as error:
            yield BadLine(number, f"not valid JSON: {str(error).partition(';')[0]}")  # no advice about the interpreter
            continue
        before = places.setdefault(line.custom_id, number)
        if before != number:
            yield BadLine(number, f"custom_id {line.custom_id!r:.80} stands in line {before} already")
        elif line.body.get("stream"):
            yield BadLine(number, "body.stream: the answers of a batch come whole")
        else:
            yield BatchRequest(number, line.custom_id, line.url, line.body)


def _words(error: ErrorDetails) -> str:
    if error["type"] in ("model_type", "dict_type"):  # as the server says it
        return "Input should be an object"
    return error["msg"]


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of one request.

    Attributes:
        status: of the response; 0 where there was none.
        body: JSON of the response.
        failure: why there was no response.
    """

    status: int
    request_id: str = ""
    body: Any = None
    failure: str = ""


def result_line(result_id: str, request: BatchRequest, reply: Reply) -> bytes:
    """The line that tells of a request, with its line end."""
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}
    return (
        json.dumps(
            {
                "id": result_id,
                "custom_id": request.custom_id,
                "response": response if reply.status else None,
                "error": None if reply.status else {"code": "no_response", "message": reply.failure},
            },
            ensure_ascii=False,
        ).encode("utf-8", "replace")
        + b"\n"
    )


def settled_id(raw: bytes) -> str | None:
    """The custom_id of a result that another run would not better; None for one to try again.

    Raises:
        ValueError: the line is no result.
    """
    row = json.loads(raw)
    try:
        custom_id, response = row["custom_id"], row["response"]
        if response is None or response["status_code"] in _UNSETTLED:
            return None
        return str(custom_id)
    except (KeyError, TypeError):
        raise ValueError("it is JSON, but no result") from None
