"""``pagemill run-batch``: has a running server answer the requests of a file, in OpenAI's batch format."""

from __future__ import annotations

import asyncio
import random
import sys
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
from tqdm import tqdm

from pagemill.batch_lines import RETRIED, BadLine, BatchRequest, Reply, read_requests, result_line
from pagemill.batch_results import Results
from pagemill.server_api import UnreachableError, client_arguments, error_message
from pagemill_shared.errors import ConfigurationError
from pagemill_shared.settings import RunBatchSettings

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_LONGEST_RETRY_AFTER_S = 600.0

Sleep = Callable[[float], Awaitable[None]]


def run_batch(settings: RunBatchSettings, file: Path, output: Path) -> int:
    """Answers what ``output`` does not hold yet; 0 when every line of ``file`` has a good answer there at the end.

    Raises:
        ConfigurationError: a file cannot be used, or no server answers.
    """
    bad, wanted = _survey(file)
    for line in bad:
        print(f"{file}, line {line.line}: {line.reason}", file=sys.stderr, flush=True)
    if output.exists() and output.samefile(file):
        raise ConfigurationError(f"{output}: the results cannot go where the requests are")
    with Results(output) as results:
        open_requests = wanted - results.settled
        done = len(wanted) - len(open_requests)
        # disable=None: no bar where stderr is no terminal.
        bar = tqdm(total=len(wanted), initial=done, unit="request", disable=None, dynamic_ncols=True)
        outcomes: Counter[str] = Counter()
        try:
            with bar:
                asyncio.run(_answer_all(settings, _requests(file, open_requests), results, bar, outcomes))
        except KeyboardInterrupt:
            finished = done + outcomes.total()
            print(
                f"interrupted: {finished} of {len(wanted)} requests have a result in {output}; "
                "the same command goes on from there",
                file=sys.stderr,
            )
            return EXIT_INTERRUPTED
    parts = [f"{outcomes[name]} {name}" for name in ("answered", "refused", "failed")]
    parts += [f"{done} done before"] * bool(done) + [f"{len(bad)} bad lines"] * bool(bad)
    print(f"{', '.join(parts)}; results in {output}", file=sys.stderr, flush=True)
    return EXIT_FAILURE if bad or outcomes["refused"] or outcomes["failed"] else 0


def _survey(file: Path) -> tuple[list[BadLine], set[str]]:
    """What is wrong with the file, and the custom_ids of its requests."""
    bad: list[BadLine] = []
    wanted: set[str] = set()
    try:
        with file.open("rb") as lines:
            for item in read_requests(lines):
                if isinstance(item, BadLine):
                    bad.append(item)
                else:
                    wanted.add(item.custom_id)
    except OSError as error:
        raise ConfigurationError(f"{file}: {error.strerror or error}") from None
    if not wanted and not bad:
        raise ConfigurationError(f"{file}: there is no request in it")
    return bad, wanted


def _requests(file: Path, wanted: set[str]) -> Iterator[BatchRequest]:
    """Read again as they are sent, so that a large file is never in memory as a whole."""
    with file.open("rb") as lines:
        for item in read_requests(lines):
            if isinstance(item, BatchRequest) and item.custom_id in wanted:
                yield item


async def _answer_all(
    settings: RunBatchSettings, requests: Iterator[BatchRequest], results: Results, bar: tqdm, outcomes: Counter[str]
) -> None:
    limits = httpx.Limits(max_connections=settings.concurrency, max_keepalive_connections=settings.concurrency)
    async with httpx.AsyncClient(limits=limits, **client_arguments(settings)) as client:
        await _check(settings, client)
        asking = Asking(client, settings.attempts)

        async def work() -> None:
            for request in requests:  # shared: each takes the next one
                reply = await asking.ask(request)
                results.add(result_line(f"batch_req_{uuid.uuid4().hex}", request, reply))
                outcomes[_outcome(reply)] += 1
                bar.update()

        await asyncio.gather(*(work() for _ in range(settings.concurrency)))


async def _check(settings: RunBatchSettings, client: httpx.AsyncClient) -> None:
    """Asks before the first request, so that a wrong URL or key is one clear error and not one for each line."""
    try:
        response = await client.get("/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnreachableError(settings.url, error or type(error).__name__) from None
    if response.status_code == 401:
        raise ConfigurationError(error_message(response.status_code, response.content))


def _outcome(reply: Reply) -> str:
    if reply.status == 200:
        return "answered"
    return "refused" if 400 <= reply.status < 500 and reply.status not in RETRIED else "failed"


class Asking:
    """Sends requests, again and again while the server says later or cannot be reached.

    Args:
        attempts: how often at most.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        attempts: int,
        sleep: Sleep = asyncio.sleep,
        now: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._attempts = attempts
        self._sleep = sleep
        self._now = now
        self._jitter = jitter

    async def ask(self, request: BatchRequest) -> Reply:
        """What came of the last attempt."""
        for attempt in range(1, self._attempts):
            reply, wait = await self._once(request)
            if reply.status and reply.status not in RETRIED:
                return reply
            await self._sleep(self._pause(attempt, wait))
        reply, _ = await self._once(request)
        return reply

    async def _once(self, request: BatchRequest) -> tuple[Reply, float | None]:
        """The reply, and how many seconds the server wants to be left alone."""
        try:
            response = await self._client.post(request.url, json=request.body)
        except httpx.HTTPError as error:
            return Reply(0, failure=f"{type(error).__name__}: {error}"), None
        request_id = response.headers.get("x-request-id", "")
        try:
            body = response.json()
        except ValueError:
            body = {"error": {"message": response.text[:1000], "type": "", "param": None, "code": None}}
        return Reply(response.status_code, request_id, body), retry_after(
            response.headers.get("retry-after"), self._now()
        )

    def _pause(self, attempt: int, wait: float | None) -> float:
        """Seconds before the next attempt: more each time, and not less than the server asks for. The jitter keeps
        requests that failed together from coming again together."""
        own = min(_FIRST_PAUSE_S * 2.0 ** min(attempt - 1, 16), _LONGEST_PAUSE_S)
        least = own if wait is None else wait
        return least + self._jitter() * min(own, 1.0)


def retry_after(value: str | None, now: float) -> float | None:
    """Seconds that a ``Retry-After`` asks for, a number of them or a date; None where it says nothing usable."""
    if value is None:
        return None
    try:
        seconds = float(value) if value.strip().isdigit() else parsedate_to_datetime(value).timestamp() - now
    except ValueError:
        return None
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER_S)
