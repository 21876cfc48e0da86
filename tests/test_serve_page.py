"""The page of the server in a real browser: it chats, streams, colours by origin, and asks for a key."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the serve extra")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the dev extra")

from serving import offline, serving, tiny_model  # noqa: E402

from selfspec.inference.serve.app import Front  # noqa: E402

pytestmark = pytest.mark.nightly
BROWSER = os.environ.get("SELFSPEC_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip("needs a Chromium: none on the path, nor in SELFSPEC_BROWSER")
    with playwright.sync_playwright() as tools:
        opened = tools.chromium.launch(executable_path=BROWSER, args=QUIET)
        yield opened
        opened.close()


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_the_page_chats_and_colours_by_origin(browser: Any, tmp_path: Path, template: str | None) -> None:
    model, tokenizer = tiny_model(str(tmp_path))
    tokenizer.chat_template = template
    words = "one and one and one and "
    with serving(model, tokenizer) as up:
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        page.goto(up.url)
        playwright.expect(page.locator("#model")).to_contain_text("lookup")
        page.fill("#tokens", "60")
        page.fill("#text", words)
        page.press("#text", "Enter")
        playwright.expect(page.locator("#state")).to_contain_text("per pass", timeout=60000)
        prompt = f"<user>{words}<assistant>" if template else words
        shown = page.eval_on_selector(".turn.model span", "e => e.textContent")
        assert shown == offline(model, tokenizer, prompt, max_new_tokens=60)
        assert page.locator(".turn.you span").first.text_content() == words
        drafted, own = page.locator("span.d1").count(), page.locator("span.d0").count()
        assert own > 0 and (drafted > 1) == (up.scheduler.stats.accepted > 0)  # one stands in the legend
        background = "e => getComputedStyle(e).backgroundColor"
        assert page.eval_on_selector("#legend .d1", background) != "rgba(0, 0, 0, 0)"
        page.uncheck("#colour")
        assert page.locator("#log.coloured").count() == 0
        page.check("#colour")
        page.screenshot(path=tmp_path / "page.png")
        page.click("#reset")
        assert page.locator(".turn").count() == 0
        assert not errors, errors
        page.close()


def test_the_page_asks_for_the_key_and_shows_errors(browser: Any, tmp_path: Path) -> None:
    model, tokenizer = tiny_model(str(tmp_path))
    with serving(model, tokenizer, None, Front("tiny", key="sesame")) as up:
        page = browser.new_page()
        page.goto(up.url)
        page.wait_for_selector("#key", state="visible")
        page.fill("#key", "sesame")
        page.press("#key", "Tab")
        playwright.expect(page.locator("#model")).to_contain_text("tiny")
        page.fill("#tokens", "10000")
        page.fill("#text", "x")
        page.click("#send")
        page.wait_for_selector(".turn.error")
        assert "limit is 512" in (page.locator(".turn.error span").text_content() or "")
        page.close()


def test_stop_ends_the_answer_and_frees_its_row(browser: Any, tmp_path: Path) -> None:
    import time

    model, tokenizer = tiny_model(str(tmp_path))
    with serving(model, tokenizer, None) as up:
        step = up.scheduler._step
        up.scheduler._step = lambda batch: (time.sleep(0.05), step(batch))
        page = browser.new_page()
        page.goto(up.url)
        page.fill("#tokens", "400")
        page.fill("#text", "x")
        page.click("#send")
        page.wait_for_selector(".turn.model span.d0")
        page.click("#stop")
        page.wait_for_selector("#send:not([disabled])")
        end = time.monotonic() + 20
        while up.scheduler.running and time.monotonic() < end:
            time.sleep(0.02)
        assert up.scheduler.running == 0 and up.scheduler.stats.new_tokens < 400
        page.close()
