"""The blocks that are kept beside the weights, against those weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from pagemill_testing.tiny_gguf import Kind, TinyGguf
from safetensors import safe_open

from pagemill_shared.manifest import BLOCKS_NAME
from pagemill_worker.prepare.gguf_file import open_gguf
from pagemill_worker.prepare.gguf_model import prepare_gguf
from pagemill_worker.prepare.workspace import Workspace


def prepare(tiny: TinyGguf, folder: Path) -> Path:
    prepared = folder / "prepared"
    prepared.mkdir()
    prepare_gguf(open_gguf(tiny.write(folder / "tiny.gguf")), Workspace(prepared, lambda what, share: None))
    return prepared


def kept(prepared: Path) -> dict[str, tuple[str, np.ndarray]]:
    with safe_open(prepared / BLOCKS_NAME, framework="np") as file:
        kinds = file.metadata()
        return {name: (kinds[name], file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
def test_every_matrix_is_kept_to_the_bit(tmp_path: Path, kind: Kind) -> None:
    tiny = TinyGguf(kind=kind, tied=False)
    blocks = kept(prepare(tiny, tmp_path))
    assert blocks.keys() == {name for name, values in tiny.weights.items() if values.ndim == 2}
    for name, (format_name, data) in blocks.items():
        assert format_name == kind.name
        np.testing.assert_array_equal(dequantize(data, kind), tiny.weights[name])


@pytest.mark.parametrize("kind", [Kind.Q5_0, Kind.Q4_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_other_formats_are_kept_in_8_bits(tmp_path: Path, kind: Kind) -> None:
    tiny = TinyGguf(kind=kind)
    for name, (format_name, data) in kept(prepare(tiny, tmp_path)).items():
        assert format_name == "Q8_0"
        values = tiny.weights[name]
        error = np.linalg.norm(dequantize(data, GGMLQuantizationType.Q8_0) - values) / np.linalg.norm(values)
        assert error < 0.01


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_floats_are_not_kept_twice(tmp_path: Path, kind: Kind) -> None:
    assert not (prepare(TinyGguf(kind=kind), tmp_path) / BLOCKS_NAME).exists()
