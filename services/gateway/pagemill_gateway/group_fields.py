"""How many sequences a request asks for, and whether they are samples or beams."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from pagemill_gateway.bodies import field_error
from pagemill_shared.sampling import MAX_SEQUENCES, EarlyStopping

MAX_CHOICES = 4096
"""Most sequences of one HTTP request, all its prompts together."""
MOST_LENGTH_PENALTY = 5.0
"""Beyond it the longest texts would leave the range of float32."""


class GroupFields(BaseModel):
    """Parallel samples by default, or the beams of a beam search."""

    n: int = Field(1, ge=1, le=MAX_SEQUENCES)
    best_of: int | None = Field(None, ge=1, le=MAX_SEQUENCES)
    use_beam_search: bool = False
    beam_width: int | None = Field(None, ge=1, le=MAX_SEQUENCES)
    length_penalty: float = Field(1.0, ge=-MOST_LENGTH_PENALTY, le=MOST_LENGTH_PENALTY)
    early_stopping: bool | Literal["never"] = False

    @field_validator("early_stopping", mode="before", json_schema_input_type=bool | Literal["never"])
    @classmethod
    def _check_early_stopping(cls, value: Any) -> Any:
        if isinstance(value, bool) or value == "never":
            return value
        raise ValueError('must be true, false or "never"')

    @model_validator(mode="after")
    def _check_group(self) -> GroupFields:
        if self.use_beam_search:
            self._check_width()
        else:
            self._check_no_beams()
        if self.n > self._width:
            raise field_error(
                self.width_field if self.width_field == "best_of" else "n",
                f"n {self.n} is greater than {self.width_field} {self._width}",
            )
        return self

    def _check_width(self) -> None:
        if self.beam_width is not None and self.best_of is not None and self.beam_width != self.best_of:
            raise field_error(
                "beam_width",
                f"beam_width {self.beam_width} and best_of {self.best_of} both set the number of beams and differ",
            )

    def _check_no_beams(self) -> None:
        given = {
            "beam_width": self.beam_width not in (None, 1) and self.beam_width,
            "length_penalty": self.length_penalty != 1.0 and self.length_penalty,
            "early_stopping": self.early_stopping,
        }
        for name, value in given.items():
            if value is not False:
                raise field_error(name, f"{name} {value} has a meaning only with use_beam_search")

    @property
    def width_field(self) -> str:
        """The field that says how many sequences run at once."""
        if self.use_beam_search and self.beam_width is not None:
            return "beam_width"
        return "n" if self.best_of is None else "best_of"

    @property
    def _width(self) -> int:
        width: int = getattr(self, self.width_field)
        return width

    @property
    def beams(self) -> int:
        """The number of beams, 0 for samples."""
        return self._width if self.use_beam_search else 0

    @property
    def num_sequences(self) -> int:
        """Sequences of each prompt that the scheduler gives back: finished beams, or samples to choose ``n`` from."""
        return self.n if self.use_beam_search else self._width

    @property
    def picks(self) -> bool:
        """Whether only the best of the samples are shown."""
        return self.num_sequences > self.n

    @property
    def ranked(self) -> bool:
        """Whether choices come best first, with the score that they were ranked by."""
        return self.use_beam_search or self.picks

    @property
    def stopping(self) -> EarlyStopping:
        if self.early_stopping == "never":
            return EarlyStopping.NEVER
        return EarlyStopping.WHEN_FULL if self.early_stopping else EarlyStopping.HEURISTIC
