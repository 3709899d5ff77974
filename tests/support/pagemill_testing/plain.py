"""For tests that replace functions of the scheduler's core: compiled, it calls its own directly."""

from __future__ import annotations

import pytest

import pagemill_scheduler.core  # noqa: F401  (whether it runs compiled is known once it is imported)
from pagemill_scheduler import compiled

needs_plain_core = pytest.mark.skipif(
    compiled.in_use(), reason="replaces a function of the core, which runs compiled; tests/scheduler/test_compiled.py"
)
"""Files that use it are listed in tests/scheduler/test_compiled.py, which runs them on plain Python then."""
