"""Rows of the result, and the table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        check: what was measured.
        case: on what.
        value: None where it could not be measured; ``note`` says why.
        share: of what the measured memory bandwidth allows, where that is the bound.
        aim: share to be reached.
    """

    check: str
    case: str
    value: float | None
    unit: str
    share: float | None = None
    aim: float | None = None
    note: str = ""

    @property
    def has_failed(self) -> bool:
        return self.value is None and self.unit != "n/a"


def table(rows: Sequence[Row]) -> str:
    """Markdown, columns aligned."""
    head = ("check", "case", "value", "of the floor", "aim", "note")
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def as_json(device: str, rows: Sequence[Row]) -> str:
    """One line."""
    return json.dumps({"device": device, "rows": [asdict(row) for row in rows]})


def _cells(row: Row) -> tuple[str, ...]:
    if row.value is None:
        value = "n/a" if row.unit == "n/a" else "FAILED"
    else:
        value = f"{row.value:,.0f} {row.unit}" if row.value >= 100 else f"{row.value:.3g} {row.unit}"
    share = "" if row.share is None else f"{row.share:.0%}"
    aim = "" if row.aim is None else f"{row.aim:.0%}"
    return row.check, row.case, value, share, aim, row.note
