"""The compiled products and row operations against torch's, for every instruction set that this machine has or
emulates."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from pagemill_testing.cpu_kernels import assert_rows_are_independent, library_params, opened
from torch.nn import functional

from pagemill_kernels.cpu.kernels import CpuKernels
from pagemill_kernels.cpu.linear import CompiledLinear, Int8Linear, PackedLinear
from pagemill_kernels.linear import LinearFactory
from pagemill_kernels.reference import TorchKernels

CPU = torch.device("cpu")
SHAPES = [(1, 1), (7, 3), (16, 16), (33, 50), (96, 80), (131, 577), (960, 576)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module", params=library_params())
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    with opened(request.param, tmp_path_factory) as library:
        yield library


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_products(library: ctypes.CDLL, outputs: int, inputs: int, bias: bool, added: bool) -> None:
    weight, offset = torch.randn(outputs, inputs), torch.randn(outputs) if bias else None
    product = PackedLinear(library, weight, offset)
    for rows in [*range(1, 18), 27, 28, 29, 33, 97, 225, 260]:
        x, more = torch.randn(rows, inputs), torch.randn(rows, outputs) if added else None
        expected = functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
        expected = expected if more is None else expected + more.double()
        torch.testing.assert_close(product(x, more).double(), expected, atol=2e-4, rtol=1e-5)


def test_rows_beside_others_in_a_wider_tensor(library: ctypes.CDLL) -> None:
    weight, wide = torch.randn(50, 30), torch.randn(5, 90)
    product = PackedLinear(library, weight, None)
    for x in (wide[:, 30:60], wide[:, ::3], wide.T[:30].T):
        torch.testing.assert_close(product(x), functional.linear(x, weight), atol=1e-4, rtol=1e-4)
    assert product(wide[:0, :30]).shape == (0, 50)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", [PackedLinear, Int8Linear])
def test_a_row_computes_the_same_bits_in_any_batch(
    library: ctypes.CDLL, threads: int, kind: type[PackedLinear] | type[Int8Linear]
) -> None:
    product: CompiledLinear = kind(library, torch.randn(1500, 576), torch.randn(1500))
    x = torch.randn(300, 576)
    alone = torch.cat([product(row.unsqueeze(0)) for row in x[:40]])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for rows in (2, 3, 8, 13, 15, 31, 40, 300):
            assert torch.equal(product(x[:rows])[:40], alone[:rows])
        x[5] = torch.nan
        x[6] *= 1e6
        untouched = [i for i in range(40) if i not in (5, 6)]
        assert torch.equal(product(x)[untouched], alone[untouched])
    finally:
        torch.set_num_threads(before)


def test_the_factory_uses_them(library: ctypes.CDLL) -> None:
    kernels = CpuKernels(library, "test")
    factory = LinearFactory(torch.float32, CPU, kernels)
    assert factory.name == "packed"
    assert isinstance(factory(torch.randn(4, 4)), PackedLinear)
    assert LinearFactory(torch.bfloat16, CPU, kernels).name == "torch"


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row in 8 bits, and its scale: the specification."""
    scale = x.abs().amax(1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0)
    return (x * inverse).clamp(-127, 127).round(), scale


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_int8_products_are_exact_sums(library: ctypes.CDLL, outputs: int, inputs: int, bias: bool) -> None:
    weight, offset = torch.randn(outputs, inputs), torch.randn(outputs) if bias else None
    weight[outputs // 2] = 0
    q_w, s_w = quantised(weight)
    product = Int8Linear(library, weight, offset)
    for rows in [*range(1, 16), 28, 29, 260]:
        x, added = torch.randn(rows, inputs) * 5, torch.randn(rows, outputs) if rows % 2 else None
        x[rows // 2] = 0
        q_x, s_x = quantised(x)
        expected = (q_x.double() @ q_w.double().T) * (s_x.double() * s_w.double().T)
        expected = expected + (0 if offset is None else offset) + (0 if added is None else added)
        torch.testing.assert_close(product(x, added).double(), expected, atol=2e-5, rtol=2e-5)


def test_int8_with_the_largest_sums(library: ctypes.CDLL) -> None:
    # What saturates in 16 bits, and what does not fit into 24.
    for sign in (1, -1):
        result = Int8Linear(library, torch.full((33, 4096), float(sign)), None)(torch.ones(3, 4096))
        torch.testing.assert_close(result, torch.full((3, 33), 4096.0 * sign), atol=0, rtol=1e-6)


def test_int8_error_is_that_of_8_bits(library: ctypes.CDLL) -> None:
    weight, x = torch.randn(960, 576), torch.randn(64, 576)
    expected = functional.linear(x, weight)
    error = (Int8Linear(library, weight, None)(x) - expected).norm() / expected.norm()
    assert error < 0.015


@pytest.mark.parametrize("outlier", [1e4, 1e30, torch.inf, torch.nan])
def test_an_outlier_in_one_row_leaves_the_others_as_they_are(library: ctypes.CDLL, outlier: float) -> None:
    product = Int8Linear(library, torch.randn(960, 576), None)
    assert_rows_are_independent(product, outlier)


def test_quantisation_without_kernels_for_it_is_refused(library: ctypes.CDLL) -> None:
    assert LinearFactory(torch.float32, CPU, CpuKernels(library, "test"), "int8").name == "int8"
    for dtype, kernels in ((torch.bfloat16, CpuKernels(library, "test")), (torch.float32, TorchKernels())):
        with pytest.raises(ValueError, match="no int8 product for"):
            LinearFactory(dtype, CPU, kernels, "int8")


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("size", [1, 5, 16, 64, 100, 576])
def test_row_operations(library: ctypes.CDLL, dtype: torch.dtype, size: int) -> None:
    kernels = CpuKernels(library, "test")
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    for rows in (1, 3, 400):
        x, weight = (torch.randn(rows, size) * 3).to(dtype), torch.randn(size).to(dtype)
        expected = functional.rms_norm(x.float(), (size,), weight.float(), 1e-5).to(dtype)
        torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), expected, **close)
        gate_up = (torch.randn(rows, 2 * size) * 8).to(dtype)
        gate, up = gate_up.float().chunk(2, -1)
        torch.testing.assert_close(kernels.silu_mul(gate_up), (functional.silu(gate) * up).to(dtype), **close)
        expected = (functional.gelu(gate, approximate="tanh") * up).to(dtype)
        torch.testing.assert_close(kernels.gelu_tanh_mul(gate_up), expected, **close)
    assert kernels.calls == {"rms_norm": 3, "silu_mul": 3, "gelu_tanh_mul": 3}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_norm_of_heads(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    kernels = CpuKernels(library, "test")
    for rows, all_heads, heads, size in ((1, 3, 2, 16), (7, 12, 10, 80), (300, 6, 5, 5)):
        qkv, weights = (torch.randn(rows, all_heads, size) * 3).to(dtype), torch.randn(heads, size).to(dtype)
        plain, mixed = qkv.clone(), qkv.clone()
        TorchKernels().norm_heads(plain, weights, 1e-5)
        for head in range(heads):
            expected = functional.rms_norm(qkv[:, head].float(), (size,), weights[head].float(), 1e-5)
            torch.testing.assert_close(plain[:, head].float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert torch.equal(plain[:, heads:], qkv[:, heads:])
        kernels.norm_heads(qkv, weights, 1e-5)
        torch.testing.assert_close(qkv, plain, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        kernels.norm_heads(mixed, weights.float(), 1e-5)
        torch.testing.assert_close(mixed, plain, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert kernels.calls["norm_heads"] == (6 if dtype == torch.float32 else 3)


def test_row_operations_at_the_edges(library: ctypes.CDLL) -> None:
    kernels = CpuKernels(library, "test")
    gates = torch.tensor([[-1e4, -100, -88, -87, -1e-30, 0, 87, 88, 100, 1e4, *[0.5] * 22]])
    result = kernels.silu_mul(torch.cat((gates, torch.ones_like(gates)), 1))
    torch.testing.assert_close(result, functional.silu(gates), atol=1e-30, rtol=1e-5)
    result = kernels.gelu_tanh_mul(torch.cat((gates, torch.ones_like(gates)), 1))
    torch.testing.assert_close(result, functional.gelu(gates, approximate="tanh"), atol=1e-30, rtol=1e-5)
    x = torch.randn(3, 32)
    x[1, 3] = torch.nan
    result = kernels.rms_norm(x, torch.ones(32), 1e-6)
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()
    strided = torch.randn(8, 64)[::2]
    torch.testing.assert_close(kernels.silu_mul(strided), kernels.silu_mul(strided.contiguous()))
    assert kernels.calls["silu_mul:torch"] == 1
