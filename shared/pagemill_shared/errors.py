"""Errors that cross a part's border. Each says whose fault it was."""

from __future__ import annotations


class PagemillError(Exception):
    """Base of every error that pagemill raises on purpose."""


class ProtocolError(PagemillError):
    """A peer sent bytes that are not a valid message. Never reaches the scheduler core.

    ``peer`` names the sender when the channel knows it.
    """

    def __init__(self, reason: str, peer: str | None = None) -> None:
        self.reason = reason
        self.peer = peer
        super().__init__(f"{reason} (from {peer})" if peer else reason)


class ConfigurationError(PagemillError):
    """The operator asked for something that cannot be: a bad flag, a missing model, a port in use.

    Commands print it as one line and exit with status 2, without a traceback.
    """


class RequestError(PagemillError):
    """A request that cannot be served, with the field that is at fault.

    ``code`` is machine-readable (``context_length_exceeded``), ``param`` names the request field or is None.
    """

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        self.message = message
        self.code = code
        self.param = param
        super().__init__(message)
