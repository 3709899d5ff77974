"""Matrix products by the compiled kernels, over weights that they packed.

A row computes the same bits whatever rows are beside it. The plain weights are not kept.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from pagemill_kernels.blocks import BLOCK_BYTES, BLOCK_KINDS, BLOCK_SIZE, BlockMatrix
from pagemill_kernels.interface import Linear


class CompiledLinear(Linear):
    """What products of float32 inputs have in common."""

    def __init__(self, outputs: int, inputs: int, bias: Tensor | None) -> None:
        self._outputs, self._inputs = outputs, inputs
        self._bias = None if bias is None else bias.contiguous()
        self._bias_address = None if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        if added is not None and not added.is_contiguous():
            added = added.contiguous()
        out = x.new_empty(x.shape[0], self._outputs)
        self._compute(x, None if added is None else added.data_ptr(), out)
        return out

    @abstractmethod
    def _compute(self, x: Tensor, added: int | None, out: Tensor) -> None:
        """Fills ``out``; ``added`` is an address."""


class WholeLinear(CompiledLinear):
    """Weights that the library takes in one call.

    Args:
        run: that call.
        weights: what it takes for them: addresses, and the number of their form where it has several. The product keeps
            what lies there.
    """

    def __init__(
        self, run: Callable[..., None], weights: tuple[int, ...], outputs: int, inputs: int, bias: Tensor | None
    ) -> None:
        super().__init__(outputs, inputs, bias)
        self._run, self._weights = run, weights

    def _compute(self, x: Tensor, added: int | None, out: Tensor) -> None:
        self._run(
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            self._outputs,
            self._inputs,
            *self._weights,
            self._bias_address,
            added,
            out.data_ptr(),
            torch.get_num_threads(),
        )


class PackedLinear(WholeLinear):
    """float32 weights."""

    name = "packed"

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> None:
        outputs, inputs = weight.shape
        columns = library.pm_linear_columns()
        self._packed = torch.empty(-(-outputs // columns), inputs, columns)
        address, weight = self._packed.data_ptr(), weight.contiguous()
        library.pm_linear_pack(weight.data_ptr(), outputs, inputs, address, torch.get_num_threads())
        super().__init__(library.pm_linear, (address,), outputs, inputs, bias)


class Int8Linear(CompiledLinear):
    """8-bit weights with one scale per output; inputs are brought to 8 bits with one scale per row, both symmetric.

    With q_x, q_w rounded to -127..127: ``x @ weight.T`` is taken as ``s_x * s_w * (q_x @ q_w.T)``, summed in integers.
    A row with an element that is not finite gives outputs that are not finite.
    """

    name = "int8"

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[0], weight.shape[1], bias)
        columns = library.pm_linear_columns()
        self._run = library.pm_int8_linear
        self._row_bytes = library.pm_int8_row_bytes(self._inputs)
        padded = -(-self._outputs // columns) * columns
        self._packed = torch.empty(library.pm_int8_packed_bytes(self._outputs, self._inputs), dtype=torch.int8)
        self._scales, self._shifts = torch.empty(padded), torch.empty(padded, dtype=torch.int32)
        self._addresses = self._packed.data_ptr(), self._scales.data_ptr(), self._shifts.data_ptr()
        weight = weight.contiguous()
        library.pm_int8_pack(weight.data_ptr(), self._outputs, self._inputs, *self._addresses, torch.get_num_threads())

    def _compute(self, x: Tensor, added: int | None, out: Tensor) -> None:
        workspace = torch.empty(x.shape[0] * self._row_bytes, dtype=torch.uint8)
        self._run(
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            self._outputs,
            self._inputs,
            *self._addresses,
            self._bias_address,
            added,
            out.data_ptr(),
            workspace.data_ptr(),
            torch.get_num_threads(),
        )


class BlockLinear(CompiledLinear):
    """Weights in a GGUF file's own blocks; inputs are brought to 8 bits with one scale for every 32 of a row.

    Computes what `pagemill_kernels.blocks.block_product` does, with exact integer sums within a block. A row with an
    element that is not finite gives outputs that are not finite.
    """

    name = "gguf"

    def __init__(self, library: ctypes.CDLL, weight: BlockMatrix, bias: Tensor | None) -> None:
        super().__init__(sum(part.outputs for part in weight.parts), weight.parts[0].inputs, bias)
        columns = library.pm_blocks_columns()
        self._run = library.pm_blocks_linear
        self._row_bytes = library.pm_blocks_row_bytes(self._inputs)
        self._parts: list[tuple[int, int, int, Tensor]] = []
        """Of each: its first output, outputs, number of its format, and packed weights."""
        first = 0
        for part in weight.parts:
            padded = -(-part.outputs // columns) * columns
            packed = torch.empty(padded * self._inputs // BLOCK_SIZE * BLOCK_BYTES[part.kind], dtype=torch.uint8)
            kind, data = BLOCK_KINDS.index(part.kind), part.data.contiguous()
            sizes = part.outputs, self._inputs
            library.pm_blocks_pack(kind, data.data_ptr(), *sizes, packed.data_ptr(), torch.get_num_threads())
            self._parts.append((first, part.outputs, kind, packed))
            first += part.outputs

    def _compute(self, x: Tensor, added: int | None, out: Tensor) -> None:
        workspace = torch.empty(x.shape[0] * self._row_bytes, dtype=torch.uint8)
        for first, outputs, kind, packed in self._parts:
            self._run(
                x.data_ptr(),
                x.stride(0),
                x.shape[0],
                outputs,
                self._inputs,
                kind,
                packed.data_ptr(),
                _moved(self._bias_address, first),
                _moved(added, first),
                out.data_ptr() + 4 * first,
                self._outputs,
                workspace.data_ptr(),
                torch.get_num_threads(),
            )


def _moved(address: int | None, floats: int) -> int | None:
    return None if address is None else address + 4 * floats
