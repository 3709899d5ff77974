"""float32 products whose weights are kept in fewer bits, where that loses nothing.

Most checkpoints were saved in bfloat16 or float16, and a GGUF file's own blocks are smaller still. The compiled product
makes float32 weights of them in registers, so that a row computes the very bits that it computes with float32 weights,
and reads half as many bytes, or a seventh. Whether a form holds the weights exactly is found out by trying: what was
packed is compared with them, number by number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from pagemill_kernels.blocks import BLOCK_KINDS, BLOCK_SIZE, BlockMatrix
from pagemill_kernels.cpu.linear import WholeLinear
from pagemill_kernels.cpu.pages import LargePages

NARROW_KINDS = ("bf16", "fp16", *BLOCK_KINDS)
"""In the order of ``Kind`` of source/linear_narrow.cpp."""


class NarrowLinear(WholeLinear):
    """float32 inputs times float32 weights that are stored as ``name``, one of `NARROW_KINDS`."""

    def __init__(
        self, library: ctypes.CDLL, kind: int, packed: Tensor, outputs: int, inputs: int, bias: Tensor | None
    ) -> None:
        super().__init__(library.pm_narrow_linear, (kind, packed.data_ptr()), outputs, inputs, bias)
        self.name = NARROW_KINDS[kind]
        self._packed = packed

    @property
    def packed_bytes(self) -> int:
        """Bytes that the weights take."""
        return self._packed.nbytes


def narrow_linear(
    library: ctypes.CDLL, pages: LargePages, weight: Tensor, bias: Tensor | None, stored: BlockMatrix | None
) -> NarrowLinear | None:
    """A product of ``weight`` [out, in] float32 in the smallest form that holds it exactly; None where none does.

    Args:
        pages: where it is kept.
        stored: blocks that may be where the weight came from.
    """
    weight = weight.contiguous()
    outputs, inputs = weight.shape
    for kind, data in _forms(stored, inputs):
        packed = pages.reserve(library.pm_narrow_packed_bytes(kind, outputs, inputs))
        blocks = None if data is None else data.data_ptr()
        arguments = weight.data_ptr(), blocks, outputs, inputs, packed.data_ptr(), torch.get_num_threads()
        if library.pm_narrow_pack(kind, *arguments):
            pages.keep(packed)
            return NarrowLinear(library, kind, packed, outputs, inputs, bias)
    return None


def _forms(stored: BlockMatrix | None, inputs: int) -> Iterator[tuple[int, Tensor | None]]:
    """Kinds to try, smallest first, and the blocks of those that have some. Parts of different kinds have none."""
    if stored is not None and len({part.kind for part in stored.parts}) == 1 and inputs % BLOCK_SIZE == 0:
        data = [part.data for part in stored.parts]
        whole = data[0].contiguous() if len(data) == 1 else torch.cat(data)
        yield NARROW_KINDS.index(stored.parts[0].kind), whole
    yield NARROW_KINDS.index("bf16"), None
    yield NARROW_KINDS.index("fp16"), None
