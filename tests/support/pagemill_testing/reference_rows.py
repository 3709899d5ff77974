"""What the reference core knows: blocks, sequences, requests, and what a plan says."""

from __future__ import annotations

from dataclasses import dataclass, field


class Node:
    """Stands for all tokens up to the end of a named block; each naming makes one."""


Name = tuple[Node | str, tuple[int, ...]]


@dataclass(eq=False)
class Block:
    """A device block. In the prefix cache it has a name: the node of the block before it (or the salt), its tokens."""

    name: Name | None = None
    node: Node = field(default_factory=Node)


@dataclass(eq=False)
class Row:
    """A sequence. ``table`` is None while it has no seat; ``parked``: what it had swapped out, by the old blocks. Its
    first ``named`` blocks were offered to the prefix cache, each once; ``node`` stands for them."""

    request: Group
    index: int
    tokens: list[int]
    computed: int = 0
    pending: int = 0
    in_flight: int = 0
    table: list[Block] | None = None
    parked: list[Block] = field(default_factory=list)
    finished: bool = False
    gate: tuple[Row, int] | None = None
    named: int = 0
    node: Node | str = ""

    def gated(self) -> bool:
        return self.gate is not None and self.gate[0].computed < self.gate[1]


@dataclass(eq=False)
class Group:
    """A request."""

    handle: int
    prompt: list[int]
    n: int
    max_tokens: int
    ends: set[int]
    priority: int
    salt: str
    rows: list[Row] = field(default_factory=list)
    running: bool = False
    swapped: bool = False
    forked: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        return self.priority, self.handle

    def left(self) -> list[Row]:
        return [row for row in self.rows if not row.finished]


@dataclass
class Plan:
    """What a plan says, with (handle, sequence) for a slot: ``chunks`` (…, start, count, samples), ``joins``
    (…, computed, blocks), ``grown`` (…, position); ``sampled`` are the rows behind the tokens of the chunks."""

    rows: set[tuple[int, int]] = field(default_factory=set)
    chunks: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    joins: list[tuple[int, int, int, int]] = field(default_factory=list)
    grown: set[tuple[int, int, int]] = field(default_factory=set)
    copies: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    sampled: list[Row] = field(default_factory=list)
