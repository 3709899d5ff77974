"""Stands for a part of the server: writes what happens to it into a file, and behaves as its arguments say.

``part.py EVENTS NAME [print=TEXT] [wait_for=NOTE] [exit=STATUS] [exit_once=STATUS] [ignore_term] [second_term]
[stop_after=NOTE] [slow_stop=SECONDS] [grandchild]``
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

events, name, *behaviour = sys.argv[1:]
options = dict(word.partition("=")[::2] for word in behaviour)


def note(what: str) -> None:
    # One short write in append mode: lines of several processes do not mix.
    with open(events, "a") as file:
        file.write(f"{name} {what} {os.getpid()}\n")


def wait_for(what: str) -> None:
    """Returns once somebody has noted ``what``."""
    while f"{what} " not in Path(events).read_text():
        time.sleep(0.01)


def on_term(number: int, frame: object) -> None:
    note("told")
    if "ignore_term" in options or options.pop("second_term", None) is not None:
        return
    if "stop_after" in options:
        wait_for(options["stop_after"])
    time.sleep(float(options.get("slow_stop", 0)))
    note("ended")
    sys.exit(0)


signal.signal(signal.SIGTERM, on_term)
signal.signal(signal.SIGINT, lambda *_: note("interrupted"))
if "print" in options:
    sys.stdout.write(options["print"])
    sys.stdout.flush()
note("started")
if "grandchild" in options:
    own_group = "own_group" in options
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=own_group)
    with open(events, "a") as file:
        file.write(f"grandchild started {child.pid}\n")
if "wait_for" in options:
    wait_for(options["wait_for"])
if "exit" in options:
    sys.exit(int(options["exit"]))
if "exit_once" in options and Path(events).read_text().count(f"{name} started") == 1:
    sys.exit(int(options["exit_once"]))
while True:
    signal.pause()
