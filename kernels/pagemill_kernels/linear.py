"""Matrix products with weights that are packed once.

On a CPU in float32 oneDNN with its own weight layout reaches twice the rate of an ordinary product at every batch size
(one row reads memory as fast as it can be read). torch offers that to its compiler; the two operators are looked up
here and tried before they are trusted, and the ordinary product takes their place where they are missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class Linear(ABC):
    """``x @ weight.T + bias``.

    Attributes:
        name: what computes it.
    """

    name: str

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """[T, out] of [T, in]."""


class TorchLinear(Linear):
    name = "torch"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedLinear(Linear):
    """oneDNN over a weight in oneDNN's layout; the plain weight is not kept."""

    name = "onednn"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # Without a batch size oneDNN chooses a layout that serves all of them.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return result


class LinearFactory:
    """Makes linears for one device and dtype.

    Attributes:
        name: what the linears it makes run on.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._class: type[TorchLinear] | type[PackedLinear] = (
            PackedLinear if device.type == "cpu" and dtype == torch.float32 and _packing_works() else TorchLinear
        )
        self.name = self._class.name

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A linear of weight [out, in] and bias [out] or None."""
        return self._class(weight, bias)


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
