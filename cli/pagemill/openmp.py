"""How OpenMP threads wait. Must be settled before torch is imported: its runtime reads the environment while loading.

Threads that spin at barriers beside another busy process cost up to ten times the work itself on a small machine,
and the gateway and the scheduler are such processes. Waking a thread that sleeps takes some ten microseconds, on
virtual machines more, several times a layer. So they look for work for about that long, and then sleep.
"""

from __future__ import annotations

from collections.abc import MutableMapping

_WAITING = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",  # of pauses, some 10 to 40 ns each
    "KMP_BLOCKTIME": "0",
}


def let_threads_sleep(environment: MutableMapping[str, str]) -> None:
    """Asks for passive waiting wherever the operator has not said otherwise."""
    for name, value in _WAITING.items():
        environment.setdefault(name, value)
