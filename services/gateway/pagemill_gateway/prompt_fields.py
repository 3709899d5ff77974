"""Fields about the prompt itself: how much of it is used, and what is told of its tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, field_validator

from pagemill_shared.sampling import MAX_LOGPROBS, MAX_TOKENS

MAX_PROMPT_LOGPROBS = 1_000_000
"""Most log-probabilities of prompt tokens in one HTTP request: each costs about a hundred bytes in the answer."""
MAX_STREAMED_PROMPT_LOGPROBS = 200_000
"""The same for a stream, whose events are written on the event loop."""


class TruncationFields(BaseModel):
    """How much of a prompt is used."""

    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    truncation_side: Literal["left", "right"] = "left"

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _check_truncation(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("a prompt needs at least one token")
        return value

    def truncated(self, ids: list[int], room: int) -> list[int]:
        """The part of a prompt that is used.

        Args:
            room: most tokens that a prompt may have here; what -1 stands for.
        """
        most = room if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        if most is None or len(ids) <= most:
            return ids
        return ids[-most:] if self.truncation_side == "left" else ids[:most]


class PromptFields(TruncationFields):
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
