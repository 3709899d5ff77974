"""Runs the sections one after another and prints the table."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from gpu_check.table import Row, as_json, table

SECTIONS = ("correctness", "kernels", "step", "server", "peer")
NO_GPU = 3


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="Checks and measures pagemill on one NVIDIA GPU.")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"sections, of {','.join(SECTIONS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--json", action="store_true", help="end with all rows as one JSON object in one line")
    options = parser.parse_args(arguments)
    options.only = [name for name in options.only.split(",") if name]
    unknown = [name for name in options.only if name not in SECTIONS]
    if unknown or not options.only:
        parser.error(f"--only knows {', '.join(SECTIONS)}, not {', '.join(unknown) or 'nothing'}")
    return options


def section(name: str, device: torch.device, bandwidth: float, quick: bool) -> Iterator[Row]:
    """Imports a section only when it runs: what it needs may be missing where another one is asked for."""
    if name == "correctness":
        from gpu_check import correctness

        yield from correctness.measure(quick)
    elif name == "kernels":
        from gpu_check import kernels

        yield from kernels.measure(device, bandwidth, quick)
    elif name == "step":
        from gpu_check import step

        yield from step.measure(device, bandwidth, quick)
    elif name == "server":
        from gpu_check import server

        yield from server.measure(device, quick)
    else:
        from gpu_check import peer

        yield from peer.measure(device, quick)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("no GPU here: torch finds no CUDA device", file=sys.stderr)
        return NO_GPU
    from gpu_check.timing import copy_bandwidth

    device = torch.device("cuda")
    name = torch.cuda.get_device_name(device)
    bandwidth = copy_bandwidth(device)
    torch.cuda.empty_cache()
    rows = [Row("copy within the device, read and written", "4 GiB", bandwidth / 1e9, "GB/s")]
    for part in options.only:
        begun = time.monotonic()
        try:
            for row in section(part, device, bandwidth, options.quick):
                rows.append(row)
                print(row, flush=True)
        except Exception as error:  # the other sections still have something to say; this one fails the check
            rows.append(Row(part, "", None, "", note=f"{type(error).__name__}: {error}"[:600]))
        torch.cuda.empty_cache()
        print(f"{part}: {time.monotonic() - begun:.0f} s", flush=True)
    print(f"\n{name}, torch {torch.__version__}\n\n{table(rows)}")
    if options.json:
        print(as_json(name, rows))
    return int(any(row.has_failed for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
