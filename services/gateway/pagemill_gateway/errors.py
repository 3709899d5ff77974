"""Errors as HTTP clients see them: always JSON, always OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pagemill_shared.errors import PagemillError, RequestError

Headers = list[tuple[bytes, bytes]]

RETRY_AFTER_S = 2
"""What clients that were sent away with 503 are told to wait."""

_STATUS_OF_CODE = {
    "grammar_checker_busy": 503,
    "grammar_timeout": 503,
    "no_worker": 503,
    "scheduler_lost": 503,
    "server_stopping": 503,
    "worker_lost": 503,
    "internal_error": 500,
    "non_finite_logits": 500,
    "model_not_found": 404,
}
"""HTTP status of the codes that a request can fail with; everything else is the request's own fault."""


class ApiError(PagemillError):
    """An error that goes to the client.

    Attributes:
        status: HTTP status; in mid-stream, where the status has been sent already, it only decides the type.
        param: the request's field that is at fault, or None.
        code: machine-readable, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if status == 503:
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_S))
        super().__init__(message)

    @classmethod
    def of(cls, error: RequestError) -> ApiError:
        return cls.of_code(error.code, error.message, error.param)

    @classmethod
    def of_code(cls, code: str, message: str, param: str | None) -> ApiError:
        """The error of a request that the scheduler or a worker has failed."""
        return cls(_STATUS_OF_CODE.get(code, 400), message, param=param or None, code=code)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object, the same in a response and in a stream."""
        return {
            "error": {"message": self.message, "type": error_type(self.status), "param": self.param, "code": self.code}
        }

    def encoded(self) -> bytes:
        return json.dumps(self.body, ensure_ascii=False).encode("utf-8", "replace")


def error_type(status: int) -> str:
    """OpenAI's ``type`` for an HTTP status."""
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    if status == 503:
        return "service_unavailable_error"
    return "server_error" if status >= 500 else "invalid_request_error"
