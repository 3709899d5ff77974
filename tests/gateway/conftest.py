"""What tests of the gateway share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pagemill_testing.gateway_server import Stage, stage
from pagemill_testing.sockets import PATIENCE

from pagemill_gateway import streaming


@pytest.fixture(scope="module")
def api() -> Iterator[Stage]:
    """A gateway and the stub that it is connected to; a test that needs other settings starts its own."""
    with stage() as running:
        yield running


@pytest.fixture
def late_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's status line waits for what comes first, tokens or a refusal, however slow the scheduler is."""
    monkeypatch.setattr(streaming, "HEADER_WAIT_S", PATIENCE)
