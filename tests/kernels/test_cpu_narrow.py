"""float32 products with weights in fewer bits against those with float32 weights: the same bits, for every instruction
set that this machine has or emulates."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from pagemill_testing.cpu_kernels import assert_rows_are_independent, library_params, opened
from torch import Tensor

from pagemill_kernels.blocks import BLOCK_KINDS, BlockKind, BlockMatrix, BlockPart, dequantised
from pagemill_kernels.cpu.kernels import CpuKernels
from pagemill_kernels.cpu.linear import PackedLinear
from pagemill_kernels.cpu.narrow import NARROW_KINDS, NarrowLinear, narrow_linear
from pagemill_kernels.cpu.pages import LargePages
from pagemill_kernels.linear import LinearFactory

CPU = torch.device("cpu")
ROWS = [*range(14), 17, 24, 25, 33, 64, 65, 100, 193, 260]


@pytest.fixture(scope="module", params=library_params())
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    with opened(request.param, tmp_path_factory) as library:
        yield library


def blocks_of(kind: BlockKind, weight: Tensor) -> BlockMatrix:
    return BlockMatrix((BlockPart(kind, torch.from_numpy(quantize(weight.numpy(), GGMLQuantizationType[kind]))),))


def weight_of(kind: str, outputs: int, inputs: int) -> tuple[Tensor, BlockMatrix | None]:
    """A weight that ``kind`` holds exactly, and its blocks."""
    weight = torch.randn(outputs, inputs) + 0.2
    weight[0, 0] = 1 + 2**-10  # float16 has it and bfloat16 has not
    if kind in BLOCK_KINDS:
        blocks = blocks_of(kind, weight)
        return dequantised(blocks.parts[0]), blocks
    return weight.to({"bf16": torch.bfloat16, "fp16": torch.float16}[kind]).float(), None


def narrowed(
    library: ctypes.CDLL, kind: str, weight: Tensor, bias: Tensor | None, blocks: BlockMatrix | None
) -> NarrowLinear:
    made = narrow_linear(library, LargePages(), weight, bias, blocks)
    assert made is not None
    assert made.name == kind
    return made


@pytest.mark.parametrize("kind", NARROW_KINDS)
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 1), (7, 3), (33, 50), (131, 577), (1, 32), (65, 96), (100, 576), (9, 800), (40, 1601)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_products_have_the_bits_of_float32_ones(
    library: ctypes.CDLL, kind: str, outputs: int, inputs: int, bias: bool
) -> None:
    if kind in BLOCK_KINDS:
        inputs = -(-inputs // 32) * 32
    weight, blocks = weight_of(kind, outputs, inputs)
    offset = torch.randn(outputs) if bias else None
    narrow, wide = narrowed(library, kind, weight, offset, blocks), PackedLinear(library, weight, offset)
    for rows in ROWS:
        x, added = torch.randn(rows, inputs), torch.randn(rows, outputs) if rows % 2 else None
        assert torch.equal(narrow(x, added), wide(x, added))


@pytest.mark.parametrize("kind", NARROW_KINDS)
def test_rows_beside_others_in_a_wider_tensor(library: ctypes.CDLL, kind: str) -> None:
    weight, blocks = weight_of(kind, 50, 64)
    narrow, wide = narrowed(library, kind, weight, None, blocks), PackedLinear(library, weight, None)
    data = torch.randn(40, 200)
    for x in (data[:, 30:94], data[:3, 30:94], data[:, ::3][:, :64], data.T[:64].T[:64, :64]):
        assert torch.equal(narrow(x), wide(x.contiguous()))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", NARROW_KINDS)
def test_a_row_computes_the_same_bits_in_any_batch(library: ctypes.CDLL, kind: str, threads: int) -> None:
    weight, blocks = weight_of(kind, 1500, 576)
    product = narrowed(library, kind, weight, torch.randn(1500), blocks)
    x = torch.randn(260, 576)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([product(row.unsqueeze(0)) for row in x[:15]])
        torch.set_num_threads(threads)
        for rows in (1, 2, 4, 5, 12, 13, 15, 65, 260):
            assert torch.equal(product(x[:rows])[:15], alone[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("outlier", [1e30, torch.inf, torch.nan])
@pytest.mark.parametrize("kind", NARROW_KINDS)
def test_an_outlier_in_one_row_leaves_the_others_as_they_are(library: ctypes.CDLL, kind: str, outlier: float) -> None:
    weight, blocks = weight_of(kind, 300, 576)
    assert_rows_are_independent(narrowed(library, kind, weight, None, blocks), outlier)


def floats(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


ZEROS, DENORMAL, SMALLEST_HALF = floats(0, 0x80000000), floats(0x00010000, 0x807F0000), floats(0x33800000)
INFINITE, QUIET, LOUD = floats(0x7F800000, 0xFF800000), floats(0x7FC00000, 0xFFC10000), floats(0x7F810000)


@pytest.mark.parametrize(
    ("special", "kind"),
    [
        (ZEROS, "bf16"),
        (DENORMAL, "bf16"),  # of float32 and of bfloat16
        (INFINITE, "bf16"),
        (QUIET, "bf16"),
        (LOUD, "bf16"),
        (floats(0x3F802000), "fp16"),
        (floats(0x3F801000), None),  # one bit too many
        (torch.cat((SMALLEST_HALF, floats(0x3F802000), ZEROS, INFINITE)), "fp16"),
        (floats(0x3F800001), None),
        (floats(0x3F802000, 0x00010000), None),  # each of the two numbers rules out one of the two kinds
        (floats(0x3F802000, 0x7F7F0000), None),
        (floats(0x00000001), None),
        (floats(0x7F800001), None),
    ],
)
def test_what_is_held_exactly(library: ctypes.CDLL, special: Tensor, kind: str | None) -> None:
    """One number in a large matrix decides, wherever it stands; a zero has a sign, and what is no number its bits."""
    for at in (0, 33 * 50 // 2, 33 * 50 - special.numel()):
        weight = torch.randn(33, 50).bfloat16().clamp(-3, 3).float()
        weight[weight.abs() < 2**-6] = 1.0
        weight.view(-1)[at : at + special.numel()] = special
        made = narrow_linear(library, LargePages(), weight, None, None)
        assert (None if made is None else made.name) == kind
        if made is not None and weight.isfinite().all():
            x = torch.randn(3, 50)
            assert torch.equal(made(x), PackedLinear(library, weight, None)(x))


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_blocks_that_are_not_the_weights_are_left(library: ctypes.CDLL, kind: BlockKind) -> None:
    weight, blocks = weight_of(kind, 70, 64)
    for output, k in ((0, 0), (69, 63), (40, 31)):
        other = weight.clone()
        other[output, k] = torch.nextafter(other[output, k], torch.tensor(torch.inf))
        assert narrow_linear(library, LargePages(), other, None, blocks) is None
    # As a file of another format is kept: in blocks that come close.
    assert narrow_linear(library, LargePages(), torch.randn(70, 64), None, blocks) is None


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_blocks_with_the_largest_and_the_smallest_scales(library: ctypes.CDLL, kind: BlockKind) -> None:
    weight, _ = weight_of(kind, 40, 64)
    for scale in (1e-7, 1e-5, 100.0):
        blocks = blocks_of(kind, weight * scale)
        exact = dequantised(blocks.parts[0])
        x = torch.randn(3, 64)
        product = narrowed(library, kind, exact, None, blocks)
        assert torch.equal(product(x), PackedLinear(library, exact, None)(x))


def test_parts_of_one_kind_are_one_matrix_and_others_stay_float32(library: ctypes.CDLL) -> None:
    parts = [weight_of(kind, outputs, 64) for kind, outputs in (("Q4_1", 40), ("Q4_1", 9), ("Q8_0", 33))]
    blocks = [blocks.parts[0] for _, blocks in parts if blocks is not None]
    same, mixed = torch.cat([weight for weight, _ in parts[:2]]), torch.cat([weight for weight, _ in parts])
    x = torch.randn(5, 64)
    product = narrowed(library, "Q4_1", same, None, BlockMatrix(tuple(blocks[:2])))
    assert torch.equal(product(x), PackedLinear(library, same, None)(x))
    assert narrow_linear(library, LargePages(), mixed, None, BlockMatrix(tuple(blocks))) is None


def test_how_many_bytes_they_take(library: ctypes.CDLL) -> None:
    sizes = {"bf16": 2.0, "fp16": 2.0, "Q4_0": 0.5625, "Q4_1": 0.625, "Q8_0": 1.0625}
    for kind, each in sizes.items():
        weight, blocks = weight_of(kind, 96, 64)
        assert narrowed(library, kind, weight, None, blocks).packed_bytes == 96 * 64 * each


def test_the_factory_uses_them_and_says_so(library: ctypes.CDLL) -> None:
    factory = LinearFactory(torch.float32, CPU, CpuKernels(library, "test"))
    weight, blocks = weight_of("Q4_0", 4, 32)
    assert isinstance(factory(weight, None, blocks), NarrowLinear)
    assert isinstance(factory(weight.bfloat16().float()), NarrowLinear)
    assert factory.name == "packed(Q4_0,bf16)"
    assert isinstance(factory(torch.randn(4, 32)), PackedLinear)
    assert factory.name == "packed(Q4_0,bf16,float32)"
    assert not isinstance(LinearFactory(torch.float32, CPU, CpuKernels(library, "test"), "int8")(weight), NarrowLinear)
