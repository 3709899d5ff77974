"""API keys: which there are, what each may do. Keys are kept as digests alone, and never logged."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pagemill_shared.errors import ConfigurationError

_OPTION = re.compile(r"(priority=-?\d{1,9}|rate=\d{1,9}(\.\d{1,6})?|name=\S{1,64})\Z")


@dataclass(slots=True, eq=False)
class Rate:
    """A bucket of tokens: so many requests a minute, up to as many at once.

    Attributes:
        per_minute: more than 0.
    """

    per_minute: float
    _left: float = field(init=False)
    _since: float | None = None

    def __post_init__(self) -> None:
        self._left = max(1.0, self.per_minute)

    def take(self, now: float) -> float:
        """Takes one request out; 0, or the seconds to wait where there is none left."""
        if self._since is not None:
            gained = (now - self._since) * self.per_minute / 60
            self._left = min(max(1.0, self.per_minute), self._left + gained)
        self._since = now
        if self._left < 1:
            return (1 - self._left) * 60 / self.per_minute
        self._left -= 1
        return 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Key:
    """One key.

    Attributes:
        name: what logs call it.
        digest: SHA-256 of the key.
        priority: the best (lowest) one that its requests may have, and theirs by default; None for no bound.
        rate: of its requests, None for no limit.
    """

    name: str
    digest: bytes = field(repr=False)
    priority: int | None = None
    rate: Rate | None = None


class Keys:
    """All keys of a server; with none everybody may come in."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = list(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    @classmethod
    def load(cls, key: str | None, file: Path | None) -> Keys:
        """The one key of the settings, and those of a file: one a line, with options behind it.

        Raises:
            ConfigurationError: the file cannot be read, or a line is wrong (its number is told, never the key).
        """
        keys = [] if key is None else [Key("--api-key", _digest(key.encode()))]
        if file is None:
            return cls(keys)
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--api-key-file {file} cannot be read: {type(error).__name__}") from None
        for number, line in enumerate(lines, 1):
            words = line.split()
            if words and not words[0].startswith("#"):
                keys.append(_parsed(words, f"line {number}", f"--api-key-file {file}, line {number}"))
        if not keys:
            raise ConfigurationError(f"--api-key-file {file} holds no key")
        if len({each.digest for each in keys}) < len(keys):
            raise ConfigurationError(f"--api-key-file {file} holds a key twice")
        return cls(keys)

    def find(self, given: bytes) -> Key | None:
        """The key that a client sent. How long that takes does not depend on how much of it is right."""
        digest = _digest(given)
        found = None
        for key in self._keys:  # all of them, always
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found


def _parsed(words: list[str], name: str, place: str) -> Key:
    options = {}
    for number, word in enumerate(words[1:], 1):
        if not _OPTION.match(word):
            raise ConfigurationError(f"{place}: option {number} is none of priority=N, rate=N (a minute), name=TEXT")
        option, _, value = word.partition("=")
        options[option] = value
    rate = float(options.get("rate", 0))
    if "rate" in options and not rate:
        raise ConfigurationError(f"{place}: rate must be more than 0")
    return Key(
        options.get("name", name),
        _digest(words[0].encode()),
        int(options["priority"]) if "priority" in options else None,
        Rate(rate) if rate else None,
    )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
