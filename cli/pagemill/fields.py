"""What a setting is called and which values it takes, in words: for ``--help``, for errors and for docs/settings.md."""

from __future__ import annotations

import inspect
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from pagemill_shared.settings import ENV_PREFIX

GROUP_ORDER = ("Model", "HTTP", "Client", "Scheduling", "Execution and KV cache", "Processes", "Connections", "Logging")
POSITIONAL = "model"
"""The setting that commands take as an argument, not as a flag."""


@dataclass(frozen=True, slots=True)
class SettingField:
    """One setting in words.

    Attributes:
        default: None when the setting is unset by default.
        choices: the allowed words of an enumeration, else empty.
        kind: ``text``, ``path``, ``whole number``, ``number``, ``switch`` or ``choice``.
    """

    name: str
    group: str
    description: str
    default: str | None
    allowed: str
    choices: tuple[str, ...]
    kind: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def label(self) -> str:
        """What the command line calls it."""
        return "MODEL" if self.name == POSITIONAL else self.flag

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()


def setting_fields(settings: type[BaseSettings]) -> list[SettingField]:
    """All settings of a class, ordered by group; within a group in the order of their definition."""
    fields = [_describe(settings, name, info) for name, info in settings.model_fields.items()]
    return sorted(fields, key=lambda field: (GROUP_ORDER.index(field.group), field.name != POSITIONAL))


def _describe(settings: type[BaseSettings], name: str, info: FieldInfo) -> SettingField:
    kind, choices = _kind(info.annotation)
    return SettingField(
        name=name,
        group=_group(settings, name),
        description=info.description or "",
        default=_default(info),
        allowed=_allowed(kind, choices, info.metadata),
        choices=choices,
        kind=kind,
    )


def _group(settings: type[BaseSettings], name: str) -> str:
    for cls in settings.__mro__:
        if name in inspect.get_annotations(cls):
            return str(getattr(cls, "group", ""))
    raise LookupError(name)


def _kind(annotation: Any) -> tuple[str, tuple[str, ...]]:
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        return "choice", tuple(str(choice) for choice in get_args(annotation))
    kinds = {bool: "switch", int: "whole number", float: "number", str: "text", Path: "path"}
    return kinds[annotation], ()


def _default(info: FieldInfo) -> str | None:
    extra = info.json_schema_extra
    if isinstance(extra, dict) and "default_text" in extra:
        return str(extra["default_text"])
    default = info.default
    if default is None:
        return None
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def _allowed(kind: str, choices: tuple[str, ...], metadata: list[Any]) -> str:
    if kind == "choice":
        return ", ".join(choices)
    if kind == "switch":
        return "true, false"
    bounds = _bounds(metadata)
    return f"{kind}, {bounds}" if bounds else kind


def _bounds(metadata: list[Any]) -> str:
    low = next((rule.ge for rule in metadata if isinstance(rule, annotated_types.Ge)), None)
    high = next((rule.le for rule in metadata if isinstance(rule, annotated_types.Le)), None)
    if low is not None and high is not None:
        return f"{low} to {high}"
    bounds: list[str] = []
    for rule in metadata:
        if isinstance(rule, annotated_types.Ge):
            bounds.append(f"at least {rule.ge}")
        elif isinstance(rule, annotated_types.Gt):
            bounds.append(f"more than {rule.gt}")
        elif isinstance(rule, annotated_types.Le):
            bounds.append(f"at most {rule.le}")
        elif isinstance(rule, annotated_types.MinLen):
            bounds.append("not empty")
        elif pattern := getattr(rule, "pattern", None):
            bounds.append(f"matching {pattern}")
    return ", ".join(bounds)
