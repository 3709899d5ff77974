"""Runs all tests but those that need Docker, and keeps the result in docs/test-full.md (`make test-full`)."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections import deque
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "docs" / "test-full.md"
PACKAGES = ("torch", "triton", "transformers", "pyzmq", "numpy")
_KEPT_LINES = 60


def main(arguments: list[str]) -> int:
    command = ["-m", "pytest", "-m", "not docker", "--timeout=3600", "--durations=15", "--color=no", *arguments]
    print("python -P " + " ".join(command), flush=True)
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    with subprocess.Popen(
        [sys.executable, "-P", *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    RESULT.write_text(page(run.returncode, list(lines)), encoding="utf-8")
    print(f"kept in {RESULT.relative_to(ROOT)}", flush=True)
    return run.returncode


def page(status: int, lines: list[str]) -> str:
    """The page: what ran where, and the end of what pytest said."""
    start = next((n for n, line in enumerate(lines) if "slowest" in line), 0)
    facts = {
        "result": "passed" if status == 0 else f"FAILED (pytest ended with status {status})",
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "commit": _output("git", "rev-parse", "--short", "HEAD") + (" with changes" if _is_changed() else ""),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
        "packages": ", ".join(f"{name} {version(name)}" for name in PACKAGES),
    }
    table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
    head = ["# The last full test run", "", "Written by `make test-full`.", "", *table, "", "```"]
    return "\n".join([*head, *lines[start:], "```", ""])


def _is_changed() -> bool:
    return bool(_output("git", "status", "--porcelain", "--untracked-files=no"))


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or "unknown processor"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
