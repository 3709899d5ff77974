"""How a family of models writes function calls: which parser reads them, which grammar enforces them, and how they are
told of tools where their chat template does not do it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pagemill_gateway.grammar_checker import json_options, lark_string
from pagemill_gateway.json_schemas import adapted, arguments_schema
from pagemill_gateway.tool_fields import Tool
from pagemill_gateway.tool_parsers import Llama3Parser, MistralParser, TaggedParser, ToolCallParser

FormatName = Literal["hermes", "llama3", "mistral"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """
    Attributes:
        arguments_key: what the arguments are called in a call's object.
        open, between, close: what stands before the first call, between two, and behind the last.
        markers: control tokens that the parser must see, though such tokens are hidden from the text otherwise.
        new_id: makes a call's id of 24 random hexadecimal digits.
    """

    parser: type[ToolCallParser]
    markers: tuple[str, ...]
    arguments_key: str
    open: str
    between: str
    close: str
    new_id: Callable[[str], str]

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """``calls``, names and arguments, as the model would write them."""
        objects = [json.dumps({"name": n, self.arguments_key: a}, ensure_ascii=False) for n, a in calls]
        return self.open + self.between.join(objects) + self.close

    def grammar(
        self,
        tools: Sequence[Tool],
        most: int,
        control_token: Callable[[str], int | None],
        answer: dict[str, Any] | None = None,
    ) -> str:
        """What an answer of one to ``most`` calls of ``tools`` must match, as Lark.

        Args:
            control_token: the id of a control token, None where the tokenizer has none of that name.
            answer: the JSON schema of what the answer may be instead.
        """
        repeated = f" (between call){{0,{most - 1}}}" if most > 1 else ""
        rules = [
            "start: calls" if answer is None else f"start: calls | answer\nanswer: {_json(answer)}",
            f"calls: open call{repeated} close",
            "call: " + " | ".join(f"call{i}" for i in range(len(tools))),
            *(f"call{i}: {self._call(tool)}" for i, tool in enumerate(tools)),
        ]
        for name, text in {"open": self.open, "between": self.between, "close": self.close}.items():
            rules.append(f"{name}: {self._terminals(text, control_token)}")
        return "\n".join(rules) + "\n"

    def _terminals(self, text: str, control_token: Callable[[str], int | None]) -> str:
        """``text``, in which what the tokenizer has as control tokens is those."""
        parts = [text]
        for marker in self.markers:
            token_id = control_token(marker)
            if token_id is not None:
                parts = [piece for part in parts for piece in _split(part, marker, f"<[{token_id}]>")]
        return " ".join(part if part.startswith("<[") else lark_string(part) for part in parts if part) or '""'

    def _call(self, tool: Tool) -> str:
        function = tool.function
        head = f'{{"name": {json.dumps(function.name)}, "{self.arguments_key}": '
        return f"{lark_string(head)} {_json(arguments_schema(function.parameters))} {lark_string('}')}"


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**adapted(schema), 'x-guidance': json_options(spaced=True)})}"


def _split(text: str, marker: str, stand_in: str) -> list[str]:
    if text.startswith("<["):  # a stand-in already
        return [text]
    pieces = text.split(marker)
    return [pieces[0], *(each for piece in pieces[1:] for each in (stand_in, piece))]


FORMATS: dict[FormatName, ToolFormat] = {
    "hermes": ToolFormat(
        TaggedParser,
        markers=("<tool_call>", "</tool_call>"),
        arguments_key="arguments",
        open="<tool_call>\n",
        between="\n</tool_call>\n<tool_call>\n",
        close="\n</tool_call>",
        new_id=lambda secret: f"call_{secret}",
    ),
    "llama3": ToolFormat(
        Llama3Parser,
        markers=("<|python_tag|>",),
        arguments_key="parameters",
        open="",
        between="; ",
        close="",
        new_id=lambda secret: f"call_{secret}",
    ),
    "mistral": ToolFormat(
        MistralParser,
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        arguments_key="arguments",
        open="[TOOL_CALLS][",
        between=", ",
        close="]",
        new_id=lambda secret: secret[:9],  # its templates want ids of nine letters and digits
    ),
}


def format_of_template(template: str) -> FormatName:
    """The format that a chat template speaks; Hermes' for one that knows no tools."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and "parameters" in template):
        return "llama3"
    return "hermes"
