"""Matrix products with weights that are packed once.

On a CPU in float32 the compiled kernels' own product is the fastest at every batch size of a server. Where they are
missing, oneDNN with its own weight layout reaches twice the rate of an ordinary product. torch offers that to its
compiler; the two operators are looked up here and tried before they are trusted, and the ordinary product takes their
place where they are missing, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pagemill_kernels.blocks import BlockMatrix
from pagemill_kernels.interface import Kernels, Linear, Quantization


class TorchLinear(Linear):
    name = "torch"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        result = functional.linear(x, self._weight, self._bias)
        return result if added is None else result.add_(added)


class PackedLinear(Linear):
    """oneDNN over a weight in oneDNN's layout; the plain weight is not kept."""

    name = "onednn"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # Without a batch size oneDNN chooses a layout that serves all of them.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return result if added is None else result.add_(added)


class LinearFactory:
    """Makes linears for one device and dtype.

    Args:
        kernels: the set that runs, which may have products of its own.

    Attributes:
        takes_blocks: whether it multiplies a GGUF file's blocks as they are.
        uses_blocks: whether it has a use for them, be it beside the weights.

    Raises:
        ValueError: nothing here computes with weights that are quantised so.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels[Any] | None = None,
        quantization: Quantization = "none",
    ) -> None:
        make: Callable[[Tensor, Tensor | None], Linear] | None = None
        make_blocks: Callable[[BlockMatrix, Tensor | None], Linear] | None = None
        if kernels is not None:
            make = kernels.own_linear(dtype, "int8" if quantization == "int8" else "none")
            make_blocks = kernels.block_linear(dtype)
        if {"none": False, "int8": make is None, "gguf": make_blocks is None}[quantization]:
            own = "no kernels" if kernels is None else f"the {kernels.name} kernels"
            raise ValueError(f"{own} have no {quantization} product for {str(dtype).removeprefix('torch.')}")
        self._make_narrow = kernels.narrow_linear(dtype) if kernels is not None and quantization != "int8" else None
        if make is None:
            packing = device.type == "cpu" and dtype == torch.float32 and _packing_works()
            make = PackedLinear if packing else TorchLinear
        self._make, self._make_blocks = make, make_blocks
        self._name = make(torch.zeros(1, 1, dtype=dtype, device=device), None).name
        self._narrow: set[str] = set()
        self._has_wide = False
        self.takes_blocks = quantization == "gguf"
        self.uses_blocks = self.takes_blocks or self._make_narrow is not None

    @property
    def name(self) -> str:
        """What the linears run on that it has made: with the forms in which weights are kept where that is not their
        dtype."""
        if self.takes_blocks:
            return "gguf"
        if not self._narrow:
            return self._name
        return f"{self._name}({','.join([*sorted(self._narrow), *(['float32'] if self._has_wide else [])])})"

    def __call__(
        self, weight: Tensor | BlockMatrix, bias: Tensor | None = None, stored: BlockMatrix | None = None
    ) -> Linear:
        """A linear of weight [out, in] and bias [out] or None.

        Args:
            stored: the blocks in which a file stored the weight, where it did; the result is the same without them.
        """
        if isinstance(weight, BlockMatrix):
            if self._make_blocks is None:
                raise ValueError("no kernels here multiply GGUF's blocks")
            return self._make_blocks(weight, bias)
        if self._make_narrow is not None:
            linear = self._make_narrow(weight, bias, stored)
            if linear is not None:
                self._narrow.add(linear.name)
                return linear
        self._has_wide = True
        return self._make(weight, bias)


def _packing_works() -> bool:
    """Whether torch has the operators, and they compute what they should."""
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(shape, generator=generator) for shape in ((48, 32), (48,), (5, 32)))
    expected = functional.linear(x, weight, bias)
    computed: Any
    try:
        computed = PackedLinear(weight, bias)(x)
    except (AttributeError, RuntimeError, TypeError):  # not in this build, or with another signature
        return False
    return isinstance(computed, Tensor) and torch.allclose(computed, expected, atol=1e-4)
