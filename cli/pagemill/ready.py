"""Waiting for the gateway to say that it is ready, and the line that tells the user so."""

from __future__ import annotations

import asyncio
import json
import shlex

_PAUSE = 0.1


def url_of(host: str, port: int) -> str:
    """URL at which a server bound to ``host`` is reached from this machine."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


async def until_ready(host: str, port: int) -> None:
    """Returns once ``GET /ready`` answers 200. Asks for as long as it takes; cancel it to give up."""
    while await _status(host, port) != 200:
        await asyncio.sleep(_PAUSE)


async def _status(host: str, port: int) -> int | None:
    """Status code of ``GET /ready``; None when nobody answers (yet)."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        reader, writer = await asyncio.open_connection(reachable, port)
    except OSError:
        return None
    try:
        writer.write(f"GET /ready HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        words = (await asyncio.wait_for(reader.readline(), 5.0)).split()
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else None
    except (OSError, TimeoutError):
        return None
    finally:
        writer.close()


def ready_lines(url: str, model: str, *, with_key: bool) -> str:
    """What ``pagemill serve`` prints when it is ready: the URL, a request to try, and where to chat."""
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    )
    key = ' -H "Authorization: Bearer $PAGEMILL_API_KEY"' if with_key else ""
    return (
        f"pagemill is ready: {model} at {url} (Ctrl-C stops it)\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}\n"
        f"  chat at {url}/ in a browser, or with: pagemill chat --url {url}"
    )
