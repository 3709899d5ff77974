"""A request's sampling parameters, with every default resolved.

A field that the request leaves out takes the value in the model's generation_config.json, where that has one, of
temperature, top_p, top_k, min_p, repetition_penalty; otherwise it is off (temperature 1). ``do_sample`` does not count.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from pagemill_gateway.errors import ApiError
from pagemill_gateway.generation_body import GenerationBody
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.manifest import ModelManifest
from pagemill_shared.sampling import MAX_BAD_WORD_TOKENS, MAX_SEED, SamplingParams
from pagemill_shared.schema import Float32Array, Int32Array


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's authors suggest. The values that a request's own fields may have, or the field is refused."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, folder: Path) -> GenerationDefaults:
        """From ``generation_config.json`` of a prepared model; a model without one has no suggestions.

        Raises:
            ConfigurationError: the file is broken, or a value makes no sense.
        """
        path = folder / "generation_config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path} is not readable: {error}") from None
        if not isinstance(config, dict):
            raise ConfigurationError(f"{path} is not a JSON object")
        given = {field.name: config[field.name] for field in fields(cls) if config.get(field.name) is not None}
        for name, value in given.items():
            if not _is_sensible(name, value):
                raise ConfigurationError(f"{path}: {name} cannot be {value!r}")
        return cls(**given)


_NO_SAMPLING = GenerationDefaults(temperature=0.0)


def _is_sensible(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    ranges = {
        "temperature": 0 <= value <= 100,
        "top_p": 0 < value <= 1,
        "top_k": isinstance(value, int) and 0 <= value < 2**31,
        "min_p": 0 <= value <= 1,
        "repetition_penalty": 1e-4 <= value <= 1e4,
    }
    return ranges[name]


def draw_seed() -> int:
    return secrets.randbelow(MAX_SEED + 1)


class SamplingResolver:
    """Makes SamplingParams of request bodies for one model.

    Args:
        encode_word: gives the token sequences that write a word.
        new_seed: gives the seed of a request that brings none.
    """

    def __init__(
        self,
        manifest: ModelManifest,
        defaults: GenerationDefaults,
        encode_word: Callable[[str], list[list[int]]],
        new_seed: Callable[[], int] = draw_seed,
    ) -> None:
        self._vocab_size = manifest.vocab_size
        self._eos_token_ids = np.array(sorted(set(manifest.eos_token_ids)), np.int32)
        self._defaults = defaults
        self._encode_word = encode_word
        self._new_seed = new_seed

    def check(self, body: GenerationBody) -> None:
        """Raises ApiError for what the vocabulary does not have; cheap, so that it can come first."""
        self._bias(body)
        self._stop_token_ids(body)
        self._check_allowed(body)
        if body.beams > self._vocab_size:
            raise ApiError(
                400,
                f"{body.width_field}: {body.beams} beams are more than the vocabulary of {self._vocab_size} has tokens",
                param=body.width_field,
                code="invalid_value",
            )

    def resolve(self, body: GenerationBody, max_tokens: int, num_logprobs: int | None, grammar: str) -> SamplingParams:
        """
        Args:
            max_tokens: the limit after the context length was looked at.
            grammar: what the answer must match, checked already; empty for anything.

        Raises:
            ApiError: 400 for token ids that the vocabulary does not have.
        """
        defaults = self._defaults
        bias_ids, bias_values = self._bias(body)
        words = self._bad_words(body)
        # The model's suggestions for sampling mean nothing to a beam search; its repetition penalty does.
        drawn = _NO_SAMPLING if body.use_beam_search else defaults
        return SamplingParams(
            temperature=_given(body.temperature, drawn.temperature),
            top_k=max(_given(body.top_k, drawn.top_k), 0),  # -1 means off, too
            top_p=_given(body.top_p, drawn.top_p),
            min_p=_given(body.min_p, drawn.min_p),
            repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias_ids=bias_ids,
            logit_bias_values=bias_values,
            seed=self._new_seed() if body.seed is None else body.seed & MAX_SEED,
            max_tokens=max_tokens,
            min_tokens=min(body.min_tokens, max_tokens),
            ignore_eos=body.ignore_eos,
            eos_token_ids=self._eos_token_ids,
            stop_token_ids=self._stop_token_ids(body),
            # The best samples are picked by their log-probabilities, whether the client wants to see those or not.
            logprobs=0 if body.picks and num_logprobs is None else num_logprobs,
            n=body.num_sequences,
            beam_width=body.beams,
            length_penalty=body.length_penalty,
            early_stopping=body.stopping,
            grammar=grammar,
            allowed_token_ids=np.array(body.allowed_token_ids or [], np.int32),
            bad_word_ids=np.array([token for word in words for token in word], np.int32),
            bad_word_lengths=np.array([len(word) for word in words], np.int32),
            prompt_logprobs=body.told_of_prompt,
        )

    def _stop_token_ids(self, body: GenerationBody) -> Int32Array:
        for token_id in body.stop_token_ids:
            if token_id >= self._vocab_size:
                raise self._outside(token_id, "stop_token_ids")
        return np.array(body.stop_token_ids, np.int32)

    def _check_allowed(self, body: GenerationBody) -> None:
        allowed = set(body.allowed_token_ids or ())
        highest = max(allowed, default=0)
        if highest >= self._vocab_size:
            raise self._outside(highest, "allowed_token_ids")
        ends = {*body.stop_token_ids, *(() if body.ignore_eos else self._eos_token_ids.tolist())}
        if allowed and body.min_tokens and allowed <= ends:
            raise ApiError(
                400,
                f"allowed_token_ids: all of them end the answer, which contradicts min_tokens {body.min_tokens}",
                param="allowed_token_ids",
                code="invalid_value",
            )

    def _bad_words(self, body: GenerationBody) -> list[list[int]]:
        words = [ids for word in body.bad_words for ids in self._encode_word(word)]
        if sum(map(len, words)) > MAX_BAD_WORD_TOKENS:
            raise ApiError(
                400,
                f"bad_words: they have {sum(map(len, words))} tokens, at most {MAX_BAD_WORD_TOKENS} are allowed",
                param="bad_words",
                code="invalid_value",
            )
        return words

    def _bias(self, body: GenerationBody) -> tuple[Int32Array, Float32Array]:
        bias: dict[int, float] = {}
        for key, value in (body.logit_bias or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise ApiError(
                    400, f"logit_bias: {key!r:.40} is not a token id", param="logit_bias", code="invalid_value"
                )
            if int(key) >= self._vocab_size:
                raise self._outside(int(key), "logit_bias")
            bias[int(key)] = value
        return np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)

    def _outside(self, token_id: int, param: str) -> ApiError:
        return ApiError(
            400,
            f"{param}: token id {token_id} is outside the vocabulary of {self._vocab_size}",
            param=param,
            code="invalid_value",
        )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
