"""Weights in the blocks in which GGUF files store them, and what a product with them computes.

A block holds 32 weights of one output, those of a row lie side by side (ggml's formats, all numbers little-endian):

    Q4_0  d (float16), 16 bytes: byte i has weight i in its low and weight i + 16 in its high 4 bits; w = d * (q - 8)
    Q4_1  d, m (float16), 16 bytes as above; w = d * q + m
    Q8_0  d (float16), 32 signed bytes; w = d * q
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

BlockKind = Literal["Q4_0", "Q4_1", "Q8_0"]
BLOCK_KINDS: tuple[BlockKind, ...] = get_args(BlockKind)
BLOCK_SIZE = 32
BLOCK_BYTES: dict[BlockKind, int] = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Some outputs of a matrix, all in one format.

    Attributes:
        data: [outputs, inputs / 32 * bytes of a block] uint8.
    """

    kind: BlockKind
    data: Tensor

    @property
    def outputs(self) -> int:
        return self.data.shape[0]

    @property
    def inputs(self) -> int:
        return self.data.shape[1] // BLOCK_BYTES[self.kind] * BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A matrix [outputs, inputs]: parts of equal inputs, one below the other."""

    parts: tuple[BlockPart, ...]


def dequantised(part: BlockPart) -> Tensor:
    """[outputs, inputs] float32."""
    blocks = part.data.view(part.outputs, -1, BLOCK_BYTES[part.kind])
    scale = blocks[..., :2].contiguous().view(torch.float16).float()
    if part.kind == "Q8_0":
        return (blocks[..., 2:].contiguous().view(torch.int8).float() * scale).flatten(1)
    packed = blocks[..., -16:]
    numbers = torch.cat((packed & 15, packed >> 4), -1).float()
    if part.kind == "Q4_0":
        return ((numbers - 8) * scale).flatten(1)
    least = blocks[..., 2:4].contiguous().view(torch.float16).float()
    return (numbers * scale + least).flatten(1)


def rounded_inputs(x: Tensor) -> Tensor:
    """[T, inputs] as products with blocks see it: in every 32 elements, 8-bit multiples of their largest / 127."""
    groups = x.float().reshape(x.shape[0], -1, BLOCK_SIZE)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0)
    return ((groups * inverse).clamp(-127, 127).round() * scale).flatten(1)


def block_product(x: Tensor, matrix: BlockMatrix) -> Tensor:
    """[T, outputs] of [T, inputs]: the specification of compiled products with blocks."""
    return rounded_inputs(x) @ torch.cat([dequantised(part) for part in matrix.parts]).T
