"""Conversations to token ids: the model's own template, in which the users' text stays text.

A control token (``<|im_end|>``) that somebody writes into a message must not end the message. The ordinary case, in
which no message holds one, renders and encodes as transformers does. Otherwise each control token in a message gets a
secret mark in its middle before rendering; after rendering, the unmarked ones are the template's own. Those are
replaced by secret stand-ins, the marks are taken out, and the text is encoded by a second tokenizer that knows the
stand-ins and takes control tokens for ordinary text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import jinja2
from tokenizers import AddedToken, Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from pagemill_gateway.tool_formats import FormatName, format_of_template
from pagemill_shared.errors import RequestError

RESERVED_KWARGS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "conversations",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
        "tokenize",
    }
)
"""Names that chat_template_kwargs may not set."""


class ChatTemplate:
    """One Jinja template and the tokenizer that its text is encoded with.

    Args:
        special_tokens: ``bos_token`` and the like, as templates use them.
        param: the request's field that is at fault when it does not render.
    """

    def __init__(
        self, source: str, special_tokens: dict[str, str], backend: Tokenizer, param: str = "messages"
    ) -> None:
        self._source = source
        self.format: FormatName = format_of_template(source)
        """How the model writes calls, going by the template."""
        self.knows_tools = re.search(r"\btools\b", source) is not None
        self.knows_calls = "tool_calls" in source
        self._special_tokens = special_tokens
        self._param = param
        self._backend = backend
        self._control_tokens = {
            token.content: index
            for index, token in backend.get_added_tokens_decoder().items()
            if token.special and len(token.content) > 1  # the mark goes into the middle
        }

    @staticmethod
    def missing() -> RequestError:
        return RequestError(
            "this model has no chat template; use /v1/completions, or start the gateway with --chat-template",
            code="chat_template_missing",
            param="messages",
        )

    def encode(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: dict[str, Any],
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """Token ids of the rendered conversation.

        Raises:
            RequestError: the template refuses these messages.
        """
        variables = {**template_kwargs, "tools": list(tools)} if tools else template_kwargs
        written = self._control_tokens_in([messages, variables])
        if not written:
            text = self._render(messages, add_generation_prompt, continue_final_message, variables)
            return _encode(self._backend, text)
        mark = f"\ufdd0{secrets.token_hex(8)}\ufdd1"
        pattern = _any_of(written)
        text = self._render(
            _marked(messages, pattern, mark),
            add_generation_prompt,
            continue_final_message,
            _marked(variables, pattern, mark),
        )
        return self._literal.encode(text, mark)

    def _render(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: dict[str, Any],
    ) -> str:
        try:
            rendered, _ = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self._source,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self._special_tokens, **template_kwargs},
            )
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"the chat template is broken: {error}", code="chat_template_invalid", param=self._param
            ) from None
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", code="chat_template_error", param=self._param
            ) from None
        text: str = rendered[0]
        return text

    def _control_tokens_in(self, value: Any) -> list[str]:
        # Plain substring searches: one pattern of hundreds of alternatives is far slower over a long text.
        texts = list(_strings(value))
        return [token for token in self._control_tokens if any(token in text for text in texts)]

    @cached_property
    def _literal(self) -> _LiteralTokenizer:
        return _LiteralTokenizer(self._backend, self._control_tokens)


class _LiteralTokenizer:
    """Takes control tokens for text, and stand-ins for control tokens."""

    def __init__(self, backend: Tokenizer, control_tokens: dict[str, int]) -> None:
        self._tokenizer = Tokenizer.from_str(backend.to_str())
        self._tokenizer.encode_special_tokens = True
        secret = secrets.token_hex(16)
        self._stand_ins = {token: f"\ufdd2{secret}:{index}\ufdd3" for token, index in control_tokens.items()}
        added = backend.get_added_tokens_decoder()
        self._tokenizer.add_tokens(
            [
                AddedToken(
                    self._stand_ins[token],
                    lstrip=added[index].lstrip,
                    rstrip=added[index].rstrip,
                    single_word=added[index].single_word,
                    normalized=False,
                    special=False,
                )
                for token, index in control_tokens.items()
            ]
        )
        self._ids = {
            self._tokenizer.token_to_id(self._stand_ins[token]): index for token, index in control_tokens.items()
        }
        self._pattern = _any_of(control_tokens)

    def encode(self, text: str, mark: str) -> list[int]:
        text = self._pattern.sub(lambda match: self._stand_ins[match[0]], text).replace(mark, "")
        return [self._ids.get(i, i) for i in _encode(self._tokenizer, text)]


def _encode(backend: Tokenizer, text: str) -> list[int]:
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _any_of(tokens: Sequence[str] | dict[str, int]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _marked(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    """``value`` with ``mark`` after the first character of each match in its strings."""
    if isinstance(value, str):
        return pattern.sub(lambda match: match[0][0] + mark + match[0][1:], value)
    if isinstance(value, dict):
        return {key: _marked(item, pattern, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, pattern, mark) for item in value]
    return value
