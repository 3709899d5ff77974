from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from pagemill_testing.tiny_gguf import Kind, TinyGguf

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.gguf_file import GgufFile, open_gguf
from pagemill_worker.prepare.gguf_model import prepare_gguf
from pagemill_worker.prepare.workspace import Workspace


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    extra = {"general.tags": ["a", "b"], "x.numbers": [1, 2, 3], "x.empty": "", "x.yes": True, "x.real": 0.5}
    return TinyGguf(metadata=extra).write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def header(entries: bytes = b"", count: int = 0, *, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + entries


def entry(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def opened(path: Path, content: bytes) -> GgufFile:
    path.write_bytes(content)
    return open_gguf(path)


def test_reads_what_the_gguf_package_reads(whole: Path) -> None:
    ours, theirs = open_gguf(whole), GGUFReader(whole)
    expected = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == expected
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(size) for size in reversed(tensor.shape))
        rows = np.concatenate(list(mine.rows())).reshape(mine.shape)
        np.testing.assert_array_equal(rows, dequantize(tensor.data, tensor.tensor_type).reshape(mine.shape))


def test_rows_come_in_chunks_and_in_the_order_asked_for(tmp_path: Path) -> None:
    tiny = TinyGguf(kind=Kind.F16)
    big = np.arange(5000 * 512, dtype=np.float16).reshape(5000, 512)
    big[~np.isfinite(big)] = 0
    tiny.tensors["big.weight"] = (big, Kind.F16)
    tensor = open_gguf(tiny.write(tmp_path / "m.gguf")).tensors["big.weight"]
    chunks = list(tensor.rows())
    assert len(chunks) > 1
    assert max(chunk.nbytes for chunk in chunks) <= 4 << 20
    np.testing.assert_array_equal(np.concatenate(chunks), big.astype(np.float32))
    order = np.random.default_rng(0).permutation(5000)
    np.testing.assert_array_equal(np.concatenate(list(tensor.rows(order))), big[order].astype(np.float32))


@pytest.mark.parametrize("kept", [0, 1, 4, 8, 20, 24, 100, 0.1, 0.5, 0.9, 0.999, -1])
def test_a_truncated_file_is_refused_by_name(whole: Path, tmp_path: Path, kept: float) -> None:
    content = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    length = int(kept * len(content)) if isinstance(kept, float) else kept
    cut.write_bytes(content[:length])
    with pytest.raises(ConfigurationError, match=r"cut\.gguf (is truncated|is not a GGUF file)") as caught:
        open_gguf(cut)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"PK\x03\x04 some zip archive", "is not a GGUF file"),
        (header(version=1), "GGUF version 1; supported are 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(entry("a", 99, b""), 1), "unknown value type 99"),
        (header(entry("a", 4, bytes(4)) * 2, 2), "the key 'a' twice"),
        (header(entry("a", 8, struct.pack("<Q", 2) + b"\xff\xfe"), 1), "not UTF-8"),
        (header(entry("a", 8, struct.pack("<Q", 1 << 63)), 1), "truncated or damaged"),
        (header(entry("a", 9, struct.pack("<IQ", 0, 1 << 62)), 1), "truncated or damaged"),
        (header(entry("a", 9, struct.pack("<IQ", 8, 1 << 62)), 1), "truncated or damaged"),
        (header(entry("a", 9, struct.pack("<IQ", 9, 1) * 9), 1), "nests arrays more than"),
        (header(count=1 << 63), "truncated or damaged"),
        (header(tensors=1 << 63), "truncated or damaged"),
        (header(entry("general.alignment", 4, struct.pack("<I", 24)), 1), "alignment is 24"),
    ],
)
def test_a_damaged_header_is_refused_with_its_cause(tmp_path: Path, content: bytes, cause: str) -> None:
    with pytest.raises(ConfigurationError, match=cause):
        opened(tmp_path / "m.gguf", content)


def tensor_info(name: str, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in reversed(shape))
    return (
        struct.pack("<Q", len(name))
        + name.encode()
        + struct.pack("<I", len(shape))
        + sizes
        + struct.pack("<IQ", kind, offset)
    )


@pytest.mark.parametrize(
    ("infos", "cause"),
    [
        ([tensor_info("w", (1 << 40, 1 << 40), 0)], "is truncated: tensor 'w'"),
        ([tensor_info("w", (4,), 0, offset=1 << 63)], "is truncated: tensor 'w'"),
        ([tensor_info("w", (0, 4), 0)], "cannot be stored as F32"),
        ([tensor_info("w", (4, 33), int(Kind.Q8_0))], "cannot be stored as Q8_0"),
        ([tensor_info("w", (4,), 250)], "unknown format 250"),
        ([tensor_info("w", (1,) * 9, 0)], "9 dimensions"),
        ([tensor_info("w", (1,), 0)] * 2, "two tensors of one name"),
        ([tensor_info("w", (4,), int(Kind.I32))], "as I32, which cannot be dequantised"),
    ],
)
def test_a_damaged_tensor_table_is_refused_with_its_cause(tmp_path: Path, infos: list[bytes], cause: str) -> None:
    with pytest.raises(ConfigurationError, match=cause):
        opened(tmp_path / "m.gguf", header(tensors=len(infos)) + b"".join(infos) + bytes(1024))


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tiny = TinyGguf()
    data, kind = tiny.tensors["blk.1.ffn_up.weight"]
    data[7, :2] = 255  # the scale of a Q8_0 block: a half-precision NaN
    tiny.tensors["blk.1.ffn_up.weight"] = (data, kind)
    tensor = open_gguf(tiny.write(tmp_path / "m.gguf")).tensors["blk.1.ffn_up.weight"]
    with pytest.raises(ConfigurationError, match=r"m\.gguf is damaged: tensor 'blk.1.ffn_up.weight' .* not finite"):
        list(tensor.rows())


def test_unreadable_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing\.gguf cannot be read: No such file"):
        open_gguf(tmp_path / "nothing.gguf")
    with pytest.raises(ConfigurationError, match="cannot be read: Is a directory"):
        open_gguf(tmp_path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_change_to_the_header_is_refused_or_harmless(whole: Path, data: st.DataObject) -> None:
    """Whatever the bytes say, preparing ends, and the only error is one that names the file."""
    content = bytearray(whole.read_bytes())
    names = max(content.rfind(b"blk.1.ffn_down.weight"), content.rfind(b"output_norm.weight"))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(4, names + 64))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutated.gguf"
        path.write_bytes(content)
        refused = _refusal(path)
        assert refused is None or ("mutated" in refused and "\n" not in refused)


def _refusal(path: Path) -> str | None:
    try:
        prepare_gguf(open_gguf(path), Workspace(path.parent, lambda what, share: None))
    except ConfigurationError as error:
        return str(error)
    return None
