"""What a browser is shown: the chat page at ``/`` and the API's reference at ``/docs``, from the files in ``site/``.

The pages load nothing from anywhere else, and their policy tells the browser so. A browser cannot send a key with what
it navigates to, so they are served without one: they are the same files on every server and hold no data. The user
types the key in, it stays in the tab, and goes with each request of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

from pagemill_gateway.errors import Headers
from pagemill_gateway.exchange import Exchange

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_PATHS = {"index.html": "/", "docs.html": "/docs"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, slots=True)
class Page:
    """One file, served at ``path``."""

    path: str
    content: bytes
    headers: Headers

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.send_bytes(self.content, 200, None, self.headers)


def pages() -> Iterator[Page]:
    """All files of the site."""
    for file in sorted(files("pagemill_gateway").joinpath("site").iterdir(), key=lambda file: file.name):
        yield Page(
            _PATHS.get(file.name, f"/site/{file.name}"),
            file.read_bytes(),
            [
                (b"content-type", _TYPES[file.name.rpartition(".")[2]].encode()),
                (b"content-security-policy", _POLICY.encode()),
                (b"x-content-type-options", b"nosniff"),
                (b"referrer-policy", b"no-referrer"),
                (b"cache-control", b"no-cache"),  # a new version is seen at once
            ],
        )
