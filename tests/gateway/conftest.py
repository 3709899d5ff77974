"""What tests of the gateway share."""

from __future__ import annotations

import pytest
from pagemill_testing.sockets import PATIENCE

from pagemill_gateway import streaming


@pytest.fixture
def late_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's status line waits for what comes first, tokens or a refusal, however slow the scheduler is."""
    monkeypatch.setattr(streaming, "HEADER_WAIT_S", PATIENCE)
