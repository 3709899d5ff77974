"""How many generations a gateway serves at once, and for how long."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagemill_gateway.errors import RETRY_AFTER_S, ApiError


@dataclass(frozen=True, slots=True)
class Limits:
    """
    Attributes:
        max_concurrent_requests: open ones, None for no limit.
        max_waiting_requests: those among them that have no token yet, None for no limit.
        request_timeout: seconds from a request's arrival to its end, None for as long as it takes.
    """

    max_concurrent_requests: int | None = None
    max_waiting_requests: int | None = None
    request_timeout: float | None = None

    def check(self, open_requests: int, waiting: int) -> None:
        """Raises ApiError 429 or 503 when one more would be too many."""
        if self.max_concurrent_requests is not None and open_requests >= self.max_concurrent_requests:
            raise ApiError(
                429,
                f"{open_requests} requests are open, which is as many as this server takes",
                code="too_many_requests",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        if self.max_waiting_requests is not None and waiting >= self.max_waiting_requests:
            raise ApiError(503, f"{waiting} requests wait for their first token already", code="queue_full")

    def timeout_of(self, header: bytes | None) -> float | None:
        """Seconds that a request may take: what the server allows, or less where its ``X-Request-Timeout`` says so.

        Raises:
            ApiError: 400, the header is no number of seconds.
        """
        if header is None:
            return self.request_timeout
        try:
            wanted = float(header)
        except ValueError:
            wanted = math.nan
        if not 0 < wanted < math.inf:
            raise ApiError(400, "X-Request-Timeout must be a number of seconds, more than 0", code="invalid_value")
        return wanted if self.request_timeout is None else min(wanted, self.request_timeout)


def timed_out(seconds: float) -> ApiError:
    return ApiError(504, f"the request was not complete within {seconds:g} s", code="request_timeout")
