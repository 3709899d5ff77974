"""Products of GGUF's blocks: the plain ones against the gguf package, the compiled ones against the plain ones, for
every instruction set that this machine has."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from pagemill_testing.cpu_kernels import assert_rows_are_independent, library_params, opened

from pagemill_kernels.blocks import BLOCK_KINDS, BlockKind, BlockMatrix, BlockPart, block_product, dequantised
from pagemill_kernels.cpu.kernels import CpuKernels
from pagemill_kernels.cpu.linear import BlockLinear, PackedLinear
from pagemill_kernels.linear import LinearFactory
from pagemill_kernels.reference import TorchKernels

CPU = torch.device("cpu")
SHAPES = [(1, 32), (7, 64), (33, 96), (131, 1536), (960, 576)]


@pytest.fixture(scope="module", params=library_params())
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    with opened(request.param, tmp_path_factory) as library:
        yield library


def stored(kind: BlockKind, weight: torch.Tensor) -> BlockPart:
    return BlockPart(kind, torch.from_numpy(quantize(weight.numpy(), GGMLQuantizationType[kind])))


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_plain_weights_are_those_of_the_gguf_package(kind: BlockKind) -> None:
    part = stored(kind, torch.randn(5, 96) + 0.3)
    expected = torch.from_numpy(dequantize(part.data.numpy(), GGMLQuantizationType[kind]))
    assert torch.equal(dequantised(part), expected)
    assert (part.outputs, part.inputs) == (5, 96)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_products(library: ctypes.CDLL, kind: BlockKind, outputs: int, inputs: int, bias: bool) -> None:
    matrix = BlockMatrix((stored(kind, torch.randn(outputs, inputs) + 0.2),))
    offset = torch.randn(outputs) if bias else None
    product = BlockLinear(library, matrix, offset)
    for rows in [*range(1, 10), 17, 33, 170]:
        x, added = torch.randn(rows, inputs) * 5, torch.randn(rows, outputs) if rows % 2 else None
        x[rows // 2] = 0
        expected = block_product(x, matrix) + (0 if offset is None else offset) + (0 if added is None else added)
        torch.testing.assert_close(product(x, added), expected, atol=2e-3, rtol=2e-5)


def test_parts_of_different_formats(library: ctypes.CDLL) -> None:
    parts = [stored(kind, torch.randn(outputs, 64)) for kind, outputs in zip(BLOCK_KINDS, (40, 9, 33), strict=True)]
    matrix, offset = BlockMatrix(tuple(parts)), torch.randn(82)
    wide = torch.randn(5, 200)
    x, added = wide[:, 10:74], torch.randn(82, 5).T
    expected = block_product(x, matrix) + offset + added
    torch.testing.assert_close(BlockLinear(library, matrix, offset)(x, added), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_the_largest_sums(library: ctypes.CDLL, kind: BlockKind) -> None:
    for byte in (0x00, 0x7F, 0x80, 0x81, 0xFF):
        data = np.full((33, 4, {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]), byte, np.uint8)
        data[..., :2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
        if kind == "Q4_1":
            data[..., 2:4] = np.frombuffer(np.float16(-2).tobytes(), np.uint8)
        matrix = BlockMatrix((BlockPart(kind, torch.from_numpy(data.reshape(33, -1))),))
        for sign in (127.0, -127.0):
            x = torch.full((3, 128), sign)
            torch.testing.assert_close(BlockLinear(library, matrix, None)(x), block_product(x, matrix))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_a_row_computes_the_same_bits_in_any_batch(library: ctypes.CDLL, kind: BlockKind, threads: int) -> None:
    product = BlockLinear(library, BlockMatrix((stored(kind, torch.randn(1000, 576)),)), torch.randn(1000))
    x = torch.randn(170, 576)
    alone = torch.cat([product(row.unsqueeze(0)) for row in x[:30]])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for rows in (2, 3, 4, 7, 9, 11, 23, 30, 170):
            assert torch.equal(product(x[:rows])[:30], alone[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("outlier", [1e4, 1e30, torch.inf, torch.nan])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_an_outlier_in_one_row_leaves_the_others_as_they_are(
    library: ctypes.CDLL, kind: BlockKind, outlier: float
) -> None:
    product = BlockLinear(library, BlockMatrix((stored(kind, torch.randn(300, 576)),)), None)
    assert_rows_are_independent(product, outlier)


def test_the_factory_uses_them_where_weights_are_blocks(library: ctypes.CDLL) -> None:
    factory = LinearFactory(torch.float32, CPU, CpuKernels(library, "test"), "gguf")
    assert factory.name == "gguf"
    assert isinstance(factory(BlockMatrix((stored("Q4_0", torch.randn(4, 32)),))), BlockLinear)
    assert isinstance(factory(torch.randn(4, 32)), PackedLinear)


def test_blocks_without_kernels_for_them_are_refused(library: ctypes.CDLL) -> None:
    for dtype, kernels in ((torch.bfloat16, CpuKernels(library, "test")), (torch.float32, TorchKernels())):
        with pytest.raises(ValueError, match="no gguf product for"):
            LinearFactory(dtype, CPU, kernels, "gguf")
    with pytest.raises(ValueError, match="GGUF's blocks"):
        LinearFactory(torch.float32, CPU)(BlockMatrix((stored("Q8_0", torch.randn(4, 32)),)))
