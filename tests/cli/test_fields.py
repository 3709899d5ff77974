from __future__ import annotations

from typing import ClassVar, Literal

import pytest
from pydantic import Field

from pagemill.configuration import ALL_SETTINGS
from pagemill.fields import GROUP_ORDER, POSITIONAL, setting_fields
from pagemill_shared.settings import SettingsGroup, WorkerSettings


class Example(SettingsGroup):
    group: ClassVar[str] = "HTTP"

    some_word: Literal["a", "b"] = Field("a", description="a word")
    switch: bool = Field(False, description="a switch")
    count: int | None = Field(None, ge=1, description="a count")
    share: float = Field(0.5, gt=0, le=1, description="a share")


def test_fields_are_put_into_words() -> None:
    words = {
        field.name: (field.flag, field.variable, field.default, field.allowed) for field in setting_fields(Example)
    }
    assert words == {
        "some_word": ("--some-word", "PAGEMILL_SOME_WORD", "a", "a, b"),
        "switch": ("--switch", "PAGEMILL_SWITCH", "false", "true, false"),
        "count": ("--count", "PAGEMILL_COUNT", None, "whole number, at least 1"),
        "share": ("--share", "PAGEMILL_SHARE", "0.5", "number, more than 0, at most 1"),
    }


@pytest.mark.parametrize("cls", ALL_SETTINGS)
def test_every_setting_has_a_description_and_a_group(cls: type[SettingsGroup]) -> None:
    for field in setting_fields(cls):
        assert field.description, field.name
        assert field.group in GROUP_ORDER, field.name


def test_groups_stand_together_and_the_model_comes_first() -> None:
    fields = setting_fields(WorkerSettings)
    assert fields[0].name == POSITIONAL
    groups = [field.group for field in fields]
    assert groups == sorted(groups, key=GROUP_ORDER.index)
