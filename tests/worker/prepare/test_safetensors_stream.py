from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save_file

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.safetensors_stream import StreamedTensor, encode, read_shapes

SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@given(shapes=st.dictionaries(st.text(min_size=1, max_size=8), SHAPES, max_size=5), cut=st.integers(1, 5))
def test_the_safetensors_package_reads_what_is_written(shapes: dict[str, tuple[int, ...]], cut: int) -> None:
    rng = np.random.default_rng(0)
    values = {
        name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items() if name != "__metadata__"
    }
    tensors = [
        StreamedTensor(name, array.shape, [array.reshape(-1)[i : i + cut] for i in range(0, array.size, cut)])
        for name, array in values.items()
    ]
    content = b"".join(encode(tensors))
    read = load(content)
    assert read.keys() == values.keys()
    for name, array in values.items():
        np.testing.assert_array_equal(read[name], array)


def test_nothing_is_held_but_one_chunk() -> None:
    """A terabyte of tensor, of which two chunks are taken."""
    chunk = np.zeros((1, 1 << 20), np.float32)
    pieces = encode([StreamedTensor("w", (1 << 18, 1 << 20), (chunk for _ in range(1 << 18)))])
    next(pieces)
    assert len(next(pieces)) == len(next(pieces)) == 4 << 20


def test_chunks_that_do_not_fill_the_shape_are_a_fault() -> None:
    with pytest.raises(AssertionError, match=r"w: 8 bytes for shape \(3,\)"):
        b"".join(encode([StreamedTensor("w", (3,), [np.zeros(2, np.float32)])]))


def test_shapes_are_read(tmp_path: Path) -> None:
    save_file({"a": np.zeros((2, 3), np.float16), "b": np.zeros((), np.int64)}, tmp_path / "w", {"format": "pt"})
    assert read_shapes(tmp_path / "w") == {"a": (2, 3), "b": ()}


@pytest.mark.parametrize("kept", [0, 4, 8, 20, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"a": np.zeros((2, 3), np.float32)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ConfigurationError, match=r"w\.safetensors is (truncated|damaged)"):
        read_shapes(path)


@pytest.mark.parametrize("header", [b"[]", b"{", b'{"a": 1}', b'{"a": {}}', b'{"a": {"data_offsets": [0]}}', b"\xff"])
def test_a_damaged_header_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ConfigurationError, match=r"w\.safetensors is damaged"):
        read_shapes(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_shapes(tmp_path / "w")
