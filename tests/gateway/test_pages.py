"""The chat page and the API's reference, in a real Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pagemill_testing.browser import NARROW, WIDE, chromium, visit
from pagemill_testing.gateway_server import Stage, stage
from pagemill_testing.prepared_models import byte_level_bpe
from pagemill_testing.prepared_models import byte_level_ids as ids
from pagemill_testing.sockets import wait_until
from playwright.sync_api import Browser, Page, expect

from pagemill_gateway.pages import pages
from pagemill_shared.messages import FinishReason

TOKENIZER = byte_level_bpe()
FIGURES = re.compile(r"^\d+\stokens · [\d.]+\stokens/s · first\safter\s[\d.]+\ss · length$")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


def ask(page: Page, text: str) -> None:
    expect(page.get_by_role("button", name="Send")).to_be_visible()  # nothing is sent before an answer has ended
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def prompts(running: Stage) -> list[str]:
    """What was submitted, as text with its control tokens."""
    return [TOKENIZER.decode(s.prompt_token_ids.tolist(), skip_special_tokens=False) for s in running.stub.submitted]


# ---------------------------------------------------------------- the files


def test_pages_are_served_with_a_policy_that_allows_nothing_foreign(api: Stage) -> None:
    served = {page.path: page for page in pages()}
    assert {"/", "/docs", "/site/chat.js", "/site/base.css", "/site/icon.svg"} <= served.keys()
    for path in served:
        response = api.client.get(path)
        assert response.status_code == 200
        assert response.headers["x-content-type-options"] == "nosniff"
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert "http://" not in response.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in response.text
    assert api.client.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert api.client.get("/site/nothing.js").status_code == 404
    assert api.client.post("/").status_code == 405


def test_no_script_makes_html_of_text() -> None:
    for page in pages():
        if page.path.endswith(".js"):
            assert not re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page.content)


# ---------------------------------------------------------------- the chat page


def test_an_answer_streams_in_with_its_figures(api: Stage, browser: Browser) -> None:
    api.stub.replay(ids("The capital of France is Paris."))
    api.stub.held = True
    with visit(browser, api.gateway.url) as page:
        expect(page.get_by_label("Model")).to_have_value("tiny")
        ask(page, "Where?")
        api.stub.wait_for(lambda: api.stub.running)
        api.stub.deliver_once()
        expect(page.locator(".answer .words")).to_have_text(re.compile("."))
        first_shown = page.evaluate("performance.now()")
        # So that a rate can be told, however the other pieces come:
        wait_until(lambda: page.evaluate("performance.now()") > first_shown + 200)
        api.stub.held = False
        expect(page.locator(".own")).to_have_text("Where?")
        expect(page.locator(".answer .words")).to_have_text("The capital of France is Paris.")
        expect(page.locator(".answer .figures")).to_have_text(FIGURES)
        expect(page.get_by_label("Message")).to_be_focused()
        expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_text_shows_while_it_comes(api: Stage, browser: Browser) -> None:
    api.stub.replay(ids("The capital"), FinishReason.NOT_FINISHED)
    with visit(browser, api.gateway.url) as page:
        ask(page, "Where?")
        expect(page.locator(".answer.open .words")).to_have_text("The capital")
    api.stub.wait_for(lambda: not api.stub.running)  # closing the tab ends the request


def test_parameters_go_with_the_request(api: Stage, browser: Browser) -> None:
    api.stub.replay(ids("fine"))
    with visit(browser, api.gateway.url) as page:
        page.get_by_label("System text").fill("Be brief.")
        for label, value in {"Temperature": "0.5", "top_p": "0.9", "max_tokens": "7", "Seed": "42"}.items():
            page.get_by_label(label).fill(value)
        ask(page, "Go")
        expect(page.locator(".answer .words")).to_have_text("fine")
    (submit,) = api.stub.submitted
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.5, 0.9, 7, 42)
    assert prompts(api)[0].startswith("<|im_start|>system\nBe brief.<|im_end|>")


@pytest.mark.parametrize(("viewport", "in_one_row"), [(WIDE, True), (NARROW, False)])
def test_several_answers_side_by_side_and_one_to_go_on_from(
    api: Stage, browser: Browser, viewport: dict[str, int], in_one_row: bool
) -> None:
    api.stub.replay([], sequences=[ids("the first"), ids("the second"), ids("the third")])
    with visit(browser, api.gateway.url, viewport=viewport) as page:
        if not in_one_row:
            page.get_by_role("button", name="Settings").click()
        page.get_by_label("Answers (n)").fill("3")
        ask(page, "Go")
        expect(page.locator(".answer .words")).to_have_text(["the first", "the second", "the third"])
        boxes = [card.bounding_box() for card in page.locator(".answer").all()]
        tops = {round(box["y"]) for box in boxes if box is not None}
        assert (len(tops) == 1) == in_one_row
        page.get_by_label("2 of 3").check()
        api.stub.replay([], sequences=[ids("more")] * 3)
        ask(page, "On")
        expect(page.locator(".answers").nth(1).locator(".words").first).to_have_text("more")
    assert "assistant\nthe second<|im_end|>\n<|im_start|>user\nOn<|im_end|>" in prompts(api)[0]


@pytest.mark.parametrize("way", ["button", "key"])
def test_stopping_ends_the_request_on_the_server(api: Stage, browser: Browser, way: str) -> None:
    api.stub.replay(ids("The capital"), FinishReason.NOT_FINISHED)
    with visit(browser, api.gateway.url) as page:
        ask(page, "Where?")
        expect(page.locator(".answer .words")).to_have_text("The capital")
        if way == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press("Escape")
        api.stub.wait_for(lambda: api.stub.aborted)
        expect(page.locator(".answer .figures")).to_contain_text("stopped")
        api.stub.replay(ids("fine"))
        ask(page, "Go on")
        expect(page.locator(".answer .words").nth(1)).to_have_text("fine")
    assert "assistant\nThe capital<|im_end|>" in prompts(api)[0]


def test_a_refusal_is_shown_and_the_question_can_be_sent_again(api: Stage, browser: Browser) -> None:
    api.stub.replay(ids("fine"))
    with visit(browser, api.gateway.url) as page:
        page.get_by_label("max_tokens").fill("100000")
        ask(page, "Where?")
        expect(page.get_by_role("alert").filter(has_text="maximum context length is 2048 tokens")).to_be_visible()
        expect(page.get_by_label("Message")).to_have_value("Where?")
        page.get_by_label("max_tokens").fill("")
        page.get_by_label("Message").press("Enter")
        expect(page.locator(".answer .words")).to_have_text("fine")
    assert prompts(api)[0].count("Where?") == 1


def test_a_bad_number_is_told_of_before_anything_is_sent(api: Stage, browser: Browser) -> None:
    api.stub.replay(ids("fine"))
    with visit(browser, api.gateway.url, viewport=NARROW) as page:
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("top_p").fill("2")
        page.get_by_role("button", name="Settings").click()
        ask(page, "Where?")
        expect(page.get_by_label("top_p")).to_be_visible()
        assert not api.stub.submitted
        assert page.get_by_label("Message").input_value() == "Where?"


def test_an_error_in_the_middle_keeps_what_came(api: Stage, browser: Browser) -> None:
    api.stub.replay(ids("The capital"), FinishReason.NOT_FINISHED)
    with visit(browser, api.gateway.url) as page:
        ask(page, "Where?")
        expect(page.locator(".answer .words")).to_have_text("The capital")
        api.stub.fail("worker_lost", "the worker <b>died</b>")
        expect(page.locator(".fault")).to_have_text("the worker <b>died</b>")
        expect(page.locator(".answer .words")).to_have_text("The capital")
        expect(page.locator(".answer .figures")).to_contain_text("not complete")


def test_a_server_that_went_away(browser: Browser) -> None:
    with stage() as running:
        running.stub.replay(ids("fine"))
        with visit(browser, running.gateway.url) as page:
            expect(page.get_by_label("Model")).to_have_value("tiny")
            running.gateway.stop()
            running.gateway.join()
            running.gateway.listener.close()
            ask(page, "Where?")
            expect(page.locator(".fault")).to_have_text("The server cannot be reached.")


def test_text_is_never_html(api: Stage, browser: Browser) -> None:
    evil = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"
    api.stub.replay(ids(f"{evil}\n```html\n{evil}\n```\nend"))
    with visit(browser, api.gateway.url) as page:
        ask(page, evil)
        expect(page.locator(".own")).to_have_text(evil)
        expect(page.locator(".answer .words pre")).to_have_text(evil)
        expect(page.locator(".answer .words > div").first).to_contain_text(evil)
        expect(page.locator(".answer .words > div").last).to_have_text("end")
        assert page.locator("#log img, #log script").count() == 0
        assert page.evaluate("window.hacked") is None


def test_a_key_is_asked_for_and_stays_in_the_tab(browser: Browser) -> None:
    with stage(api_key="s3cret") as running:
        running.stub.replay(ids("fine"))
        with visit(browser, running.gateway.url) as page:
            expect(page.get_by_role("alert").filter(has_text="API key")).to_be_visible()
            expect(page.get_by_label("API key")).to_be_focused()
            page.keyboard.type("s3cret")
            page.keyboard.press("Tab")
            expect(page.get_by_label("Model")).to_have_value("tiny")
            expect(page.locator("#notice")).to_be_hidden()
            page.reload()
            expect(page.get_by_label("Model")).to_have_value("tiny")
            ask(page, "Go")
            expect(page.locator(".answer .words")).to_have_text("fine")
            assert "s3cret" not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")


def test_a_new_chat_forgets(api: Stage, browser: Browser) -> None:
    api.stub.replay(ids("fine"))
    with visit(browser, api.gateway.url) as page:
        ask(page, "Alpha")
        expect(page.locator(".answer .figures")).to_contain_text("length")
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".answer")).to_have_count(0)
        ask(page, "Beta")
        expect(page.locator(".answer .figures")).to_contain_text("length")
    assert "Alpha" not in prompts(api)[1]


def test_all_of_it_works_without_a_mouse(api: Stage, browser: Browser) -> None:
    api.stub.replay(ids("fine"))
    with visit(browser, api.gateway.url) as page:
        expect(page.get_by_label("Message")).to_be_focused()
        seen = []
        for _ in range(25):
            page.keyboard.press("Tab")
            seen.append(page.evaluate("(e => e.id || e.name || e.textContent)(document.activeElement)"))
        assert {
            "model",
            "system",
            "temperature",
            "top_p",
            "max_tokens",
            "seed",
            "n",
            "key",
            "new",
            "log",
            "send",
        } <= set(seen)
        page.get_by_label("Message").focus()
        page.keyboard.type("One")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("Two")
        page.keyboard.press("Enter")
        expect(page.locator(".own")).to_have_text("One\nTwo", use_inner_text=True)
        expect(page.locator(".answer .words")).to_have_text("fine")


CONTRAST = """selector => {
  const shade = (color) => {
    const part = color.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255).map(
      v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
  };
  const one = document.querySelector(selector);
  let under = one;
  while (getComputedStyle(under).backgroundColor === "rgba(0, 0, 0, 0)") under = under.parentElement;
  const pair = [getComputedStyle(one).color, getComputedStyle(under).backgroundColor].map(shade).sort((a, b) => b - a);
  return (pair[0] + 0.05) / (pair[1] + 0.05);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_it_can_be_read_in_light_and_dark_wide_and_narrow(
    api: Stage, browser: Browser, scheme: Any, viewport: dict[str, int]
) -> None:
    api.stub.replay(ids("A" * 300 + " word" * 30), per_delivery=50)
    with visit(browser, api.gateway.url, viewport=viewport, color_scheme=scheme) as page:
        page.get_by_label("Message").fill("B" * 300)
        page.keyboard.press("Enter")
        expect(page.locator(".answer .figures")).to_contain_text("length")
        for selector in ("h1", ".own > div", ".answer .words", ".answer .figures", "#send", "nav a", "legend small"):
            assert page.evaluate(CONTRAST, selector) >= 4.5, selector
        dark_ground = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 25, 23)"
        assert dark_ground == (scheme == "dark")
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        expect(page.get_by_label("Message")).to_be_in_viewport()
        expect(page.get_by_label("Temperature")).to_be_visible(visible=viewport is WIDE)


