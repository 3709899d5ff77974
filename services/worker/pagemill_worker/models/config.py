"""A model's config.json, reduced to what running it needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagemill_shared.errors import ConfigurationError


def read_config(folder: Path) -> dict[str, Any]:
    """The prepared model's config.json.

    Raises:
        ConfigurationError: it is missing or unreadable, or the weights are in a quantised form.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is not readable: {error}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path} does not hold a JSON object")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise ConfigurationError(
            f"{path}: weights quantised by {method!r} are not supported; "
            "use float32, float16 or bfloat16 weights, or a .gguf file"
        )
    return config


class ConfigReader:
    """Typed access to config.json that names the field at fault."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def get(self, name: str, default: Any = None) -> Any:
        value = self._config.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if type(value) is not int or value < 1:
            raise ConfigurationError(f"config.json: {name} is {value!r}, not a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigurationError(f"config.json: {name} is {value!r}, not a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ConfigurationError(f"config.json: {name} is {value!r}, not true or false")
        return value


@dataclass(frozen=True, slots=True)
class CacheDescription:
    """What one token's keys and values take; pool, swap and copy know a block only by this."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
