"""A real Chromium, driven by Playwright: its own one where it is installed, or the system's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
WIDE = {"width": 1280, "height": 800}
NARROW = {"width": 360, "height": 740}


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser; skips the test where there is none."""
    expect.set_options(timeout=90_000)  # a machine that is busy with other tests takes long
    with sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
        path = str(own) if own.exists() else next(filter(None, map(shutil.which, _NAMES)), None)
        if path is None:
            pytest.skip(
                "there is no Chromium: install the system's (Debian: apt-get install chromium), "
                "or Playwright's (playwright install chromium)"
            )
        # Root has no sandbox for the browser, and it shows nothing but our own pages.
        browser = playwright.chromium.launch(executable_path=path, chromium_sandbox=os.geteuid() != 0)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visit(browser: Browser, url: str, path: str = "/", **context: Any) -> Iterator[Page]:
    """A page in a fresh profile. At the end nothing may have gone wrong in it, nor been asked of another server."""
    with browser.new_context(viewport=context.pop("viewport", WIDE), **context) as opened:
        page = opened.new_page()
        page.set_default_timeout(90_000)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if "Content Security" in message.text else None)
        page.on("request", lambda asked: faults.append(asked.url) if not asked.url.startswith(url) else None)
        page.goto(url + path)
        yield page
        assert faults == []
