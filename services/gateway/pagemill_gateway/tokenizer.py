"""Text to token ids and back, from the ordinary files of a prepared model, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from pagemill_gateway.chat_template import ChatTemplate
from pagemill_gateway.detokenizer import Detokenizer, new_detokenizer
from pagemill_gateway.vocabulary import Vocabulary, build_vocabulary
from pagemill_shared.errors import ConfigurationError


class TextTokenizer:
    """The tokenizer of one model. Safe to use from several threads; long texts are encoded without holding the GIL."""

    def __init__(
        self,
        backend: Tokenizer,
        chat_template: ChatTemplate | None,
        bos_token_id: int | None,
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bos_token_id = bos_token_id
        self._special_tokens = special_tokens or {}
        self.vocabulary: Vocabulary = build_vocabulary(backend)
        self.chat_template = chat_template
        self._adds_bos = bos_token_id is not None and self._encode("a", True)[:1] == [bos_token_id]

    @classmethod
    def load(cls, folder: Path, template_file: Path | None = None) -> TextTokenizer:
        """The tokenizer of the prepared model in ``folder``; ``template_file`` replaces the model's own chat template.

        Raises:
            ConfigurationError: files are missing or broken.
        """
        try:
            # The generic class reads the files as they are. AutoTokenizer would look for model code, and import torch.
            loaded = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the libraries raise many types, bare Exception among them
            raise ConfigurationError(f"the tokenizer in {folder} cannot be read: {_first_line(error)}") from None
        source = _template_source(loaded, template_file)
        specials = {name: str(token) for name, token in loaded.special_tokens_map.items() if isinstance(token, str)}
        template = None
        if source is not None:
            template = ChatTemplate(source, specials, loaded.backend_tokenizer)
        return cls(loaded.backend_tokenizer, template, loaded.bos_token_id, specials)

    def with_template(self, source: str) -> TextTokenizer:
        """The same tokenizer with another chat template, for one conversation."""
        other = copy(self)
        other.chat_template = ChatTemplate(source, self._special_tokens, self._backend, param="chat_template")
        return other

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a raw prompt, in which control tokens are written as themselves. BOS is never doubled: a text that
        begins with it does not get another one."""
        ids = self._encode(text, add_special_tokens)
        if self._adds_bos and ids[:2] == [self._bos_token_id, self._bos_token_id]:
            del ids[0]
        return ids

    def encode_word(self, word: str) -> list[list[int]]:
        """The token sequences that write ``word``: as it is, and behind a blank."""
        written = [self._encode(text, False) for text in (word, " " + word)]
        return [ids for i, ids in enumerate(written) if ids and ids not in written[:i]]

    @property
    def bos(self) -> str | None:
        """The token that the tokenizer puts before each text, None without such."""
        return self.token_string(self._bos_token_id) if self._adds_bos and self._bos_token_id is not None else None

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: dict[str, Any],
        tools: Sequence[dict[str, Any]] = (),
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        """Ids of a conversation; control tokens in the users' own text are text.

        Args:
            add_special_tokens: None adds a BOS that the tokenizer wants and the template did not write, so that there
                is exactly one; True is the same; False leaves what the template wrote.

        Raises:
            RequestError: there is no template, or it refuses these messages.
        """
        if self.chat_template is None:
            raise ChatTemplate.missing()
        ids = self.chat_template.encode(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            tools=tools,
        )
        if self._adds_bos and add_special_tokens is not False and ids[:1] != [self._bos_token_id]:
            assert self._bos_token_id is not None
            ids.insert(0, self._bos_token_id)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_string(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it (``Ġthe``), None for an id without one."""
        string: str | None = self._backend.id_to_token(token_id)
        return string

    def token_bytes(self, token_id: int) -> bytes:
        """The token's share of a text, control tokens included."""
        table = self.vocabulary.token_bytes
        if table is None:
            return self.decode([token_id]).encode()
        return table[token_id] if token_id < len(table) else b""

    def to_json(self) -> str:
        """The tokenizer as ``tokenizer.json`` has it."""
        text: str = self._backend.to_str()
        return text

    def special_id(self, token: str) -> int | None:
        """The id of a control token, None where the tokenizer has none of this name."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id if token_id in self.vocabulary.special_ids else None

    def detokenizer(
        self, prompt: Sequence[int], *, skip_special_tokens: bool, shown: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """A fresh one, for a sequence that goes on from ``prompt``. ``shown`` control tokens are never skipped."""
        return new_detokenizer(
            self._backend,
            self.vocabulary,
            skip_special_tokens=skip_special_tokens,
            shown=shown,
            prompt=prompt[-8:],
        )

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The batch call releases the GIL; the single call does not.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids


def _template_source(loaded: PreTrainedTokenizerFast, template_file: Path | None) -> str | None:
    if template_file is not None:
        try:
            return template_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"chat template {template_file} cannot be read: {_first_line(error)}") from None
    template = loaded.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) and template else None


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
