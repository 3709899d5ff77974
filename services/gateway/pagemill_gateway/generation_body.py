"""The fields that chat and text completions share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pagemill_gateway.bodies import NOTHING, OFF, Accepts, RequestBody, at_most, field_error, item_error, only
from pagemill_gateway.group_fields import GroupFields
from pagemill_gateway.prompt_fields import PromptFields
from pagemill_gateway.request_ids import RequestId
from pagemill_gateway.structured_outputs import StructuredFields
from pagemill_shared.sampling import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, MAX_TOKENS

MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_BAD_WORDS = 64
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)]
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: bool | None = None


class GenerationBody(PromptFields, StructuredFields, GroupFields, RequestBody):
    """What chat and text completions share."""

    unserved: ClassVar[dict[str, Accepts]] = {
        "guided_decoding_backend": NOTHING,
        "guided_whitespace_pattern": NOTHING,
        "structural_tag": NOTHING,
        "logits_processors": only([]),
        "return_tokens_as_token_ids": OFF,
        "vllm_xargs": only({}),
        "kv_transfer_params": NOTHING,
        "repetition_detection": NOTHING,
        "thinking_token_budget": NOTHING,
        "logprob_token_ids": NOTHING,
        "prompt_embeds": NOTHING,
        "lora_request": NOTHING,
    }
    ignored = frozenset(
        {
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "spaces_between_special_tokens",
        }
    )

    stream: bool = False
    stream_options: StreamOptions | None = None

    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    min_tokens: int = Field(0, ge=0, le=MAX_TOKENS)
    temperature: float | None = Field(None, ge=0.0, le=100.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, ge=1e-4, le=1e4)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]], at_most(MAX_LOGIT_BIAS)] | None = (
        Field(None, max_length=MAX_LOGIT_BIAS, json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,10}$"}})
    )
    allowed_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(
        None, min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS
    )
    bad_words: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]] = Field(
        default_factory=list, max_length=MAX_BAD_WORDS
    )
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)

    stop: list[str] = Field(default_factory=list)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    request_id: RequestId | None = None

    @field_validator("stop", mode="before", json_schema_input_type=Stop)
    @classmethod
    def _check_stop(cls, value: Any) -> Any:
        if not isinstance(value, str | list):
            raise ValueError("must be a string or a list of strings")
        stops = [value] if isinstance(value, str) else value
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are allowed")
        for index, stop in enumerate(stops):
            item = (index,) if stops is value else ()
            if not isinstance(stop, str):
                raise item_error(item, f"a stop string must be a string, not {stop!r:.40}")
            if not stop:
                raise item_error(item, "a stop string must not be empty")
            if len(stop) > MAX_STOP_LENGTH:
                raise item_error(item, f"a stop string may have at most {MAX_STOP_LENGTH} characters")
        return stops

    @model_validator(mode="after")
    def _check_together(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "stream_options is only allowed when stream is true")
        limit = self.output_limit
        if limit is not None and self.min_tokens > limit:
            raise field_error("min_tokens", f"min_tokens {self.min_tokens} is greater than max_tokens {limit}")
        if self.picks and self.stream:
            raise field_error(
                "best_of",
                f"best_of {self.best_of} is greater than n {self.n}, so the best are known only at the end: "
                "stream must be false",
            )
        if self.use_beam_search:
            self._check_nothing_is_sampled()
        self._check_constraint()
        if self.prompt_logprobs is not None and self.stream:
            raise field_error("prompt_logprobs", "prompt_logprobs come with the whole answer: stream must be false")
        if limit == 0:
            self._check_nothing_is_generated()
        return self

    def _check_nothing_is_generated(self) -> None:
        if self.prompt_logprobs is None and not self.echoes:
            raise field_error("max_tokens", "max_tokens 0 needs echo or prompt_logprobs: there would be no answer")
        if self.num_sequences > 1 or self.use_beam_search:
            name = "use_beam_search" if self.use_beam_search else self.width_field
            raise field_error(name, f"{name} {getattr(self, name)} contradicts max_tokens 0")

    def _check_constraint(self) -> None:
        """What an answer that must match a grammar cannot be combined with."""
        field = self.constraint_field
        if not field:
            return
        if self.use_beam_search:
            raise field_error("use_beam_search", f"use_beam_search cannot be combined with {field}")
        if self.ignore_eos:
            raise field_error("ignore_eos", f"ignore_eos contradicts {field}: a complete answer must end")
        for name in ("allowed_token_ids", "bad_words"):
            if getattr(self, name):  # what one allows the other may forbid, until nothing is left
                raise field_error(name, f"{name} cannot be combined with {field}")

    def _check_nothing_is_sampled(self) -> None:
        """A beam search takes the most likely continuations; fields that ask for samples contradict it."""
        given = {
            "temperature": bool(self.temperature),
            "top_p": self.top_p is not None and self.top_p < 1.0,
            "top_k": self.top_k is not None and self.top_k > 0,
            "min_p": bool(self.min_p),
        }
        for name, asks in given.items():
            if asks:
                raise field_error(
                    name, f"{name} {getattr(self, name)} contradicts use_beam_search, which samples nothing"
                )

    @property
    def constraint_field(self) -> str:
        """The field that is at fault when the grammar of the answer is."""
        return "" if self.constraint is None else self.constraint.field

    @property
    def output_limit(self) -> int | None:
        """Most tokens that the request wants, None for as many as fit."""
        return self.max_tokens

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def told_of_prompt(self) -> int | None:
        """How many alternatives to report beside each prompt token, None for no log-probabilities of the prompt."""
        return self.prompt_logprobs

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)
