"""The one client of every system: streams completions over HTTP in a closed loop, and takes the times."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from serving.workloads import Workload


@dataclass(frozen=True, slots=True)
class Answer:
    """Times in seconds of the client's clock. ``tokens`` is what the server's usage says, over all choices."""

    begun: float
    first: float
    ended: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one workload. TTFT: from sending a request to its first text. TPOT: from there to the end, per further token
    of a choice."""

    output_tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    tpot_ms_p50: float
    output_tokens: int


class RequestError(Exception):
    """A request was not answered as it must be; says with what."""


def figures(answers: Sequence[Answer], load: Workload) -> Figures:
    first = sorted(1e3 * (a.first - a.begun) for a in answers)
    per_token = [1e3 * (a.ended - a.first) / max(1, a.tokens // load.n - 1) for a in answers]
    seconds = max(a.ended for a in answers) - min(a.begun for a in answers)
    tokens = sum(a.tokens for a in answers)
    return Figures(
        output_tokens_per_s=tokens / seconds,
        ttft_ms_p50=statistics.median(first),
        ttft_ms_p99=first[min(len(first) - 1, int(0.99 * len(first)))],
        tpot_ms_p50=statistics.median(per_token),
        output_tokens=tokens,
    )


async def run(
    url: str, load: Workload, prompts: Sequence[str], extra: dict[str, Any], limit: float = 300.0
) -> list[Answer]:
    """
    Args:
        extra: fields that this system wants in every request.
        limit: seconds that an answer may take.

    Raises:
        RequestError: a request was refused, its answer was not as long as asked, or took longer than ``limit``.
    """
    waiting = list(reversed(prompts))
    timeout = aiohttp.ClientTimeout(total=limit)
    # A connection for each: llama.cpp's server closes those that it has answered on without saying so.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    answers: list[Answer] = []
    async with aiohttp.ClientSession(base_url=url, timeout=timeout, connector=connector) as session:

        async def one_after_another() -> None:
            while waiting:
                try:
                    answers.append(await _request(session, load, waiting.pop(), extra))
                except TimeoutError as error:
                    raise RequestError(f"no whole answer within {limit:g} seconds") from error
                except aiohttp.ClientError as error:
                    raise RequestError(f"the connection broke: {error}") from error

        async with asyncio.TaskGroup() as group:
            for _ in range(load.concurrency):
                group.create_task(one_after_another())
    return answers


async def _request(session: aiohttp.ClientSession, load: Workload, prompt: str, extra: dict[str, Any]) -> Answer:
    body = {"prompt": prompt, "max_tokens": load.output, "temperature": 0.0, "stream": True, **extra}
    body["stream_options"] = {"include_usage": True}
    if load.n > 1:
        body |= {"n": load.n, "temperature": 1.0}
    begun = time.perf_counter()
    first, tokens = 0.0, 0
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise RequestError(f"{response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            if not first:
                first = time.perf_counter()
            if b'"usage"' in line or b'"error"' in line:
                event = json.loads(line[6:])
                if "error" in event:
                    raise RequestError(str(event)[:500])
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    ended = time.perf_counter()
    if tokens != load.output * load.n:
        raise RequestError(f"{tokens} tokens came where {load.output * load.n} were asked for")
    return Answer(begun, first, ended, tokens)
