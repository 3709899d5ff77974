"""The chat page with a real model behind it; `make screenshot` keeps what it looks like for the README."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagemill_testing.browser import WIDE, chromium, visit
from pagemill_testing.live_server import ServeCommand
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.timeout(300)

PICTURE = Path(__file__).parents[2] / "docs" / "chat.png"
KEEP = "KEEP_SCREENSHOT"
"""Environment variable: set, the picture in docs/ is written anew; otherwise a test run leaves it alone."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def test_a_conversation_and_what_it_looks_like(server: ServeCommand, browser: Browser, tmp_path: Path) -> None:
    with visit(browser, server.url, viewport=WIDE) as page:
        expect.set_options(timeout=90_000)
        page.get_by_label("Temperature").fill("0")
        ask(page, "What is the capital of France?")
        expect(page.locator(".answer .words")).to_have_text("The capital of France is Paris.")
        for label, value in {"Temperature": "0.6", "Seed": "4", "Answers (n)": "3", "max_tokens": "60"}.items():
            page.get_by_label(label).fill(value)
        with server.worker_held():
            ask(page, "Describe it at dawn, in two sentences.")
            server.until_state(lambda state: state["requests_total"] == 1, "the question is there")
        server.until_state(
            lambda state: all(request["output_tokens"] for request in state["requests"]), "each answer has begun"
        )
        cards = page.locator(".answers").nth(1).locator(".answer")
        with server.worker_held():  # the page has seen the first tokens before the others come: there is a rate to show
            expect(cards).to_have_count(3)
            for card in cards.all():
                expect(card.locator(".figures")).to_contain_text("token", timeout=15_000)
        for card in cards.all():
            expect(card.locator(".figures")).to_contain_text("tokens/s")
            expect(card.locator(".figures")).to_contain_text("first after")
        expect(page.locator(".answer.open")).to_have_count(0)
        picture = PICTURE if os.environ.get(KEEP) else tmp_path / PICTURE.name
        page.screenshot(path=picture)
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size < 400_000
    server.until_idle()


def test_stop_frees_the_blocks_on_the_server(server: ServeCommand, browser: Browser) -> None:
    aborted = server.counter("requests_aborted_total")
    with visit(browser, server.url) as page:
        # At this temperature tokens are as good as even, and an answer does not end before it is stopped.
        for label, value in {"Temperature": "100", "Seed": "1", "Answers (n)": "2", "max_tokens": "2000"}.items():
            page.get_by_label(label).fill(value)
        ask(page, "Count from one to two thousand, in words.")
        expect(page.locator(".answer .figures").first).to_contain_text("token", timeout=90_000)
        server.until_state(lambda state: state["requests_total"] == 1, "the request runs")
        page.get_by_role("button", name="Stop").click()
        server.until_idle()
        expect(page.locator(".answer .figures").first).to_contain_text("stopped")
    assert server.counter("requests_aborted_total") == aborted + 1
