"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import field_validator

from pagemill_gateway.bodies import Accepts, RequestBody, only
from pagemill_gateway.chat_body import ConversationFields
from pagemill_gateway.completion_body import TokenId, check_token_ids


class TokenizeChatBody(ConversationFields, RequestBody):
    """POST /tokenize with messages"""

    unserved: ClassVar[dict[str, Accepts]] = {
        "mm_processor_kwargs": only({}),
    }
    elsewhere = frozenset({"prompt"})

    return_token_strs: bool = False


class TokenizeTextBody(RequestBody):
    """POST /tokenize with a prompt"""

    elsewhere = frozenset(TokenizeChatBody.model_fields.keys() | TokenizeChatBody.unserved)

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(RequestBody):
    """POST /detokenize"""

    tokens: list[int]

    @field_validator("tokens", mode="wrap", json_schema_input_type=list[TokenId])
    @classmethod
    def _check_tokens(cls, value: Any, _handler: Any) -> Any:
        if not isinstance(value, list):
            raise ValueError("must be a list of token ids")
        if value:
            check_token_ids(value)
        return value
