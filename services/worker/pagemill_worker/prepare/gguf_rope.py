"""Rotary embedding: from GGUF's entries to transformers' ``rope_parameters``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.gguf_file import GgufFile
from pagemill_worker.prepare.gguf_metadata import Metadata

Factors = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]


def rope_factors(file: GgufFile, name: str) -> Factors | None:
    """float32 [N]: the tensor ``name``, or None where the file has no such."""
    tensor = file.tensors.get(name)
    return None if tensor is None else np.concatenate(list(tensor.rows())).reshape(-1)


def rope_parameters(meta: Metadata, head_dim: int, factors: Factors | None, theta: float = 10000.0) -> dict[str, Any]:
    """The value of ``rope_parameters`` in ``config.json``.

    Args:
        meta: the entries of the file's architecture.
        factors: [head_dim / 2]: what each frequency is divided by (the tensor ``rope_freqs.weight``).
        theta: base of the frequencies where the file names none.

    Raises:
        ConfigurationError: the file scales the embedding in a way that transformers' class does not.
    """
    theta = meta.decimal("rope.freq_base", theta)
    context = meta.integer("context_length", minimum=1)
    scaling = meta.text("rope.scaling.type", "none")
    if factors is not None and len(factors) != head_dim // 2:
        raise ConfigurationError(f"{meta.path}: {len(factors)} rotary factors for heads of {head_dim}")
    if factors is not None and not np.all(factors == 1):
        if scaling not in ("none", "llama3"):
            raise ConfigurationError(f"{meta.path} has rotary factors and `{scaling}` scaling, which is not supported")
        return {"rope_theta": theta, **_factor_parameters(factors.astype(np.float64), theta, context)}
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    parameters = {"rope_type": scaling, "rope_theta": theta, "factor": meta.decimal("rope.scaling.factor")}
    if scaling == "linear":
        return parameters
    if scaling == "yarn" and meta.decimal("rope.scaling.attn_factor", 1.0) == 1.0:
        return {
            **parameters,
            "original_max_position_embeddings": meta.integer("rope.scaling.original_context_length", minimum=1),
            "beta_fast": meta.decimal("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": meta.decimal("rope.scaling.yarn_beta_slow", 1.0),
        }
    raise ConfigurationError(f"{meta.path} scales its rotary embedding by `{scaling}`, which is not supported")


def longrope_parameters(
    meta: Metadata, turned: int, head_dim: int, short: Factors | None, long: Factors | None
) -> dict[str, Any]:
    """``rope_parameters`` and ``original_max_position_embeddings`` of a model with factors for short and for long
    contexts, or of one without such.

    Args:
        turned: how many of ``head_dim`` elements of a head are turned.
        short, long: [turned / 2].

    Raises:
        ConfigurationError: the factors do not fit, or one kind is missing.
    """
    context = meta.integer("context_length", minimum=1)
    original = meta.integer("rope.scaling.original_context_length", context, minimum=1)
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": meta.decimal("rope.freq_base", 10000.0),
        "partial_rotary_factor": turned / head_dim,
    }
    if short is not None or long is not None:
        counts = [0 if factors is None else len(factors) for factors in (short, long)]
        if short is None or long is None or counts != [turned // 2] * 2:
            raise ConfigurationError(
                f"{meta.path}: {counts[0]} rotary factors for short contexts and {counts[1]} for long ones, "
                f"where {turned // 2} each are needed"
            )
        parameters |= {
            "rope_type": "longrope",
            "short_factor": short.tolist(),
            "long_factor": long.tolist(),
            "attention_factor": meta.decimal("rope.scaling.attn_factor", 1.0),
        }
    elif (scaling := meta.text("rope.scaling.type", "none")) != "none":
        raise ConfigurationError(f"{meta.path} scales its rotary embedding by `{scaling}`, which is not supported")
    return {"rope_parameters": parameters, "original_max_position_embeddings": original}


def _factor_parameters(factors: Floats, theta: float, context: int) -> dict[str, Any]:
    """Llama 3's rule where it gives these factors, since every runtime knows it; else the factors themselves."""
    llama3 = _fit_llama3(factors, theta)
    if llama3 is not None:
        return {"rope_type": "llama3", **llama3}
    return {
        "rope_type": "longrope",
        "short_factor": factors.tolist(),
        "long_factor": factors.tolist(),
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def _fit_llama3(factors: Floats, theta: float) -> dict[str, Any] | None:
    """The parameters of Llama 3's rule that give ``factors``, or None where none do.

    The rule leaves short wavelengths alone, divides long ones by ``factor``, and between them interpolates linearly in
    1 / wavelength: two unknowns. Its three parameters only count as ratios, so ``low_freq_factor`` is taken as 1, which
    is what the published models have.
    """
    factor = round(float(factors.max()), 4)
    inverse_wavelength = _frequencies(theta, len(factors)) / (2 * math.pi)
    between = (factors > 1) & (factors < factor * (1 - 1e-6))
    if np.count_nonzero(between) < 2 or factor <= 1:
        return None
    smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
    slope, offset = np.polyfit(inverse_wavelength[between], smooth, 1)
    if slope <= 0 or offset >= 0:
        return None
    found: dict[str, Any] = {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": round(float(1 - 1 / offset), 3),
        "original_max_position_embeddings": round(float(-slope / offset)),
    }
    return found if np.allclose(llama3_factors(theta, len(factors), **found), factors, rtol=1e-5) else None


def llama3_factors(
    theta: float,
    count: int,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Floats:
    """What Llama 3's rule divides each of ``count`` frequencies by; float64, [count]."""
    turns = original_max_position_embeddings * _frequencies(theta, count) / (2 * math.pi)
    smooth = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    result: Floats = 1 / ((1 - smooth) / factor + smooth)
    return result


def _frequencies(theta: float, count: int) -> Floats:
    result: Floats = theta ** -(np.arange(count, dtype=np.float64) / count)
    return result
