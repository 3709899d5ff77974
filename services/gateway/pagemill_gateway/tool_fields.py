"""The fields of a chat that are about tools: which there are, which must be called, and calls of earlier turns."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator, model_validator
from pydantic_core import from_json

from pagemill_gateway.bodies import field_error
from pagemill_gateway.json_schemas import OPTIONS_KEYWORD, check_parameters

MAX_TOOLS = 128
MAX_CALLS = 16
"""Most calls of one answer that must call something."""


_SCHEMA = {"type": ["object", "boolean"]}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "description": "A JSON schema of an object. Left out or empty: the function takes no arguments.",
    "anyOf": [
        {"maxProperties": 0},
        {
            "required": ["type"],
            "properties": {
                "type": {"const": "object"},
                "properties": {"type": "object", "additionalProperties": _SCHEMA},
                "required": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
                "additionalProperties": _SCHEMA,
                OPTIONS_KEYWORD: False,
            },
        },
    ],
}
"""What can be said in JSON schema of a function's parameters; that they are a valid schema in depth is checked."""


class FunctionTool(BaseModel):
    """``strict`` changes nothing: where calls are enforced, their arguments always match."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="Letters, digits, dots, dashes and underscores.")
    description: str | None = None
    parameters: Annotated[dict[str, Any], WithJsonSchema(PARAMETERS)] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _check_parameters(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value:
            check_parameters(value)
        return value


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["function"]
    function: FunctionTool

    def as_template_tool(self) -> dict[str, Any]:
        """What the chat template sees."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class NamedFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str


class NamedToolChoice(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(BaseModel):
    # OpenAI's client adds what it has made of the arguments.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    name: str
    arguments: str


class EarlierCall(BaseModel):
    """A call in an assistant's message of an earlier turn."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_template_call(self) -> dict[str, Any]:
        """What the chat template sees: arguments as an object, which it writes as JSON itself. What is no JSON, or
        nested too deeply, is text."""
        try:
            arguments = from_json(_without_half_pairs(self.function.arguments))
        except ValueError:
            arguments = self.function.arguments
        call: dict[str, Any] = {"type": "function", "function": {"name": self.function.name, "arguments": arguments}}
        return call if self.id is None else {"id": self.id, **call}


_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)
"""An escape in JSON. The group is half a surrogate pair that stands alone."""


def _without_half_pairs(text: str) -> str:
    """JSON in which U+FFFD stands for each half surrogate pair: models write them, but they are no text."""
    return _ESCAPE.sub(lambda escape: "\\ufffd" if escape[1] else escape[0], text)


class ToolFields(BaseModel):
    """What may be called, and whether something must."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice = "auto"
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _check_tools(self) -> ToolFields:
        names = [tool.function.name for tool in self.tools]
        for name in names:
            if names.count(name) > 1:
                raise field_error("tools", f"tools: two functions are called {name!r}")
        if isinstance(self.tool_choice, NamedToolChoice):
            wanted = self.tool_choice.function.name
            if wanted not in names:
                raise field_error("tool_choice", f"tool_choice: no function among tools is called {wanted[:64]!r}")
        elif self.tool_choice == "required" and not names:
            raise field_error("tool_choice", "tool_choice: required, but there are no tools")
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def enforced_tools(self) -> list[Tool]:
        """The tools of which one must be called; none if the model may do as it likes."""
        if isinstance(self.tool_choice, NamedToolChoice):
            wanted = self.tool_choice.function.name
            return [tool for tool in self.tools if tool.function.name == wanted]
        return self.tools if self.tool_choice == "required" else []

    @property
    def most_calls(self) -> int:
        """Most calls in one answer."""
        single = not self.parallel_tool_calls or isinstance(self.tool_choice, NamedToolChoice)
        return 1 if single else MAX_CALLS
