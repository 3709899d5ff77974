"""The tables at the end of docs/api.md say what the bodies do: no field is missing from it, none is told of wrongly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagemill_gateway.bodies import RequestBody
from pagemill_gateway.chat_body import ChatBody
from pagemill_gateway.completion_body import CompletionBody
from pagemill_gateway.embedding_body import EmbeddingBody
from pagemill_gateway.response_body import ResponseBody

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8").partition("## Beside OpenAI")[2]
SECTIONS = dict(re.findall(r"^### ([^\n]+)\n(.*?)(?=^### |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
GENERATION = "Fields of chats and completions"
BODIES: list[tuple[str, type[RequestBody]]] = [
    (GENERATION, ChatBody),
    (GENERATION, CompletionBody),
    ("Fields of responses", ResponseBody),
    ("Fields of embeddings", EmbeddingBody),
]


def row_of(section: str, field: str) -> list[str]:
    """The cells of the row that tells of ``field``."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTIONS[section].splitlines()]
    for column in (0, -1):
        for cells in rows:
            if any(
                re.fullmatch(name.replace("*", ".*"), field) for name in re.findall(r"`([a-z_]+\*?)", cells[column])
            ):
                return cells
    raise AssertionError(f"{field} is not in the table")


@pytest.mark.parametrize(("section", "body"), BODIES)
def test_every_field_is_told_of(section: str, body: type[RequestBody]) -> None:
    known = {info.alias or name for name, info in body.model_fields.items()} - {"model"}
    for field in [*known, *body.unserved, *body.ignored]:
        row_of(section, field)


@pytest.mark.parametrize(("section", "body"), BODIES)
def test_what_is_not_served_is_told_as_refused_and_what_does_nothing_as_ignored(
    section: str, body: type[RequestBody]
) -> None:
    for field in body.unserved:
        assert "refused" in row_of(section, field)[-1], field
    for field in body.ignored:
        assert "ignored" in row_of(section, field)[-1], field


def test_fields_of_others_that_are_unknown_are_no_fields() -> None:
    [row] = [line for line in SECTIONS[GENERATION].splitlines() if line.endswith("| unknown |")]
    for field in re.findall(r"`([a-z_]+)`", row):
        for body in (ChatBody, CompletionBody):
            assert field not in {*body.model_fields, *body.unserved, *body.ignored}
