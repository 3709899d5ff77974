"""Sockets in a folder of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pagemill_testing.channels import Bench
from pagemill_testing.sockets import ipc_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with ipc_folder() as path:
        yield path


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)
