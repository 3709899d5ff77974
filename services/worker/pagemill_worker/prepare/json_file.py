"""A JSON object in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagemill_shared.errors import ConfigurationError


def read_json(path: Path) -> dict[str, Any]:
    """The object, or an empty one where there is no such file.

    Raises:
        ConfigurationError: the file is unreadable, or is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} is not a JSON object")
    return content