# ---------------------------------------------------------------- the reference


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_the_reference_shows_every_operation(api: Stage, browser: Browser, viewport: dict[str, int]) -> None:
    document = api.client.get("/openapi.json").json()
    names = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    with visit(browser, api.gateway.url, "/docs", viewport=viewport) as page:
        for name in names:
            expect(page.locator(f"details#{name}")).to_be_visible()
        page.locator("details#createChatCompletion summary").click()
        expect(page.locator("details#createChatCompletion").get_by_text("messages *")).to_be_visible()
        assert page.locator("details").count() == len(names) + len(document["components"]["schemas"])
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def test_the_reference_tells_when_there_is_none(api: Stage, browser: Browser) -> None:
    with visit(browser, api.gateway.url, "/site/icon.svg") as page:
        page.route("**/openapi.json", lambda route: route.fulfill(status=503, body="{}"))
        page.goto(api.gateway.url + "/docs")
        expect(page.get_by_role("alert")).to_contain_text("/openapi.json: HTTP 503")


def test_the_reference_asks_for_the_key_that_the_chat_page_has(browser: Browser) -> None:
    with stage(api_key="s3cret") as running, visit(browser, running.gateway.url, "/docs") as page:
        expect(page.get_by_role("alert")).to_contain_text("a valid API key must be sent")
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("s3cret")
        page.keyboard.press("Enter")
        expect(page.locator("details#createChatCompletion")).to_be_visible()
        expect(page.get_by_label("API key")).to_be_hidden()
        with page.expect_download() as download:
            page.get_by_role("link", name="openapi.json").click()
        assert '"openapi": "3.1.0"' in download.value.path().read_text()
        page.get_by_role("link", name="Chat").click()
        expect(page.get_by_label("Model")).to_have_value("tiny")
        page.goto(running.gateway.url + "/docs")
        expect(page.locator("details#createChatCompletion")).to_be_visible()


def test_a_model_that_is_still_loading(api: Stage, browser: Browser) -> None:
    with visit(browser, api.gateway.url, "/site/icon.svg") as page:
        answers = [503]
        error = '{"error": {"message": "the model is not loaded yet", "param": null, "code": "model_loading"}}'

        def models(route: Any) -> None:
            route.fulfill(status=answers.pop(), body=error) if answers else route.continue_()

        page.route("**/v1/models", models)
        page.goto(api.gateway.url)
        expect(page.get_by_role("alert").filter(has_text="not loaded yet")).to_be_visible()
        wait_until(lambda: not answers)
        expect(page.get_by_label("Model")).to_have_value("tiny")
