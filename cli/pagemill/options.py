"""Command-line options made from a settings class, with ``--help`` in groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any

import click
from pydantic_settings import BaseSettings

from pagemill.fields import POSITIONAL, SettingField, setting_fields


class SettingsCommand(click.Command):
    """A command whose options are the settings of one class, and perhaps some that are no settings.

    Args:
        run: gets the settings that were typed, as text by name, and the values of ``own`` by keyword.
        own: parameters that only the command line has.
    """

    def __init__(
        self,
        *,
        settings: type[BaseSettings],
        run: Callable[..., int],
        own: Sequence[click.Parameter] = (),
        **kwargs: Any,
    ) -> None:
        self._fields = setting_fields(settings)
        self._own = own
        names = {str(parameter.name) for parameter in own}
        super().__init__(
            params=[*own, *(_parameter(field) for field in self._fields)],
            callback=lambda **values: run(
                _typed(click.get_current_context(), names), **{name: values[name] for name in names}
            ),
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
            epilog="Each setting can also be given as an environment variable: --log-level as PAGEMILL_LOG_LEVEL, "
            "MODEL as PAGEMILL_MODEL. The command line wins.",
            **kwargs,
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [parameter for parameter in self._own if isinstance(parameter, click.Option)]
        records = [record for option in options if (record := option.get_help_record(ctx)) is not None]
        if records:
            with formatter.section("Options"):
                formatter.write_dl(records)
        for group, fields in groupby(self._fields, key=lambda field: field.group):
            with formatter.section(group):
                formatter.write_dl([(_usage(field), _help(field)) for field in fields])
        with formatter.section("Other"):
            formatter.write_dl([("-h, --help", "show this text and end")])


def _parameter(field: SettingField) -> click.Parameter:
    if field.name == POSITIONAL:
        return click.Argument([field.name], required=False, metavar="[MODEL]")
    if field.kind == "switch":
        return click.Option([f"{field.flag}/--no-{field.flag.removeprefix('--')}", field.name], default=None)
    return click.Option([field.flag, field.name], type=str)


def _typed(ctx: click.Context, own: Collection[str]) -> dict[str, Any]:
    return {
        name: value
        for name, value in ctx.params.items()
        if name not in own and ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }


def _usage(field: SettingField) -> str:
    if field.name == POSITIONAL:
        return field.label
    if field.kind == "switch":
        return f"{field.flag} / --no-{field.flag.removeprefix('--')}"
    metavar = {"whole number": "N", "number": "X", "path": "PATH", "text": "TEXT", "choice": "|".join(field.choices)}
    return f"{field.flag} {metavar[field.kind]}"


def _help(field: SettingField) -> str:
    notes = []
    _, _, bounds = field.allowed.partition(", ")
    if field.kind in ("whole number", "number") and bounds:
        notes.append(bounds)
    if field.default is not None:
        shown = {"true": "on", "false": "off"}[field.default] if field.kind == "switch" else field.default
        notes.append(f"default: {shown}")
    return f"{field.description} ({'; '.join(notes)})" if notes else field.description
