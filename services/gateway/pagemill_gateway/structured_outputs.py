"""Fields that say what an answer must match: OpenAI's response_format, vLLM's structured_outputs and older guided_*."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pagemill_gateway.bodies import field_error

MAX_CHOICES = 1024
"""Most texts to choose from."""

Kind = Literal["json", "regex", "choice", "grammar", "lark"]
"""Lark is what is made here; a grammar of somebody else may be GBNF, too."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must match.

    Attributes:
        field: the request's field that asks for it.
        source: a JSON schema as an object, a boolean or JSON text, a regular expression, texts, or a grammar.
        spaced: whether JSON may have blanks and line breaks between its parts.
        parts: the schemas of other fields that a grammar was made of, so that the one at fault can be named.
    """

    field: str
    kind: Kind
    source: Any
    spaced: bool = True
    parts: tuple[Constraint, ...] = ()


ANY_OBJECT: dict[str, Any] = {"type": "object"}


class JsonSchemaFormat(BaseModel):
    """``strict`` changes nothing: the answer always matches."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str | None = Field(None, min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @property
    def constraint(self) -> Constraint | None:
        if self.type == "text":
            return None
        if self.type == "json_object" or self.json_schema is None:
            return Constraint("response_format", "json", ANY_OBJECT)
        return Constraint("response_format.json_schema.schema", "json", self.json_schema.schema_)


class StructuredOutputs(BaseModel):
    """Exactly one of the first five."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    grammar: str | None = None
    disable_any_whitespace: bool = False

    @property
    def constraint(self) -> Constraint:
        spaced = not self.disable_any_whitespace
        if self.json_object:
            return Constraint("structured_outputs.json_object", "json", ANY_OBJECT, spaced)
        if self.json_ is not None:
            return Constraint("structured_outputs.json", "json", self.json_, spaced)
        return _first("structured_outputs.", self.regex, self.choice, self.grammar)


def _first(prefix: str, regex: str | None, choice: list[str] | None, grammar: str | None) -> Constraint:
    if regex is not None:
        return Constraint(f"{prefix}regex", "regex", regex)
    if choice is not None:
        return Constraint(f"{prefix}choice", "choice", choice)
    return Constraint(f"{prefix}grammar", "grammar", grammar)


class StructuredFields(BaseModel):
    """At most one of them asks for anything."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _check_structured(self) -> StructuredFields:
        form = self.response_format
        if form is not None and form.type == "json_schema":
            if form.json_schema is None:
                raise field_error("response_format.json_schema", "response_format.json_schema is missing")
            if form.json_schema.schema_ is None:
                raise field_error("response_format.json_schema.schema", "response_format.json_schema.schema is missing")
        elif form is not None and form.json_schema is not None:
            raise field_error(
                "response_format.json_schema", f"response_format.json_schema has no meaning with type {form.type!r}"
            )
        outputs = self.structured_outputs
        if outputs is not None:
            fields = (outputs.json_, outputs.json_object or None, outputs.regex, outputs.choice, outputs.grammar)
            if sum(field is not None for field in fields) != 1:
                raise field_error(
                    "structured_outputs",
                    "structured_outputs needs exactly one of json, json_object, regex, choice and grammar",
                )
        asking = self._asking()
        if len(asking) > 1:
            first, second, *_ = (constraint.field.partition(".")[0] for constraint in asking)
            raise field_error(second, f"{second} cannot be combined with {first}")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """What the answer must match, None for anything."""
        asking = self._asking()
        return asking[0] if asking else None

    def _asking(self) -> list[Constraint]:
        asking = []
        if self.response_format is not None and self.response_format.constraint is not None:
            asking.append(self.response_format.constraint)
        if self.structured_outputs is not None:
            asking.append(self.structured_outputs.constraint)
        if self.guided_json is not None:
            asking.append(Constraint("guided_json", "json", self.guided_json))
        for regex, choice, grammar in (
            (self.guided_regex, None, None),
            (None, self.guided_choice, None),
            (None, None, self.guided_grammar),
        ):
            if regex is not None or choice is not None or grammar is not None:
                asking.append(_first("guided_", regex, choice, grammar))
        return asking
