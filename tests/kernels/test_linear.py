"""Packed products against ordinary ones."""

from __future__ import annotations

import pytest
import torch

from pagemill_kernels import linear
from pagemill_kernels.linear import LinearFactory, PackedLinear, TorchLinear

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 200])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_right_at_every_batch_size(rows: int, bias: bool, dtype: torch.dtype) -> None:
    weight, x = torch.randn(96, 80, dtype=dtype), torch.randn(rows, 80, dtype=dtype)
    offset = torch.randn(96, dtype=dtype) if bias else None
    result = LinearFactory(dtype, CPU)(weight, offset)(x)
    torch.testing.assert_close(result, torch.nn.functional.linear(x, weight, offset), atol=1e-4, rtol=1e-4)


def test_packed_products_run_where_torch_has_them() -> None:
    if not linear._packing_works():
        pytest.skip("this torch build has no packed products")
    assert LinearFactory(torch.float32, CPU).name == "onednn"
    assert isinstance(LinearFactory(torch.float32, CPU)(torch.randn(4, 4)), PackedLinear)
    assert LinearFactory(torch.bfloat16, CPU).name == "torch"


def test_ordinary_products_take_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedLinear, "__call__", lambda self, x: torch.zeros(x.shape[0], 48))
    assert LinearFactory(torch.float32, CPU).name == "torch"

    def missing(*_: object) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(PackedLinear, "__init__", missing)
    assert isinstance(LinearFactory(torch.float32, CPU)(torch.randn(4, 4)), TorchLinear)


def test_a_row_does_not_depend_on_its_mates() -> None:
    product = LinearFactory(torch.float32, CPU)(torch.randn(96, 80))
    x = torch.randn(32, 80)
    x[5] = torch.nan
    x[6] *= 1e6
    alone, together = product(x[:1]), product(x)
    torch.testing.assert_close(together[:1], alone, atol=1e-4, rtol=1e-4)
    assert torch.isfinite(together[[0, 4, 7, 31]]).all()
