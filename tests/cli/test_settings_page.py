from __future__ import annotations

from pathlib import Path

from pagemill.configuration import ALL_SETTINGS
from pagemill.fields import setting_fields
from pagemill.settings_page import COMMANDS, page

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_the_page_names_every_setting_once() -> None:
    assert set(COMMANDS.values()) == set(ALL_SETTINGS)
    for field in {field.name: field for cls in ALL_SETTINGS for field in setting_fields(cls)}.values():
        assert page().count(f"| `{field.variable}` |") == 1
