"""``python -m pagemill.tether PARENT PROGRAM [ARGUMENT…]``: becomes PROGRAM, and dies with the process PARENT.

A supervisor that is killed with SIGKILL can clean up nothing. So the kernel is asked to kill this process when its
parent ends (PR_SET_PDEATHSIG, Linux); the wish survives exec. Done here, and not between fork and exec in the parent,
since Python code is not safe there once threads exist.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent, program = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the wish was heard
        sys.exit(1)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
