"""What holds for every test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

# How long an example takes tells of the machine and of what else runs there.
settings.register_profile("pagemill", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("pagemill")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A command that a test calls in this process sets up the logs for good, on a stream that pytest closes; every
    later line of a server in a thread would then be a traceback."""
    root = logging.getLogger()
    handlers, level, configured = list(root.handlers), root.level, structlog.get_config()
    yield
    if structlog.get_config() != configured:
        structlog.configure(**configured)
    root.handlers[:] = handlers
    root.setLevel(level)
