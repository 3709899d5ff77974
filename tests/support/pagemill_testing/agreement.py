"""Whether two runs chose the same greedy tokens, where sums of floats in another order may decide a near tie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagemill_testing.http_calls import Call

NEAR_TIE = 1e-3
"""Top two logits closer than this (fp32) may change places: batches of other shapes sum in other orders."""
MOST_EXCUSED = 0.05


@dataclass(frozen=True)
class GreedyRun:
    """What a run chose, and how clear each choice was.

    Attributes:
        token_ids: [T] output tokens.
        gaps: [T] logit of each token minus that of the second best.
    """

    token_ids: Sequence[int]
    gaps: Sequence[float]

    @classmethod
    def of(cls, call: Call) -> GreedyRun:
        """From a text completion that was asked for ``logprobs=2`` and token ids."""
        lists = [part["logprobs"]["top_logprobs"] for part in call.choices() if part.get("logprobs")]
        values = [sorted(top.values()) for tops in lists for top in tops]
        return cls(call.token_ids, [top[-1] - top[-2] for top in values])


@dataclass
class Agreement:
    """Compares runs with their references and counts how often a near tie had to excuse a difference."""

    name: str
    compared: int = 0
    excused: list[str] = field(default_factory=list)

    def check(self, expected: GreedyRun, token_ids: Sequence[int], what: str) -> None:
        """The same tokens, or the same up to a near tie; what comes after that is another text, and not compared."""
        self.compared += 1
        assert token_ids, what
        length = min(len(expected.token_ids), len(token_ids))
        for position in range(length):
            if token_ids[position] != expected.token_ids[position]:
                gap = expected.gaps[position]
                assert gap < NEAR_TIE, (
                    f"{what}: token {position} is {token_ids[position]} instead of {expected.token_ids[position]}, "
                    f"which leads by {gap:.4f}"
                )
                self.excused.append(f"{what} at token {position} (gap {gap:.1e})")
                return
        assert len(token_ids) == len(expected.token_ids), f"{what}: {len(token_ids)} tokens, {len(expected.token_ids)}"

    def check_equal(self, equal: bool, least_gap: Callable[[], float], what: str) -> None:
        """For outputs that are compared as a whole, as those of a beam search.

        Args:
            least_gap: the closest of the choices that led to the expected output.
        """
        self.compared += 1
        if not equal:
            gap = least_gap()
            assert gap < NEAR_TIE, f"{what} differs, though its closest choice is clear by {gap:.4f}"
            self.excused.append(f"{what} (gap {gap:.1e})")

    def conclude(self) -> None:
        """Says how often the exception was used; fails if that is no exception any more."""
        print(f"{self.name}: {self.compared} compared, {len(self.excused)} differ from a near tie on {self.excused}")  # noqa: T201
        assert len(self.excused) <= MOST_EXCUSED * self.compared, self.excused
