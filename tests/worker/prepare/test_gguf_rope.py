from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.gguf_file import GgufFile
from pagemill_worker.prepare.gguf_metadata import Metadata
from pagemill_worker.prepare.gguf_rope import llama3_factors, rope_parameters

Factors = dict[str, Any]


def parameters(factors: np.ndarray[Any, Any] | None, theta: float, **entries: Any) -> dict[str, Any]:
    metadata = {"llama.rope.freq_base": theta, "llama.context_length": 4096}
    metadata.update({f"llama.rope.scaling.{key}": value for key, value in entries.items()})
    head_dim = 128 if factors is None else 2 * len(factors)
    return rope_parameters(Metadata(GgufFile(Path("m.gguf"), metadata, {}), "llama"), head_dim, factors)


@pytest.mark.parametrize(
    ("theta", "head_dim", "published"),
    [
        (500000.0, 128, (8.0, 1.0, 4.0, 8192)),  # Llama 3.1
        (500000.0, 64, (32.0, 1.0, 4.0, 8192)),  # Llama 3.2 1B
        (100000.0, 64, (2.5, 1.0, 3.5, 1000)),
    ],
)
def test_published_llama3_parameters_are_recovered(
    theta: float, head_dim: int, published: tuple[float, float, float, int]
) -> None:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    expected: Factors = dict(zip(names, published, strict=True))
    factors = llama3_factors(theta, head_dim // 2, **expected).astype(np.float32)
    assert parameters(factors, theta) == {"rope_type": "llama3", "rope_theta": theta, **expected}


def test_factors_that_no_rule_gives_are_kept_exactly() -> None:
    factors = np.array([1, 1.5, 1.25, 4], np.float32)
    found = parameters(factors, 10000.0)
    assert found["rope_type"] == "longrope"
    assert found["short_factor"] == found["long_factor"] == factors.tolist()
    assert found["attention_factor"] == 1.0


def test_factors_of_one_change_nothing() -> None:
    assert parameters(np.ones(32, np.float32), 1e4) == {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("entries", "cause"),
    [
        ({"type": "linear"}, "scaling.factor is missing"),
        ({"type": "linear", "factor": -1.0}, "factor is -1.0, not a positive number"),
        ({"type": "yarn", "factor": 2.0, "attn_factor": 0.5}, "by `yarn`, which is not supported"),
        ({"type": "longrope", "factor": 2.0}, "by `longrope`, which is not supported"),
    ],
)
def test_scaling_that_cannot_be_kept_is_refused(entries: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"m\.gguf.*{cause}"):
        parameters(None, 10000.0, **entries)


def test_factors_beside_other_scaling_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="rotary factors and `linear` scaling"):
        parameters(np.array([1, 2], np.float32), 1e4, type="linear", factor=2.0)
