"""The browser of the tests: it sees what a person would see in the console and on the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import Browser

HEAD = "<!doctype html><meta name='viewport' content='width=device-width'><title>A page</title>"
WRONG = {
    "<script>console.error('bad', 3)</script>": "bad 3",
    "<script>unheard_of()</script>": "unheard_of is not defined",
    "<script>setTimeout(() => { throw new Error('late') })</script>": "late",
    "<script>Promise.reject(new Error('rejected'))</script>": "rejected",
    "<img src='absent.png'>": "ERR_FILE_NOT_FOUND",
}


def test_errors_of_the_console_are_seen(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for body, error in WRONG.items():
        page.write_text(HEAD + body)
        browser.open(page)
        browser.evaluate("new Promise(done => setTimeout(done, 50))")
        assert len(browser.errors) == 1, (body, browser.errors)
        assert error in browser.errors[0]
    page.write_text(HEAD + "<script>console.log('fine')</script>")
    browser.open(page)
    assert browser.errors == []


def test_a_page_is_measured_asked_and_photographed(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(HEAD + "<p style='width: 600px'>Text</p>")
    for width, wide in ((1280, 1280), (480, 608)):
        browser.open(page, width)
        assert browser.evaluate("document.title") == "A page"
        assert browser.evaluate("document.documentElement.scrollWidth") == wide
        browser.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ValueError, match="unheard_of is not defined"):
        browser.evaluate("unheard_of()")
