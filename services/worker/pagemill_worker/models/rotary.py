"""Rotary position embeddings: frequencies by scaling type, and the tables of cosines and signed sines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagemill_shared.errors import ConfigurationError

NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": (),
}
"""The scaling types that there are, and the numbers that each cannot do without."""
OLD_NAMES = {"su": "longrope"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn queries and keys.

    Attributes:
        rotary_dim: how many leading elements of a head are turned.
        theta: base of the frequencies.
        rope_type: one of NEEDED.
        factor: stretch of the context, for all types but ``default``.
        original_length: context length that the model was trained with before it was stretched.
        low_freq_factor, high_freq_factor: for ``llama3``, the wavelengths between which scaling fades in.
        beta_fast, beta_slow: for ``yarn``, the turns within the original context between which scaling fades in.
        truncate: for ``yarn``, whether these are taken at whole frequencies.
        short_factors, long_factors: for ``longrope``, what each frequency is divided by.
        magnitude: factor of cosines and sines, for ``yarn`` and ``longrope``.
    """

    rotary_dim: int
    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    magnitude: float = 1.0


def read_rope(config: Mapping[str, Any], head_dim: int, theta: float = 10_000.0) -> RopeConfig:
    """From config.json, in the form of transformers 5 (``rope_parameters``) or before it (``rope_theta``,
    ``rope_scaling``). Where ``rope_parameters`` has an entry per layer type, that of layers without a window counts.

    Args:
        theta: base of the frequencies where config.json names none.

    Raises:
        ConfigurationError: the scaling type is not supported, or lacks a parameter.
    """
    parameters: dict[str, Any] = {
        "rope_theta": config.get("rope_theta") or theta,
        "partial_rotary_factor": config.get("partial_rotary_factor") or 1.0,
    }
    for key in ("rope_scaling", "rope_parameters"):
        found = config.get(key) or {}
        if isinstance(found.get("full_attention"), Mapping):
            found = found["full_attention"]
        parameters.update({name: value for name, value in found.items() if value is not None})
    named = parameters.get("rope_type") or parameters.get("type") or "default"
    rope_type = OLD_NAMES.get(named, named)
    if rope_type not in NEEDED:
        raise ConfigurationError(
            f"config.json: rope scaling {named!r} is not supported; supported are {', '.join(NEEDED)}"
        )
    for name in NEEDED[rope_type]:
        if not isinstance(parameters.get(name), int | float):
            raise ConfigurationError(f"config.json: rope scaling {named!r} needs the number {name}")
    rotary_dim = int(head_dim * float(parameters["partial_rotary_factor"]))
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigurationError(
            f"config.json: {rotary_dim} of {head_dim} elements of a head cannot be turned in pairs"
        )
    length = int(config["max_position_embeddings"])
    # A dynamic scaling starts beyond the model's own length; the others say where training ended. Phi-3 says it beside
    # the parameters, and that counts.
    original = length
    if rope_type in ("llama3", "yarn", "longrope"):
        stated = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
        original = int(stated or length)
    factor = float(parameters.get("factor") or length / original)
    return RopeConfig(
        rotary_dim=rotary_dim,
        theta=float(parameters["rope_theta"]),
        rope_type=rope_type,
        factor=factor if rope_type != "default" else 1.0,
        original_length=original,
        low_freq_factor=float(parameters.get("low_freq_factor") or 1.0),
        high_freq_factor=float(parameters.get("high_freq_factor") or 1.0),
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        truncate=bool(parameters.get("truncate", True)),
        short_factors=_factors(parameters, "short_factor", rotary_dim) if rope_type == "longrope" else (),
        long_factors=_factors(parameters, "long_factor", rotary_dim) if rope_type == "longrope" else (),
        magnitude=_magnitude(rope_type, parameters, factor, original),
    )


def _factors(parameters: Mapping[str, Any], name: str, rotary_dim: int) -> tuple[float, ...]:
    factors = parameters.get(name)
    if not isinstance(factors, list) or len(factors) != rotary_dim // 2:
        count = len(factors) if isinstance(factors, list) else "no"
        raise ConfigurationError(
            f"config.json: rope scaling 'longrope' needs {rotary_dim // 2} numbers in {name}, it has {count}"
        )
    return tuple(float(factor) for factor in factors)


def _magnitude(rope_type: str, parameters: Mapping[str, Any], factor: float, original: int) -> float:
    stated = parameters.get("attention_factor")
    if rope_type not in ("yarn", "longrope"):
        return 1.0
    if stated is not None:
        return float(stated)
    if rope_type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, over_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return grown(float(mscale)) / grown(float(over_all)) if mscale and over_all else grown(1.0)


def inverse_frequencies(rope: RopeConfig, max_model_len: int) -> Tensor:
    """[rotary_dim / 2] float32 angles per position.

    ``dynamic`` and ``longrope`` scaling are fixed for ``max_model_len``: keys in the cache cannot be turned again while
    a sequence grows.
    """
    dim = rope.rotary_dim
    theta = rope.theta
    if rope.rope_type == "dynamic" and max_model_len > rope.original_length:
        stretch = rope.factor * max_model_len / rope.original_length - (rope.factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "longrope":
        return frequencies / torch.tensor(
            rope.long_factors if max_model_len > rope.original_length else rope.short_factors
        )
    if rope.rope_type == "llama3":
        # Long wavelengths are stretched, short ones kept, those between are blended.
        turns = rope.original_length * frequencies / (2 * math.pi)  # turns within the original context
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return _blend(frequencies, rope.factor, kept.clamp(0, 1))
    if rope.rope_type == "yarn":
        return _blend(frequencies, rope.factor, 1 - _yarn_ramp(rope))
    return frequencies


def _blend(frequencies: Tensor, factor: float, kept: Tensor) -> Tensor:
    """The share ``kept`` of each frequency as it is, the rest of it divided by ``factor``."""
    return (1 - kept) * frequencies / factor + kept * frequencies


def _yarn_ramp(rope: RopeConfig) -> Tensor:
    """[rotary_dim / 2] from 0, for frequencies that turn ``beta_fast`` times or more within the original context, to 1,
    for ``beta_slow`` times or less: linear in the index of the frequency (YaRN, https://arxiv.org/abs/2309.00071)."""

    def index(turns: float) -> float:
        wavelength = rope.original_length / turns
        return rope.rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low or 0.001
    return ((torch.arange(rope.rotary_dim // 2).float() - low) / width).clamp(0, 1)


def rotary_tables(
    rope: RopeConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines (first half negated), each [max_model_len, 1, rotary_dim].

    With them turning is ``x * cosines + swapped_halves(x) * sines``.
    """
    angles = torch.outer(torch.arange(max_model_len).float(), inverse_frequencies(rope, max_model_len))
    cosines, sines = angles.cos() * rope.magnitude, angles.sin() * rope.magnitude
    return (
        torch.cat((cosines, cosines), -1).unsqueeze(1).to(device, dtype),
        torch.cat((-sines, sines), -1).unsqueeze(1).to(device, dtype),
    )
