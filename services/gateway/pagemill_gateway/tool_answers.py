"""What a chat's answers hold when there are tools: calls are told apart from text, whole or as a stream."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagemill_gateway.chat_body import ChatBody
from pagemill_gateway.choice import Choice
from pagemill_gateway.engine import Engine
from pagemill_gateway.grammar_checker import schema_of
from pagemill_gateway.json_schemas import arguments_schema
from pagemill_gateway.structured_outputs import Constraint
from pagemill_gateway.tool_calls import Arguments, CallBegins, Content, ToolEvent
from pagemill_gateway.tool_fields import MAX_CALLS, Tool
from pagemill_gateway.tool_formats import ToolFormat
from pagemill_gateway.tool_parsers import ToolCallParser


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request.

    Attributes:
        control_token: the id of a control token, None where the tokenizer has none of that name.
    """

    form: ToolFormat
    names: frozenset[str]
    most: int
    control_token: Callable[[str], int | None]

    @classmethod
    def of(cls, engine: Engine, body: ChatBody) -> Tools | None:
        """None for a request whose answers cannot hold calls."""
        tools = body.enforced_tools or body.offered_tools
        if not tools:
            return None
        names = frozenset(tool.function.name for tool in tools)
        return cls(engine.tool_format, names, body.most_calls, engine.tokenizer.special_id)

    @property
    def shown(self) -> frozenset[int]:
        """Control tokens that the parser has to see."""
        ids = (self.control_token(marker) for marker in self.form.markers)
        return frozenset(token_id for token_id in ids if token_id is not None)

    def constraint(self, body: ChatBody) -> Constraint | None:
        """What the answer must match: calls where they are asked for; where a schema is, that or calls.

        Raises:
            ApiError: the schema is not valid.
        """
        enforced = body.enforced_tools
        if enforced:
            grammar = self.form.grammar(enforced, min(self.most, MAX_CALLS), self.control_token)
            return Constraint("tools", "lark", grammar, parts=_parts(body, enforced))
        asked = body.constraint
        if asked is None or asked.kind != "json":
            return asked
        offered = body.offered_tools
        grammar = self.form.grammar(offered, self.most, self.control_token, schema_of(asked))
        return Constraint(asked.field, "lark", grammar, parts=(asked, *_parts(body, offered)))

    def parser(self) -> ToolCallParser:
        return self.form.parser(self.names, self.most)

    def stream(self) -> ToolStream:
        return ToolStream(self.parser(), self._new_id)

    def read(self, choice: Choice, text: str) -> tuple[dict[str, Any], str | None]:
        """``content`` and ``tool_calls`` of the message of a choice with this text, and its finish reason."""
        parser = self.parser()
        content = ""
        calls: list[dict[str, Any]] = []
        for event in [*parser.push(text), *parser.finish()]:
            match event:
                case Content(text=piece):
                    content += piece
                case CallBegins(name=name):
                    function = {"name": name, "arguments": ""}
                    calls.append({"id": self._new_id(), "type": "function", "function": function})
                case Arguments(text=piece):
                    calls[-1]["function"]["arguments"] += piece
        message = {"content": content or None, "tool_calls": calls} if calls else {"content": content}
        return message, finish_reason(choice, parser)

    def _new_id(self) -> str:
        return self.form.new_id(secrets.token_hex(12))


def _parts(body: ChatBody, tools: Sequence[Tool]) -> tuple[Constraint, ...]:
    """The schemas of these of the body's tools, by the names of their fields."""
    places = {tool.function.name: place for place, tool in enumerate(body.tools)}
    return tuple(
        Constraint(
            f"tools[{places[tool.function.name]}].function.parameters",
            "json",
            arguments_schema(tool.function.parameters),
        )
        for tool in tools
    )


class ToolStream:
    """One answer as a stream of deltas, each as JSON text."""

    def __init__(self, parser: ToolCallParser, new_id: Callable[[], str]) -> None:
        self._parser, self._new_id = parser, new_id
        self._index = 0

    def push(self, text: str) -> list[str]:
        return [self._delta(event) for event in self._parser.push(text)]

    def finish(self, choice: Choice) -> tuple[list[str], str | None]:
        """The last deltas, and the finish reason of ``choice``, whose text it was."""
        deltas = [self._delta(event) for event in self._parser.finish()]
        return deltas, finish_reason(choice, self._parser)

    def _delta(self, event: ToolEvent) -> str:
        call: dict[str, Any]
        match event:
            case Content(text=text):
                return json.dumps({"content": text}, ensure_ascii=False)
            case CallBegins(index=index, name=name):
                self._index = index
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": self._new_id(), "type": "function", "function": function}
            case Arguments(text=text):
                call = {"index": self._index, "function": {"arguments": text}}
        return json.dumps({"tool_calls": [call]}, ensure_ascii=False)


def finish_reason(choice: Choice, parser: ToolCallParser) -> str | None:
    """A complete answer with calls ends for them; one that was cut says so. A stop string or stop token cuts an answer
    as a limit does if the arguments of a call are not all there; behind them it is only where the answer ends."""
    cut = parser.cut and choice.stop_reason is not None
    return "tool_calls" if parser.calls and choice.finish_reason == "stop" and not cut else choice.finish_reason
