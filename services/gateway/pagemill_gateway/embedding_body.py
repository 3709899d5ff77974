"""The body of an embedding."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from pagemill_gateway.bodies import NOTHING, Accepts, RequestBody
from pagemill_gateway.completion_body import Prompts, check_prompt
from pagemill_gateway.prompt_fields import TruncationFields
from pagemill_gateway.request_ids import RequestId
from pagemill_shared.sampling import Pooling


class EmbeddingBody(TruncationFields, RequestBody):
    """POST /v1/embeddings"""

    unserved: ClassVar[dict[str, Accepts]] = {"dimensions": NOTHING}
    ignored = frozenset({"user"})

    input: str | list[str] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True
    add_special_tokens: bool = True
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    request_id: RequestId | None = None

    @field_validator("input", mode="wrap", json_schema_input_type=Prompts)
    @classmethod
    def _check_input(cls, value: Any, _handler: Any) -> Any:
        return check_prompt(value)

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        return [self.input] if isinstance(self.input, str) else self.input

    @property
    def pool(self) -> Pooling:
        return Pooling.MEAN if self.pooling == "mean" else Pooling.LAST
