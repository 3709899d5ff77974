"""Whole models whose weights are kept in fewer bits: the logits have the same bits as with float32 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pagemill_testing.cpu_kernels import isa_names, loaded
from pagemill_testing.equality import LogitsLog, prompt
from pagemill_testing.plan_driver import PlanDriver
from pagemill_testing.tiny_families import FAMILIES, tiny_family
from pagemill_testing.tiny_gguf import Kind, TinyGguf
from pagemill_testing.tiny_models import make_runner, save

from pagemill_kernels.cpu.kernels import CpuKernels
from pagemill_worker.prepare import prepare_model


class WideKernels(CpuKernels):
    """Keeps every weight in float32."""

    def narrow_linear(self, dtype: torch.dtype) -> None:
        return None


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> tuple[CpuKernels, CpuKernels]:
    library = loaded(isa_names()[0], tmp_path_factory)
    return CpuKernels(library, "test"), WideKernels(library, "test")


def logits_of(folder: Path, kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[torch.Tensor]]:
    """What computed the products, and the logits of a prompt in chunks, of decode steps, and of both together."""
    runner = make_runner(folder, kernels=kernels, max_model_len=128)
    log = LogitsLog(runner, monkeypatch)
    driver = PlanDriver(runner, chunk=30)
    driver.add(prompt(70), 6)
    driver.step()
    driver.add(prompt(3, 1), 8)
    driver.run()
    return runner.model.linear_name, log.steps


def check(folder: Path, kernels: tuple[CpuKernels, CpuKernels], kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (name, narrow), (wide_name, wide) = (logits_of(folder, each, monkeypatch) for each in kernels)
    assert (name, wide_name) == (f"packed({kept})", "packed")
    assert len(narrow) == len(wide) >= 8
    assert all(map(torch.equal, narrow, wide))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "kind",
    [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.F16, Kind.BF16, Kind.F32, Kind.Q5_0, Kind.Q4_K],
    ids=lambda kind: kind.name,
)
def test_gguf_files(
    kind: Kind, tied: bool, kernels: tuple[CpuKernels, CpuKernels], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare_model(str(TinyGguf(kind=kind, tied=tied).write(tmp_path / "tiny.gguf")), tmp_path, lambda *_: None)
    own = {"F16": "fp16", "BF16": "bf16", "Q4_0": "Q4_0", "Q4_1": "Q4_1", "Q8_0": "Q8_0"}.get(kind.name)
    if own is None:
        (name, narrow), (_, wide) = (logits_of(folder, each, monkeypatch) for each in kernels)
        assert name == "packed"
        assert all(map(torch.equal, narrow, wide))
    else:
        check(folder, kernels, own, monkeypatch)


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoints_in_bfloat16(
    name: str, kernels: tuple[CpuKernels, CpuKernels], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tiny_family(name).to(torch.bfloat16), tmp_path)
    check(folder, kernels, "bf16", monkeypatch)


def test_a_weight_that_was_changed_stays_float32(
    kernels: tuple[CpuKernels, CpuKernels], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_family("llama").to(torch.bfloat16).to(torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] += 2**-14
        model.model.layers[1].mlp.down_proj.weight[3, 6] = 1 + 2**-20
    check(save(model, tmp_path), kernels, "bf16,float32", monkeypatch)
