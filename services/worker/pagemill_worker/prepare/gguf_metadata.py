"""Typed access to a GGUF file's metadata under one prefix."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np

from pagemill_shared.errors import ConfigurationError
from pagemill_worker.prepare.gguf_file import GgufFile

T = TypeVar("T")


class Metadata:
    """The entries ``prefix.…`` of a file. Each accessor raises ConfigurationError, naming file and entry, for a wrong
    type, or where the entry is missing and no default is given."""

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self._file = file
        self.path = file.path
        self._prefix = prefix

    def integer(self, key: str, default: int | None = None, minimum: int = 0) -> int:
        value = self._entry(key, default, int)
        if value < minimum:
            raise self._wrong(key, f"is {value}, less than {minimum}")
        return value

    def decimal(self, key: str, default: float | None = None) -> float:
        """A positive number: the shortest decimal that is this float32, 1e-05 and not 9.999999747378752e-06."""
        value = self._entry(key, default, float)
        if not 0 < value < math.inf:
            raise self._wrong(key, f"is {value}, not a positive number")
        return float(str(np.float32(value)))

    def text(self, key: str, default: str | None = None) -> str:
        return self._entry(key, default, str)

    def flag(self, key: str, default: bool) -> bool:
        return self._entry(key, default, bool)

    def list_of(self, kind: type[T], key: str, default: list[T] | None = None) -> list[T]:
        values: list[Any] = self._entry(key, default, list)
        if not all(type(value) is kind for value in values):
            raise self._wrong(key, f"is not a list of {kind.__name__}")
        return values

    def token_id(self, key: str) -> int | None:
        """An entry that names a token of ``tokenizer.ggml.tokens``, or None where there is none."""
        if f"{self._prefix}.{key}" not in self._file.metadata:
            return None
        token, count = self.integer(key), len(self.list_of(str, "tokens"))
        if token >= count:
            raise self._wrong(key, f"is {token}, but the vocabulary has {count} tokens")
        return token

    def _entry(self, key: str, default: T | None, kind: type[T]) -> T:
        value = self._file.metadata.get(f"{self._prefix}.{key}", default)
        if value is None:
            raise self._wrong(key, "is missing")
        if type(value) is not kind:
            raise self._wrong(key, f"is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def _wrong(self, key: str, what: str) -> ConfigurationError:
        return ConfigurationError(f"{self.path}: metadata entry {self._prefix}.{key} {what}")
