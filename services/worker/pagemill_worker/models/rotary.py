"""Rotary position embeddings: frequencies by scaling type, and the tables of cosines and signed sines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagemill_shared.errors import ConfigurationError

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn queries and keys.

    Attributes:
        rotary_dim: how many leading elements of a head are turned.
        theta: base of the frequencies.
        rope_type: one of SUPPORTED_ROPE_TYPES.
        factor: stretch of the context, for all types but ``default``.
        original_length: context length that the model was trained with before it was stretched.
        low_freq_factor, high_freq_factor: for ``llama3`` alone, the wavelengths between which scaling fades in.
    """

    rotary_dim: int
    theta: float
    rope_type: str
    factor: float
    original_length: int
    low_freq_factor: float
    high_freq_factor: float


def read_rope(config: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """From config.json, in the form of transformers 5 (``rope_parameters``) or before it (``rope_theta``,
    ``rope_scaling``).

    Raises:
        ConfigurationError: the scaling type is not supported, or lacks a parameter.
    """
    parameters: dict[str, Any] = {
        "rope_theta": config.get("rope_theta") or 10_000.0,
        "partial_rotary_factor": config.get("partial_rotary_factor") or 1.0,
    }
    for key in ("rope_scaling", "rope_parameters"):
        parameters.update({name: value for name, value in (config.get(key) or {}).items() if value is not None})
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ConfigurationError(
            f"config.json: rope scaling {rope_type!r} is not supported; supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    length = config["max_position_embeddings"]
    needed = {"default": (), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}.get(rope_type, ("factor",))
    for name in needed:
        if not isinstance(parameters.get(name), int | float):
            raise ConfigurationError(f"config.json: rope scaling {rope_type!r} needs the number {name}")
    # A dynamic scaling starts beyond the model's own length; llama3 says where its training ended.
    original = parameters.get("original_max_position_embeddings") if rope_type == "llama3" else None
    return RopeConfig(
        rotary_dim=int(head_dim * float(parameters["partial_rotary_factor"])),
        theta=float(parameters["rope_theta"]),
        rope_type=rope_type,
        factor=float(parameters.get("factor") or 1.0),
        original_length=int(original or length),
        low_freq_factor=float(parameters.get("low_freq_factor") or 1.0),
        high_freq_factor=float(parameters.get("high_freq_factor") or 1.0),
    )


def inverse_frequencies(rope: RopeConfig, max_model_len: int) -> Tensor:
    """[rotary_dim / 2] float32 angles per position.

    ``dynamic`` scaling is fixed for ``max_model_len``: keys in the cache cannot be turned again while a sequence grows.
    """
    dim = rope.rotary_dim
    theta = rope.theta
    if rope.rope_type == "dynamic" and max_model_len > rope.original_length:
        stretch = rope.factor * max_model_len / rope.original_length - (rope.factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if rope.rope_type == "linear":
        frequencies /= rope.factor
    elif rope.rope_type == "llama3":
        # Long wavelengths are stretched, short ones kept, those between are blended.
        turns = rope.original_length * frequencies / (2 * math.pi)  # turns within the original context
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0, 1)
        frequencies = (1 - blend) * frequencies / rope.factor + blend * frequencies
    return frequencies


def rotary_tables(
    rope: RopeConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines (first half negated), each [max_model_len, 1, rotary_dim].

    With them turning is ``x * cosines + swapped_halves(x) * sines``.
    """
    angles = torch.outer(torch.arange(max_model_len).float(), inverse_frequencies(rope, max_model_len))
    cosines, sines = angles.cos(), angles.sin()
    return (
        torch.cat((cosines, cosines), -1).unsqueeze(1).to(device, dtype),
        torch.cat((-sines, sines), -1).unsqueeze(1).to(device, dtype),
    )
