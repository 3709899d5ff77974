"""Runs a Supervisor over stub parts: ``supervise.py EVENTS SPEC``; SPEC is its arguments as JSON.

Of what a part is told, ``stop_timeout=SECONDS`` is for the supervisor; the others get as long as they need.
"""

import asyncio
import json
import os
import sys

from pagemill import supervisor as module
from pagemill.restarts import RestartBudget
from pagemill.supervisor import Part, PartError, Supervisor

events, spec = sys.argv[1], json.loads(sys.argv[2])
stub = os.path.join(os.path.dirname(__file__), "part.py")


def part(name: str, behaviour: list[str]) -> Part:
    own = dict(word.partition("=")[::2] for word in behaviour)
    stop_timeout = float(own.get("stop_timeout", 1000.0))
    return Part(name, (sys.executable, stub, events, name, *behaviour), os.environ, stop_timeout)


async def announce() -> None:
    print("announced", flush=True)


module._HURRY_S = spec.get("hurry", module._HURRY_S)
supervisor = Supervisor(
    [[part(name, behaviour) for name, behaviour in stage] for stage in spec["stages"]],
    first=[part(name, behaviour) for name, behaviour in spec.get("first", [])],
    report=lambda name, line: print(f"{name}| {line}", flush=True),
    new_budget=lambda: RestartBudget(limit=spec.get("limit", 5), first_pause=0.01),
)
try:
    sys.exit(asyncio.run(supervisor.run(announce)))
except PartError as error:
    print(f"failed: {error}", flush=True)
    sys.exit(error.exit_code)
