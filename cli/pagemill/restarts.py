"""How often, and after how long a pause, a part that died is started again."""

from __future__ import annotations

from collections import deque


class RestartBudget:
    """At most ``limit`` restarts within ``window`` seconds; the pause before each doubles.

    Pure: the caller says what time it is.
    """

    def __init__(
        self, *, limit: int = 5, window: float = 60.0, first_pause: float = 0.25, longest_pause: float = 8.0
    ) -> None:
        self.limit = limit
        self.window = window
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._deaths: deque[float] = deque()

    def died(self, now: float) -> float | None:
        """Seconds to wait before the next start, or None when the budget is spent. ``now`` in seconds."""
        while self._deaths and self._deaths[0] <= now - self.window:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > self.limit:
            return None
        return min(self._longest_pause, self._first_pause * 2.0 ** (len(self._deaths) - 1))
