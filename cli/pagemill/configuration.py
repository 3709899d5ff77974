"""Reads the settings of a command: defaults, then environment, then command line. Every fault is one clear line."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings

from pagemill.fields import SettingField, setting_fields
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.settings import (
    ENV_PREFIX,
    ChatSettings,
    GatewaySettings,
    PrepareSettings,
    RunBatchSettings,
    SchedulerSettings,
    ServeSettings,
    WorkerSettings,
)

ALL_SETTINGS: tuple[type[BaseSettings], ...] = (
    ServeSettings,
    GatewaySettings,
    SchedulerSettings,
    WorkerSettings,
    ChatSettings,
    RunBatchSettings,
    PrepareSettings,
)

SettingsT = TypeVar("SettingsT", bound=BaseSettings)


def read_settings(cls: type[SettingsT], typed: Mapping[str, Any]) -> SettingsT:
    """Validated settings from what was typed and from the environment.

    A PAGEMILL_ variable that only another command knows is accepted, so that one environment can serve all; one that
    no command knows is refused.

    Raises:
        ConfigurationError: names the flag or variable and what it takes.
    """
    refuse_unknown_variables(os.environ)
    try:
        return cls(**typed)
    except ValidationError as error:
        fields = {field.name: field for field in setting_fields(cls)}
        faults = [_fault(fields, typed, dict(fault)) for fault in error.errors(include_url=False)]
        raise ConfigurationError("; ".join(faults)) from None


def refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    """Raises ConfigurationError for a PAGEMILL_ variable that no command knows."""
    known = {field.variable for cls in ALL_SETTINGS for field in setting_fields(cls)}
    for name in sorted(environment):
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known:
            settings = sorted(variable.removeprefix(ENV_PREFIX) for variable in known)
            close = difflib.get_close_matches(name.upper().removeprefix(ENV_PREFIX), settings, n=1)
            hint = f"did you mean {ENV_PREFIX}{close[0]}?" if close else "known are " + ", ".join(sorted(known))
            raise ConfigurationError(f"{name}: no such setting; {hint}")


def as_environment(values: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` for a child process that is to run with exactly these settings, and defaults for the others."""
    child = {name: value for name, value in environment.items() if not name.upper().startswith(ENV_PREFIX)}
    for name, value in values.items():
        if value is not None:
            child[ENV_PREFIX + name.upper()] = str(value).lower() if isinstance(value, bool) else str(value)
    return child


def _fault(fields: Mapping[str, SettingField], typed: Mapping[str, Any], fault: Mapping[str, Any]) -> str:
    field = fields[str(fault["loc"][0])]
    source = field.label if field.name in typed else field.variable
    value = "the value" if field.name == "api_key" else repr(fault["input"])
    return f"{source}: {value} is not allowed; allowed: {field.allowed}"
