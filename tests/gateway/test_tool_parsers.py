"""Calls in the text of an answer: what each format makes of it, and that pieces make no difference."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill_gateway.tool_calls import Arguments, CallBegins, Content
from pagemill_gateway.tool_parsers import Llama3Parser, MistralParser, TaggedParser, ToolCallParser

NAMES = frozenset({"get_weather", "add"})
PARSERS: dict[str, type[ToolCallParser]] = {"hermes": TaggedParser, "llama3": Llama3Parser, "mistral": MistralParser}
TEXT = st.text('ab"\\{}[]<>,:é\n ', max_size=8)
Answer = tuple[str, list[tuple[str, str]]]


@dataclass
class Joined:
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)

    def add(self, events: list[Content | CallBegins | Arguments]) -> None:
        for event in events:
            match event:
                case Content(text=text):
                    assert text
                    self.content += text
                case CallBegins(index=index, name=name):
                    assert index == len(self.calls)
                    self.calls.append([name, ""])
                case Arguments(text=text):
                    self.calls[-1][1] += text

    @property
    def answer(self) -> Answer:
        return self.content, [(name, arguments) for name, arguments in self.calls]


def parse(kind: str, *pieces: str, most: int = 128) -> Answer:
    parser, joined = PARSERS[kind](NAMES, most), Joined()
    for piece in pieces:
        joined.add(parser.push(piece))
    joined.add(parser.finish())
    assert min(parser.calls, most) == len(joined.calls)
    return joined.answer


def tag(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


PARIS = '{"city": "Paris"}'
CALL = f'{{"name": "get_weather", "arguments": {PARIS}}}'
LLAMA = f'{{"name": "get_weather", "parameters": {PARIS}}}'
ADD = '{"name": "add", "arguments": {"a": [1, {"b": "}\\"]"}], "c": -1.5e3}}'
ADDED = ("add", '{"a": [1, {"b": "}\\"]"}], "c": -1.5e3}')
WEATHER = ("get_weather", PARIS)

CASES: list[tuple[str, str, Answer]] = [
    ("hermes", "Hello, world.\n", ("Hello, world.\n", [])),
    ("hermes", "  \n", ("  \n", [])),
    ("hermes", tag(CALL), ("", [WEATHER])),
    ("hermes", tag(CALL).replace("\n", ""), ("", [WEATHER])),
    ("hermes", f"Let me see.\n\n{tag(CALL)}\n{tag(ADD)}\n", ("Let me see.", [WEATHER, ADDED])),
    ("hermes", f"{tag(CALL)} and then\n", (" and then", [WEATHER])),
    ("hermes", f"a <tool_ {tag(CALL)} < b", ("a <tool_ < b", [WEATHER])),
    ("hermes", "<<tool_call>" + CALL, ("<", [WEATHER])),
    ("hermes", tag(f"{CALL}}}"), ("", [WEATHER])),
    ("hermes", tag(CALL[:-1]), ("", [WEATHER])),
    ("hermes", tag('{"name": "add", "arguments": {"a": 1'), ("", [("add", '{"a": 1\n')])),
    ("hermes", f"<tool_call>{CALL}<tool_call>{ADD}", ("", [WEATHER, ADDED])),
    ("hermes", tag('{"arguments": {"a": 1}, "name": "add"}'), ("", [("add", '{"a": 1}')])),
    ("hermes", tag('{"id": 7, "x": null, "name": "add", "arguments": {"a": 1}}'), ("", [("add", '{"a": 1}')])),
    ("hermes", tag('{"name": "add"}'), ("", [("add", "{}")])),
    ("hermes", tag('{"name": "add", "arguments": null}'), ("", [("add", "{}")])),
    ("hermes", tag('{"name": "add", "arguments": "{\\"a\\": 1}"}'), ("", [("add", '{"a": 1}')])),
    ("hermes", tag('{"name": "nobody", "arguments": {}}'), (tag('{"name": "nobody", "arguments": {}}'), [])),
    ("hermes", tag('{"city": "Paris"}'), (tag('{"city": "Paris"}'), [])),
    ("hermes", "<tool_call>no", ("<tool_call>no", [])),
    ("hermes", '<tool_call>{"name": "get_wea', ('<tool_call>{"name": "get_wea', [])),
    ("hermes", "so <tool_call>\n", ("so <tool_call>\n", [])),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "half', ("", [("add", '{"a": "half')])),
    ("hermes", LLAMA, (LLAMA, [])),
    ("llama3", LLAMA, ("", [WEATHER])),
    ("llama3", f"\n {LLAMA}", ("", [WEATHER])),
    ("llama3", f"<|python_tag|>{LLAMA}", ("", [WEATHER])),
    ("llama3", f"{LLAMA}; {ADD}\n", ("", [WEATHER, ADDED])),
    ("llama3", f"Sure. <|python_tag|> {LLAMA}", ("Sure.", [WEATHER])),
    ("llama3", f"Sure: {LLAMA}", (f"Sure: {LLAMA}", [])),
    ("llama3", '{"answer": 42}', ('{"answer": 42}', [])),
    ("llama3", '{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', [])),
    ("llama3", "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    ("llama3", "<|python_tag|> ", ("<|python_tag|> ", [])),
    ("llama3", "<|pyth", ("<|pyth", [])),
    ("llama3", "{", ("{", [])),
    ("llama3", "Hello", ("Hello", [])),
    ("mistral", f"[TOOL_CALLS][{CALL}]", ("", [WEATHER])),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {ADD}]", ("", [WEATHER, ADDED])),
    ("mistral", f"One moment. [TOOL_CALLS][{CALL}] done", ("One moment. done", [WEATHER])),
    ("mistral", f"[TOOL_CALLS]get_weather{PARIS}", ("", [WEATHER])),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]add[ARGS]{{}}", ("", [WEATHER, ("add", "{}")])),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{PARIS}", ("", [WEATHER])),
    ("mistral", "[TOOL_CALLS]nobody{}", ("[TOOL_CALLS]nobody{}", [])),
    ("mistral", "[TOOL_CALLS][1]", ("[TOOL_CALLS][1]", [])),
    ("mistral", '[TOOL_CALLS][{"name": "x"}]', ('[TOOL_CALLS][{"name": "x"}]', [])),
    ("mistral", "[TOOL_CALLS]get_wea", ("[TOOL_CALLS]get_wea", [])),
    ("mistral", "[TOOL_CALLS] ", ("[TOOL_CALLS] ", [])),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a"', ("", [("add", '{"a"')])),
    ("mistral", '[TOOL_CALLS]add{"a": "}', ("", [("add", '{"a": "}')])),
    ("mistral", "a list [1, 2] and [TOOL", ("a list [1, 2] and [TOOL", [])),
]


@pytest.mark.parametrize(("kind", "text", "expected"), CASES, ids=lambda value: str(value)[:40])
def test_whole_and_character_by_character(kind: str, text: str, expected: Answer) -> None:
    assert parse(kind, text) == expected
    assert parse(kind, *text) == expected


@pytest.mark.parametrize("kind", PARSERS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_pieces_make_no_difference(kind: str, data: st.DataObject) -> None:
    fragments = [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "{", "}", "[", "]", '"', "\\", ",",
        ";", ":", " ", "\n", "<", "name", '"name"', '"arguments"', '"parameters"', '"add"', "add", "1", "é🙂", CALL,
        ADD,
    ]  # fmt: skip
    text = "".join(data.draw(st.lists(st.sampled_from(fragments), max_size=24)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(kind, *pieces) == parse(kind, text)


@pytest.mark.parametrize("kind", PARSERS)
@given(
    before=st.text("ab \n.é", max_size=12),
    calls=st.lists(
        st.tuples(
            st.sampled_from(sorted(NAMES)),
            st.dictionaries(
                st.text('a"\\é', max_size=3), st.none() | st.integers() | TEXT | st.lists(TEXT), max_size=3
            ),
        ),
        min_size=1,
        max_size=3,
    ),
)
@settings(max_examples=50, deadline=None)
def test_what_is_written_is_read(kind: str, before: str, calls: list[tuple[str, dict[str, object]]]) -> None:
    objects = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    written = {
        "hermes": "\n".join(map(tag, objects)),
        "llama3": "<|python_tag|>" + "; ".join(objects),
        "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
    }[kind]
    content, found = parse(kind, before + written)
    assert content == before.rstrip(" \t\r\n")
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@given(st.text(max_size=60))
def test_text_without_calls_is_untouched(text: str) -> None:
    for kind in PARSERS:
        assert parse(kind, text) == (text, [])


@pytest.mark.parametrize("kind", PARSERS)
def test_no_more_calls_than_are_allowed(kind: str) -> None:
    written = {
        "hermes": tag(CALL) + tag(ADD),
        "llama3": f"{CALL}; {ADD}",
        "mistral": f"[TOOL_CALLS][{CALL}, {ADD}]",
    }[kind]
    assert parse(kind, *written, most=1) == ("", [WEATHER])


def test_arguments_come_as_they_are_written() -> None:
    parser = TaggedParser(NAMES, 128)
    assert parser.push('so:\n<tool_call>{"name": "add", "argu') == [Content("so:"), CallBegins(0, "add")]
    assert parser.push('ments": {"a"') == [Arguments('{"a"')]
    assert parser.push(": 1}") == [Arguments(": 1}")]
    assert parser.push("}</tool_call>\nThat") == [Content("\nThat")]
