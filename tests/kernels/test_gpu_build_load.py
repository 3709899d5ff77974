"""Which devices the Triton kernels are chosen for."""

from __future__ import annotations

import pytest
import torch

from pagemill_kernels.gpu import load
from pagemill_kernels.gpu.load import UnsupportedError, load_gpu_kernels, why_not
from pagemill_kernels.reference import TorchKernels
from pagemill_kernels.select import select_kernels

CUDA = torch.device("cuda")


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """A CUDA device as far as questions about it go."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"multi_processor_count": 132})
    )


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not("H200", (9, 0), is_nvidia=True) is None
    assert why_not("T4", (7, 5), is_nvidia=True) == ("T4 has compute capability 7.5, and the Triton kernels need 8.0")
    assert "this is MI300" in str(why_not("MI300", (9, 4), is_nvidia=False))
    monkeypatch.setattr(load, "find_spec", lambda _: None)
    assert why_not("H200", (9, 0), is_nvidia=True) == "the package triton is not installed"


def test_a_gpu_gets_the_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))
    said: list[str] = []
    assert select_kernels(CUDA, report=said.append).name == "triton"
    assert said == []


def test_an_old_gpu_gets_plain_torch_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (7, 5))
    with pytest.raises(UnsupportedError, match="need 8"):
        load_gpu_kernels(CUDA)
    said: list[str] = []
    assert isinstance(select_kernels(CUDA, report=said.append), TorchKernels)
    assert said == [
        "warning: plain torch runs in place of faster kernels: "
        "a GPU has compute capability 7.5, and the Triton kernels need 8.0"
    ]
