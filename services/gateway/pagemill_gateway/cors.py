"""Cross-origin requests: which web pages of other origins may use the API from a browser."""

from __future__ import annotations

from pagemill_gateway.errors import Headers
from pagemill_shared.errors import ConfigurationError

_EXPOSED = b"x-request-id, retry-after"
_MAX_AGE_S = b"600"


class Cors:
    """
    Args:
        origins: ``*`` or origins separated by commas; None allows none.

    Raises:
        ConfigurationError: one of them is no origin.
    """

    def __init__(self, origins: str | None) -> None:
        listed = [origin.strip() for origin in (origins or "").split(",") if origin.strip()]
        for origin in listed:
            scheme, _, rest = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not rest or "/" in rest):
                raise ConfigurationError(f"--cors-origins: {origin!r} is no origin such as https://example.org, nor *")
        self._any = "*" in listed
        self._origins = frozenset(origin.encode("latin-1", "replace") for origin in listed)

    def headers(self, origin: bytes | None) -> Headers:
        """What every answer to a page of ``origin`` carries."""
        if origin is None or not (self._any or self._origins):
            return []
        if self._any:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", _EXPOSED)]
        allowed = [(b"vary", b"Origin")]
        if origin in self._origins:
            allowed += [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED)]
        return allowed

    def preflight(self, origin: bytes | None, wanted: bytes | None) -> Headers | None:
        """The answer to a browser's question before the request itself; None where there is nothing to allow.

        Args:
            wanted: the headers that the page wants to send.
        """
        headers = self.headers(origin)
        if not any(name == b"access-control-allow-origin" for name, _ in headers):
            return None
        return [
            *headers,
            (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
            (b"access-control-allow-headers", wanted or b"authorization, content-type"),
            (b"access-control-max-age", _MAX_AGE_S),
        ]
