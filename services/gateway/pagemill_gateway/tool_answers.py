"""What a chat's answers hold when there are tools: calls are told apart from text, whole or as a stream."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagemill_gateway.chat_body import ChatBody
from pagemill_gateway.choice import Choice
from pagemill_gateway.engine import Engine
from pagemill_gateway.structured_outputs import Constraint
from pagemill_gateway.tool_calls import Arguments, CallBegins, Content, ToolEvent
from pagemill_gateway.tool_fields import MAX_CALLS
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
        """What the answer must match: calls where they are asked for; where a schema is, that or calls."""
        enforced = body.enforced_tools
        if enforced:
            grammar = self.form.grammar(enforced, min(self.most, MAX_CALLS), self.control_token)
            return Constraint("tools", "lark", grammar)
        asked = body.constraint
        if asked is None or asked.kind != "json" or not isinstance(asked.source, dict):
            return asked
        grammar = self.form.grammar(body.offered_tools, self.most, self.control_token, asked.source)
        return Constraint(asked.field, "lark", grammar)

    def parser(self) -> ToolCallParser:
        return self.form.parser(self.names, self.most)

    def stream(self) -> ToolStream:
        return ToolStream(self.parser(), self._new_id)

    def read(self, text: str) -> dict[str, Any]:
        """``content`` and ``tool_calls`` of a whole answer's message."""
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
        return {"content": content or None, "tool_calls": calls} if calls else {"content": content}

    def _new_id(self) -> str:
        return self.form.new_id(secrets.token_hex(12))


class ToolStream:
    """One answer as a stream of deltas, each as JSON text."""

    def __init__(self, parser: ToolCallParser, new_id: Callable[[], str]) -> None:
        self._parser, self._new_id = parser, new_id
        self._index = 0

    @property
    def has_calls(self) -> bool:
        return self._parser.calls > 0

    def push(self, text: str) -> list[str]:
        return [self._delta(event) for event in self._parser.push(text)]

    def finish(self) -> list[str]:
        return [self._delta(event) for event in self._parser.finish()]

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


def finish_reason(choice: Choice, has_calls: bool) -> str | None:
    """A complete answer with calls ends for them; one that was cut says so."""
    return "tool_calls" if has_calls and choice.finish_reason == "stop" else choice.finish_reason
