"""What the grammar library says when it refuses a grammar, in the words of an API: no advice about options that
nobody can set here, no drawing of the source, and the number of each limit."""

from __future__ import annotations

import re
from collections.abc import Callable

from pagemill_shared.grammar_limits import PARSER_LIMITS

MAX_REASON = 300
NO_TEXT = "no text matches it"
TOO_COMPLEX = "is too complex"
"""How the reasons begin that are limits on what a grammar costs."""

_Words = str | Callable[[re.Match[str]], str]

_LIBRARY: tuple[tuple[str, _Words], ...] = (
    (r"NoExtensionBias|Regex is empty", NO_TEXT),
    # JSON schemas
    (r"Unimplemented keys: \[(.*)\]", lambda m: f"cannot be enforced with {_listed(m[1])}"),
    (
        r"oneOf constraints are not supported",
        "oneOf can be enforced only where its branches are of different types; with anyOf it can",
    ),
    (r"anyOf is empty", f"{NO_TEXT}: an enum is empty, or has no value that the rest of its schema allows"),
    (r"Unsatisfiable schema: (.*)", lambda m: f"{NO_TEXT}: {m[1]}"),
    (r"Unknown format: (.*)", lambda m: f"the format {m[1]!r} is not known"),
    (r"Pointer '(.*)' does not exist", lambda m: f"$ref points to {m[1]!r}, where nothing is"),
    (r"Resource '(.*)' is not present", lambda m: f"$ref or $schema names {m[1]!r}, but nothing outside is read"),
    (r"circular references with sibling keys", "a $ref that leads back to itself cannot have keywords beside it"),
    (
        r"min/maxProperties only supported",
        "minProperties and maxProperties can be enforced only where every key of properties is required",
    ),
    (
        r"Failed to generate regex for \w+ range: min=(\S+), max=(\S+)",
        lambda m: (
            f"minimum and maximum (here {_bound(m[1])} and {_bound(m[2])}) cannot be enforced: a minimum of 10^18 or "
            "more needs a maximum, and a maximum of -10^18 or less needs a minimum"
        ),
    ),
    (r"Value for 'multipleOf' has too many digits", "multipleOf has too many digits"),
    (r"not JSON serializable", "half a surrogate pair is no text"),
    (r"recursion limit exceeded", "is nested too deeply"),
    # Limits
    (
        r"Current row has",
        f"{TOO_COMPLEX}: more than {PARSER_LIMITS['max_items_in_row']:,} items at one place",
    ),
    (
        r"Too many items \(limit (\d+)",
        lambda m: (
            f"{TOO_COMPLEX}: one token takes more than {int(m[1]):,} items; long words cost less than "
            "single characters, and repetitions less than recursion"
        ),
    ),
    (
        r"grammar size \(number of symbols\) too big|schema too large",
        f"{TOO_COMPLEX}: it makes more than {PARSER_LIMITS['max_grammar_size']:,} symbols",
    ),
    (
        r"too many states",
        f"{TOO_COMPLEX}: its words need more than {PARSER_LIMITS['max_lexer_states']:,} states",
    ),
    (
        r"too many expressions constructed|fuel|lexer configuration \(grammar\) too big",
        f"{TOO_COMPLEX}: its words or repetitions cost more than {PARSER_LIMITS['initial_lexer_fuel']:,} steps at the "
        f"beginning, or {PARSER_LIMITS['step_lexer_fuel']:,} for one token",
    ),
    # Regular expressions
    (
        r"look-?arounds?,? (?:including|not supported)",
        "look-around (also \\b, and ^ or $ in the middle) is not supported in regular expressions",
    ),
    (
        r"regex parse error: .*error: decimal literal invalid",
        f"a regular expression is not valid: a repetition can be at most {2**32 - 1:,} times",
    ),
    (
        r"regex parse error: .*error: exceed the maximum number of nested parentheses/brackets \((\d+)\)",
        lambda m: (
            f"a regular expression is nested too deeply: more than {m[1]} brackets in each other; a minimum or maximum "
            "closer to 0 than about 10^-65 makes such a one"
        ),
    ),
    (r"regex parse error: .*error: (.*?)(?: \d+ \| .*)?$", lambda m: f"a regular expression is not valid: {m[1]}"),
    # Grammars
    (r"Failed to convert the grammar from GBNF to Lark: (.*)", lambda m: f"is no grammar in Lark, nor in GBNF: {m[1]}"),
    (r"unknown special token: (.*?);", lambda m: f"{m[1]} is no control token of this model"),
    (r"Unknown common regex: (.*?);", lambda m: f"{m[1]} cannot be imported"),
    (r"^(?:at )?(\d+)\((\d+)\): (.*?)(?: \d+ \| .*)?$", lambda m: f"line {m[1]}, column {m[2]}: {m[3]}"),
)


def in_our_words(message: str) -> str:
    """``message`` of the library as a client may read it, on one line of at most ``MAX_REASON`` characters."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    for pattern, words in _LIBRARY:
        found = re.search(pattern, text)
        if found is not None:
            text = words if isinstance(words, str) else words(found)
            break
    return text[:MAX_REASON]


def _bound(printed: str) -> str:
    """Rust's ``Some(5)`` or ``None``."""
    return printed.removeprefix("Some(").removesuffix(")").replace("None", "none")


def _listed(names: str) -> str:
    return ", ".join(name.strip(' "') for name in names.split(","))
