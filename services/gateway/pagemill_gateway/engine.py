"""What all endpoints share: one model's tokenizer and defaults, the connection to the scheduler, the open requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pagemill_gateway.bodies import RequestBody
from pagemill_gateway.choice import Choice
from pagemill_gateway.connection import Connection
from pagemill_gateway.defaults import GenerationDefaults, SamplingResolver
from pagemill_gateway.errors import ApiError
from pagemill_gateway.generation_body import GenerationBody
from pagemill_gateway.grammar_checker import GrammarChecker
from pagemill_gateway.limits import Limits
from pagemill_gateway.metrics import GatewayMetrics
from pagemill_gateway.output import Output
from pagemill_gateway.parsing import parse_body
from pagemill_gateway.prompt import Prompt
from pagemill_gateway.prompt_fields import MAX_PROMPT_LOGPROBS, MAX_STREAMED_PROMPT_LOGPROBS
from pagemill_gateway.requests import GatewayRequest
from pagemill_gateway.stops import StopStrings
from pagemill_gateway.tokenizer import TextTokenizer
from pagemill_gateway.tool_formats import ToolFormat
from pagemill_shared.errors import RequestError
from pagemill_shared.manifest import ModelManifest
from pagemill_shared.sampling import SamplingParams

INLINE_SIZE = 4096
"""Work up to this size (characters of a text, bytes of a body) is done on the event loop, where it takes less time than
handing it to a thread; larger work would keep streams waiting."""

T = TypeVar("T")
R = TypeVar("R", bound=RequestBody)


class Generation:
    """The requests of one HTTP request. Use it as a context: whatever has not ended when it is left is aborted."""

    def __init__(self, engine: Engine, requests: Sequence[GatewayRequest], output: Output) -> None:
        self.requests = requests
        self.output = output
        self._engine = engine

    def bound_priority(self, best: int) -> None:
        """Lets no request be more urgent than ``best``; before they are submitted."""
        for request in self.requests:
            request.priority = max(request.priority, best)

    def __enter__(self) -> Generation:
        """
        Raises:
            ApiError: 429 or 503, too many are open already.
        """
        running = self._engine.open
        self._engine.limits.check(len(running), sum(not generation.output.begun for generation in running))
        running.add(self)
        for request in self.requests:
            self._engine.connection.submit(request)
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.open.discard(self)
        for request in self.requests:
            if request.done:
                continue
            self._engine.connection.abort(request)
            for _choice in range(request.open_choices):
                self._engine.metrics.unfinished("error" if self.output.error is not None else "abort")

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def completion_tokens(self) -> int:
        """All that were generated, those of texts that are not shown among them."""
        return sum(choice.num_tokens for choice in self.output.choices)

    def prompt_of(self, choice: Choice) -> Prompt:
        """What ``choice``, one of those that the client gets, goes on from."""
        first = self.requests[0]
        return self.requests[choice.index // first.shown].prompt

    def answers(self) -> list[Choice]:
        """The choices that the client gets, in the order of their indices; only at the end."""
        return [choice for request in self.requests for choice in request.answers()]

    def answer_size(self, num_logprobs: int | None, told_of_prompt: int | None = None) -> int:
        """About how many characters the answer in one piece has, that which is told of the prompt among them."""
        size = self.completion_tokens * (4 if num_logprobs is None else 100 * (1 + num_logprobs))
        return size + (0 if told_of_prompt is None else self.prompt_tokens * 100 * (1 + told_of_prompt))

    @property
    def usage(self) -> dict[str, Any]:
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in self.requests)},
        }


class Engine:
    """Serves one model.

    Args:
        name: what the API calls the model.
        trusts_templates: whether requests may bring a chat template of their own.
    """

    def __init__(
        self,
        name: str,
        manifest: ModelManifest,
        tokenizer: TextTokenizer,
        defaults: GenerationDefaults,
        connection: Connection,
        metrics: GatewayMetrics,
        limits: Limits,
        trusts_templates: bool,
        tool_format: ToolFormat,
    ) -> None:
        self.name = name
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.tool_format = tool_format
        self.resolver = SamplingResolver(manifest, defaults, tokenizer.encode_word)
        self.grammars = GrammarChecker(tokenizer.to_json, manifest)
        self.connection = connection
        self.metrics = metrics
        self.limits = limits
        self.trusts_templates = trusts_templates
        self.created = int(time.time())
        self.open: set[Generation] = set()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")

    def close(self) -> None:
        self.connection.close()
        self.grammars.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 unless ``name`` is the model that is served."""
        if name != self.name:
            raise ApiError(404, f"the model `{name:.200}` does not exist", param="model", code="model_not_found")

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens: the model's limit, or what the workers have room for."""
        fleet = self.connection.client.fleet.max_model_len
        return min(self.manifest.max_model_len, fleet) if fleet else self.manifest.max_model_len

    def _limited_by(self) -> str:
        """Behind an error about the context length: what allows no more, if it is not the model itself."""
        fleet, own = self.connection.client.fleet, self.manifest.max_model_len
        if self.max_model_len == own:
            return ""
        if fleet.pool_tokens <= fleet.max_model_len:
            why = "the KV cache has room for no more, see --num-kv-blocks and --kv-cache-memory"
        else:
            why = "--max-model-len"
        return f"; the model itself takes {own}, the worker's limit is lower ({why})"

    async def sized(self, size: int, work: Callable[[], T]) -> T:
        """Runs ``work``, off the event loop if it is large.

        Raises:
            ApiError: what it works on is refused.
        """
        try:
            if size <= INLINE_SIZE:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RequestError as error:
            raise ApiError.of(error) from None

    async def parse(self, cls: type[R], raw: bytes) -> R:
        """The validated body, for a model that is served.

        Raises:
            ApiError: 400 naming the field, or 404.
        """
        body = await self.sized(len(raw), lambda: parse_body(cls, raw))
        if body.model is not None:
            self.check_model(body.model)
        return body

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises ApiError for an id that the vocabulary does not have."""
        highest = max(ids, default=0)
        if highest >= self.manifest.vocab_size:
            raise ApiError(
                400,
                f"{param}: token id {highest} is outside the vocabulary of {self.manifest.vocab_size}",
                param=param,
                code="invalid_value",
            )

    def room(self, limit: int | None) -> int:
        """Most tokens of a prompt that leave room for ``limit`` tokens, or for one where that is None."""
        return max(1, self.max_model_len - (1 if limit is None else limit))

    def check_prompt_logprobs(
        self, prompts: Sequence[Prompt], alternatives: int | None, param: str, streamed: bool
    ) -> None:
        """Raises ApiError when the log-probabilities of the prompts' tokens would be too many."""
        if alternatives is None:
            return
        total = sum(map(len, prompts)) * (1 + alternatives)
        most = MAX_STREAMED_PROMPT_LOGPROBS if streamed else MAX_PROMPT_LOGPROBS
        if total > most:
            raise ApiError(
                400,
                f"{param}: {total} log-probabilities of prompt tokens were asked for; at most "
                f"{most} are told in one {'stream' if streamed else 'request'}",
                param=param,
                code="invalid_value",
            )

    def max_tokens(
        self, prompt_length: int, wanted: int | None, explicit: bool, prompt_name: str, limit_name: str
    ) -> int:
        """The output limit of a prompt: what is wanted, or what fits.

        Args:
            wanted: None for as many as fit.
            explicit: whether the request asked for ``wanted`` itself; a default is cut to what fits.
            prompt_name, limit_name: the fields that are at fault when the prompt, or what is wanted, is too long.

        Raises:
            ApiError: ``context_length_exceeded`` with the numbers.
        """
        longest = self.max_model_len
        room = longest - prompt_length
        if room < min(1, 1 if wanted is None else wanted):
            raise ApiError(
                400,
                f"This model's maximum context length is {longest} tokens, but the prompt has {prompt_length} tokens"
                + ("" if wanted == 0 else " and at least one must be generated")
                + self._limited_by(),
                param=prompt_name,
                code="context_length_exceeded",
            )
        if wanted is not None and explicit and wanted > room:
            raise ApiError(
                400,
                f"This model's maximum context length is {longest} tokens, but {prompt_length + wanted} were "
                f"requested ({prompt_length} in the prompt, {wanted} for the completion){self._limited_by()}",
                param=limit_name,
                code="context_length_exceeded",
            )
        return room if wanted is None else min(wanted, room)

    def generation(
        self,
        body: GenerationBody,
        prompts: Sequence[Prompt],
        limits: Sequence[int],
        num_logprobs: int | None,
        request_id: str,
        arrived: float,
        field_names: Mapping[str, str],
        grammar: str,
        shown: frozenset[int] = frozenset(),
    ) -> Generation:
        """Prepares one request per prompt; entering the generation submits them.

        Choice ``i`` of prompt ``p`` has index ``p * n + i``.

        Args:
            grammar: what each answer must match, as ``GrammarChecker`` gives it; empty for anything.
            shown: control tokens that are text whether the others are or not.
        """
        stops = StopStrings(body.stop, body.include_stop_str_in_output) if body.stop else None
        groups = [
            [
                self._choice(position * body.n + i, body, prompt.token_ids, stops, shown)
                for i in range(body.num_sequences)
            ]
            for position, prompt in enumerate(prompts)
        ]
        output = Output([choice for group in groups for choice in group], body.stream)
        requests = [
            GatewayRequest(
                request_id=request_id,
                prompt=prompt,
                sampling=self.resolver.resolve(body, limit, num_logprobs, grammar),
                priority=body.priority,
                cache_salt=body.cache_salt or "",
                choices=choices,
                shown=body.n,
                output=output,
                timing=self.metrics,
                arrived=arrived,
                field_names={
                    **field_names,
                    "n": body.width_field,
                    "beam_width": body.width_field,
                    "grammar": body.constraint_field,
                },
            )
            for prompt, limit, choices in zip(prompts, limits, groups, strict=True)
        ]
        return Generation(self, requests, output)

    def reading(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        priority: int,
        request_id: str,
        arrived: float,
        field_names: Mapping[str, str],
    ) -> Generation:
        """Prepares one request per prompt that generates nothing: what it tells of its prompt is all."""
        choices = [
            Choice(index, prompt.token_ids, self.tokenizer.detokenizer((), skip_special_tokens=True), None, 0, False)
            for index, prompt in enumerate(prompts)
        ]
        output = Output(choices, streaming=False)
        requests = [
            GatewayRequest(
                request_id=request_id,
                prompt=prompt,
                sampling=sampling,
                priority=priority,
                cache_salt="",
                choices=[choice],
                shown=1,
                output=output,
                timing=self.metrics,
                arrived=arrived,
                field_names=field_names,
            )
            for prompt, choice in zip(prompts, choices, strict=True)
        ]
        return Generation(self, requests, output)

    def _choice(
        self, index: int, body: GenerationBody, prompt: Sequence[int], stops: StopStrings | None, shown: frozenset[int]
    ) -> Choice:
        return Choice(
            index,
            prompt,
            self.tokenizer.detokenizer(prompt, skip_special_tokens=body.skip_special_tokens, shown=shown),
            stops.finder() if stops is not None else None,
            body.min_tokens,
            body.include_stop_str_in_output,
        )
