"""A step that waits for its device, noticed where there is no device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal"}


class NoWaiting(TorchDispatchMode):
    """Refuses what would wait for a device: numbers that Python asks for, shapes that depend on numbers, copies from
    the host that are not let go of. Tensors on the meta device stand for those on a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        assert name not in WAITS, name
        if name in ("aten::index.Tensor", "aten::index_put", "aten::index_put_"):
            assert all(index is None or index.dtype == torch.int64 for index in args[1]), f"{name} with a mask"
        result = func(*args, **(kwargs or {}))
        tensors = [a for a in args if isinstance(a, Tensor)]
        if name in ("aten::_to_copy", "aten::copy_") and len({t.device for t in (*tensors, result)}) > 1:
            assert (kwargs or {}).get("non_blocking"), f"{name} that is waited for"
        return result
