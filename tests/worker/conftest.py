"""Random tensors that do not depend on which tests ran before in this process."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    torch.manual_seed(int(os.environ.get("PAGEMILL_TEST_SEED", "0")))
