"""``python -m pagemill.settings_page`` prints docs/settings.md, made from the settings definition (`make docs`)."""

from __future__ import annotations

from itertools import groupby

from pydantic_settings import BaseSettings

from pagemill.fields import GROUP_ORDER, POSITIONAL, SettingField, setting_fields
from pagemill_shared.settings import (
    ChatSettings,
    GatewaySettings,
    PrepareSettings,
    RunBatchSettings,
    SchedulerSettings,
    ServeSettings,
    WorkerSettings,
)

COMMANDS: dict[str, type[BaseSettings]] = {
    "serve": ServeSettings,
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
    "prepare": PrepareSettings,
    "chat": ChatSettings,
    "run-batch": RunBatchSettings,
}

_HEAD = """\
# Settings

Made by `make docs` from `shared/pagemill_shared/settings.py`; do not edit.

Each setting is a flag of the commands that know it and an environment variable. The command line wins over the
environment, and that over the default; an empty variable counts as unset. A variable that starts with `PAGEMILL_` and
is no setting of any command is refused, as is a value that is not allowed: one line on standard error, exit status 2.
"""


def page() -> str:
    """The whole page."""
    known: dict[str, list[str]] = {}
    fields: dict[str, SettingField] = {}
    for command, cls in COMMANDS.items():
        for field in setting_fields(cls):
            known.setdefault(field.name, []).append(command)
            fields[field.name] = field
    ordered = sorted(fields.values(), key=lambda field: (GROUP_ORDER.index(field.group), field.name != POSITIONAL))
    sections = [_HEAD]
    for group, members in groupby(ordered, key=lambda field: field.group):
        rows = [_row(field, known[field.name]) for field in members]
        sections.append("\n".join([f"## {group}", "", *_table_head(), *rows, ""]))
    return "\n".join(sections)


def _table_head() -> list[str]:
    return ["| setting | variable | default | allowed | meaning | commands |", "|---|---|---|---|---|---|"]


def _row(field: SettingField, commands: list[str]) -> str:
    flag = field.flag
    if field.kind == "switch":
        flag += f", --no-{flag.removeprefix('--')}"
    name = "MODEL" if field.name == POSITIONAL else flag
    default = f"`{field.default}`" if field.default is not None else "unset"
    cells = [f"`{name}`", f"`{field.variable}`", default, field.allowed, field.description, ", ".join(commands)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(page(), end="")
