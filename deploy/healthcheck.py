"""What the images' health checks ask, with the standard library alone. Exit status 0 is healthy.

``http PORT PATH``    the server on this port answers 200
``listening PORT…``   something listens on each port
``connected PORT``    a connection to this remote port is up
"""

import http.client
import sys
from pathlib import Path

# States of /proc/net/tcp (include/net/tcp_states.h)
ESTABLISHED, LISTEN = "01", "0A"
PROC = Path("/proc/net")


def connections() -> list[tuple[int, int, str]]:
    """(local port, remote port, state) of every TCP socket of this container."""
    found = []
    for name in ("tcp", "tcp6"):
        try:
            lines = (PROC / name).read_text(encoding="ascii").splitlines()[1:]
        except FileNotFoundError:  # IPv6 is off
            continue
        for line in lines:
            _, local, remote, state = line.split()[:4]
            found.append((int(local.rpartition(":")[2], 16), int(remote.rpartition(":")[2], 16), state))
    return found


def answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=4)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def healthy(what: str, arguments: list[str]) -> bool:
    if what == "http":
        return answers(int(arguments[0]), arguments[1])
    ports = {int(port) for port in arguments}
    if what == "listening":
        return ports <= {local for local, _, state in connections() if state == LISTEN}
    if what == "connected":
        return ports <= {remote for _, remote, state in connections() if state == ESTABLISHED}
    raise SystemExit(__doc__)


if __name__ == "__main__":
    sys.exit(0 if healthy(sys.argv[1], sys.argv[2:]) else 1)
