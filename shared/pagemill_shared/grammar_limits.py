"""What a grammar may cost, and what it fails with. The gateway refuses what costs more, the worker fails the row.

The gateway and the worker compile under the same limits, so that what the one accepts the other compiles.
"""

from __future__ import annotations

from typing import TypedDict

GRAMMAR_FAILED, GRAMMAR_TIMEOUT = "grammar_failed", "grammar_timeout"
"""Codes of requests whose grammar cannot be compiled or cannot go on, and of those whose is not compiled in time."""


class ParserLimits(TypedDict):
    """Arguments of ``llguidance.LLParserLimits``."""

    max_grammar_size: int
    max_items_in_row: int
    initial_lexer_fuel: int
    step_lexer_fuel: int
    step_max_items: int
    max_lexer_states: int
    verbose_errors: bool


PARSER_LIMITS = ParserLimits(
    max_grammar_size=100_000,  # symbols
    max_items_in_row=2_000,
    initial_lexer_fuel=150_000,  # also of a text that has only one way on, which is followed at once: under a second
    step_lexer_fuel=200_000,  # of one token: some ten milliseconds
    step_max_items=20_000,
    max_lexer_states=50_000,  # of one or two kilobytes each
    verbose_errors=False,  # they would tell the client's whole grammar again
)
