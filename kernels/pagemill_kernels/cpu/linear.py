"""Matrix products by the compiled kernels, over weights that they packed."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from pagemill_kernels.interface import Linear


class CpuLinear(Linear):
    """float32. A row computes the same bits whatever rows are beside it. The plain weight is not kept."""

    name = "packed"

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> None:
        self._outputs, self._inputs = weight.shape
        columns = library.pm_linear_columns()
        self._run = library.pm_linear
        self._packed = torch.empty(-(-self._outputs // columns), self._inputs, columns)
        library.pm_linear_pack(
            weight.contiguous().data_ptr(),
            self._outputs,
            self._inputs,
            self._packed.data_ptr(),
            torch.get_num_threads(),
        )
        self._bias = None if bias is None else bias.contiguous()
        self._weight_address = self._packed.data_ptr()
        self._bias_address = None if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        if added is not None and not added.is_contiguous():
            added = added.contiguous()
        out = x.new_empty(x.shape[0], self._outputs)
        self._run(
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            self._outputs,
            self._inputs,
            self._weight_address,
            self._bias_address,
            None if added is None else added.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out
