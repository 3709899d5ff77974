"""Time to the first token of requests that share a long system prompt, with the prefix cache and without.

`pagemill serve` runs with the bundled model, as a user starts it. Each request is a system prompt that all share and a
question of its own. They come one after another, or all at once; the time is a client's, from sending a request to the
first event of its stream.

    python benchmarks/prefix_cache.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from pagemill_testing.program import Program, until

SENTENCE = "You are a patient teacher who answers each question in one short sentence, without lists or headings. "
ANSWER_TOKENS = 4
HITS, QUERIES = "prefix_hits_total", "prefix_queries_total"


@contextmanager
def server(prefix_caching: bool) -> Iterator[httpx.Client]:
    """A client of `pagemill serve` on a free port."""
    with tempfile.TemporaryDirectory(prefix="pm-") as folder:
        program = Program(Path(folder), "serve", "serve", port=0, enable_prefix_caching=prefix_caching)
        try:
            until(lambda: len(program.out.read_text().splitlines()) >= 2 or not program.alive, "the server", 300.0)
            if not program.alive:
                raise SystemExit(program.tail())
            url = shlex.split(program.out.read_text().splitlines()[1])[1].partition("/v1/")[0]  # of the curl example
            limits = httpx.Limits(max_connections=None)
            with httpx.Client(base_url=url, timeout=None, trust_env=False, limits=limits) as client:
                until(lambda: client.get("/ready").status_code == 200, "a ready server")
                yield client
        finally:
            program.close()


def tokens_of(client: httpx.Client, text: str) -> list[int]:
    response = client.post("/tokenize", json={"prompt": text})
    response.raise_for_status()
    tokens: list[int] = response.json()["tokens"]
    return tokens


def first_token(client: httpx.Client, prompt: list[int]) -> float:
    """Seconds until the first event of the answer's stream, which is then read to its end."""
    body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    begun = time.perf_counter()
    first = 0.0
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - begun
            if line == "data: [DONE]":
                return first
    raise SystemExit("a stream ended without [DONE]")


def counters(client: httpx.Client) -> dict[str, int]:
    metrics: dict[str, int] = client.get("/v1/pagemill/state").json()["metrics"]
    return metrics


def bench(client: httpx.Client, shared: int, requests: int, at_once: bool, salt: str) -> dict[str, Any]:
    """
    Args:
        shared: tokens that all prompts begin with.
        salt: begins the shared part, so that no earlier case has left it in the cache.
    """
    text = f"({salt}) " + SENTENCE * (2 + shared // 15)
    prefix = tokens_of(client, text)[:shared]
    prompts = [[*prefix, *tokens_of(client, f"Question {number}: what is {number} + 2?")] for number in range(requests)]
    before = counters(client)
    if at_once:
        with ThreadPoolExecutor(requests) as pool:
            times = list(pool.map(lambda prompt: first_token(client, prompt), prompts))
        times.sort()
    else:
        times = [first_token(client, prompt) for prompt in prompts]
    after = counters(client)
    asked, hits = (after[name] - before[name] for name in (QUERIES, HITS))
    return {
        "arrival": "at once" if at_once else "one after another",
        "requests": requests,
        "shared_tokens": shared,
        "first_s": times[0],
        "later_median_s": statistics.median(times[1:]),
        "later_max_s": max(times[1:]),
        "prompt_tokens": asked,
        "computed_prompt_tokens": asked - hits,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a shorter system prompt and fewer requests")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args()
    shared, requests = (200, 6) if arguments.quick else (1000, 32)
    machine = f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"
    print(f"SmolLM2-135M, {requests} requests of {shared} shared prompt tokens and a question each; {machine}")
    cases = []
    for caching in (True, False):
        with server(caching) as client:
            first_token(client, [1] * 40)  # warms up
            for at_once in (False, True):
                case = {"prefix_caching": caching, **bench(client, shared, requests, at_once, f"{caching} {at_once}")}
                cases.append(case)
                print(
                    f"prefix cache {'on ' if caching else 'off'}  {case['arrival']:17s}  "
                    f"first {case['first_s']:.3f} s, later {case['later_median_s']:.3f} s (median), "
                    f"{case['later_max_s']:.3f} s (most); "
                    f"{case['computed_prompt_tokens']} of {case['prompt_tokens']} prompt tokens computed",
                    flush=True,
                )
    summary: dict[str, Any] = {
        "first_over_later": cases[0]["first_s"] / cases[0]["later_median_s"],
        "off_over_on": cases[2]["later_median_s"] / cases[0]["later_median_s"],
        "off_over_on_at_once": cases[3]["later_median_s"] / cases[1]["later_median_s"],
    }
    print(
        f"with the cache a later request waits {summary['first_over_later']:.1f} times shorter than the first; without "
        f"it {summary['off_over_on']:.1f} times longer ({summary['off_over_on_at_once']:.1f} times when all come at "
        "once)"
    )
    if arguments.json:
        print(json.dumps({"machine": machine, **summary, "cases": cases}))


if __name__ == "__main__":
    main()
