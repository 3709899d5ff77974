"""Many arrays in one transfer, on a device that is not the host's memory as far as that can be had here."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pagemill_worker.transfer import ALIGNMENT, download, join, pack, unpack, upload

DTYPES = st.sampled_from([np.int64, np.int32, np.float64, np.float32, np.uint8, np.bool_])
ARRAYS = arrays.arrays(DTYPES, arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=5))


@settings(max_examples=60, deadline=None)
@given(st.lists(ARRAYS, min_size=1, max_size=6))
def test_what_goes_up_and_down_comes_back(sent: list[np.ndarray]) -> None:
    packed, parts = pack(sent, pin_memory=False)
    assert all(part.begin % ALIGNMENT == 0 for part in parts)
    up = [part.of(packed) for part in parts]
    for tensor, array in zip(up, sent, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
    for received, array in zip(unpack(join(up), up), sent, strict=True):
        np.testing.assert_array_equal(received, array)
        assert received.dtype == array.dtype


def test_columns_of_an_array() -> None:
    array = np.arange(12, dtype=np.int32).reshape(4, 3)
    packed, [part] = pack([array.T], pin_memory=False)
    np.testing.assert_array_equal(part.of(packed).numpy(), array.T)


def test_on_the_cpu_nothing_is_copied() -> None:
    array = np.zeros(3)
    [tensor] = upload([array], torch.device("cpu"))
    tensor[0] = 1
    assert array[0] == 1
    assert download([tensor])[0][0] == 1


def test_on_another_device_all_are_views_of_one_transfer() -> None:
    made = upload([np.zeros(3, np.int32), np.zeros((2, 2))], torch.device("meta"))
    assert [(t.dtype, tuple(t.shape)) for t in made] == [(torch.int32, (3,)), (torch.float64, (2, 2))]
    assert len({t.untyped_storage().nbytes() for t in made}) == 1
