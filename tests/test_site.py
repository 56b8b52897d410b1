"""The site, as its readers use it: `.ci/docs` renders it and runs these tests; without a site they are skipped."""

from __future__ import annotations

import doctest
import json
import os
import re
from pathlib import Path
from urllib.parse import quote

import pytest

import vecgym
from tests.browser import Browser
from tests.test_readme import python_blocks

ORDER = re.findall(r"^- `vecgym\.guide\.(\w+)`: ", str(vecgym.guide.__doc__), re.MULTILINE)
QUESTIONS = {
    "what bandwidth do I need": "guide/clock",
    "how do I resume a run": "guide/checkpoints",
    "write my own strategy": "guide/writing_a_strategy",
    "how many nodes fit in memory": "guide/memory",
    "EXO Gym scripts": "guide/compat",
    "torchrun on several machines": "guide/processes",
    "required_bandwidth": "clock",
    "DiLoCoStrategy": "strategy",
    "SCAFFOLD": "strategy",
    "clients with non-IID data": "guide/strategies",
    "Trainer.fit": "",
}
RESULTS = """
new Promise(done => {
    const results = () => {
        const main = document.querySelector("main");
        const found = [...main.querySelectorAll(".search-result > a")].map(link => [link.className, link.href]);
        const count = /^\\s*(No|\\d+) search result/.exec(main.textContent);
        count ? done([Number(count[1]) || 0, found]) : setTimeout(results, 10);
    };
    results();
})
"""
COPIED = """
(async () => {
    const copied = [];
    Object.defineProperty(navigator, "clipboard", {value: {writeText: text => copied.push(text)}});
    for (const button of document.querySelectorAll("main .copy")) await button.click();
    return copied;
})()
"""
CUT_OFF = """
(() => {
    for (const printed of document.querySelectorAll("main .go")) printed.remove();  // which scrolls on a phone
    const blocks = [...document.querySelectorAll("main pre")];
    return blocks.filter(block => block.scrollWidth > block.clientWidth).map(block => block.textContent);
})()
"""


@pytest.fixture(scope="module")
def site() -> Path:
    if "VECGYM_SITE" not in os.environ:
        pytest.skip("there is no site: .ci/docs renders it and runs this test")
    return Path(os.environ["VECGYM_SITE"])


@pytest.mark.parametrize("width", [1280, 480])
def test_pages_open_without_an_error_and_fit_the_window(
    site: Path, browser: Browser, tmp_path: Path, width: int
) -> None:
    for page in ("guide", "guide/sweeps", "strategy"):
        browser.open(site / "vecgym" / f"{page}.html", width)
        assert browser.errors == []
        assert browser.evaluate("document.documentElement.scrollWidth") == width
        assert browser.evaluate("[...document.images].filter(image => !image.naturalWidth).length") == 0
        assert browser.evaluate("document.querySelectorAll('main img').length") == (page != "strategy")
        browser.screenshot(tmp_path / f"{page.replace('/', '_')}.png")
        assert browser.evaluate(CUT_OFF) == []


def test_the_guide_is_read_from_the_first_page_to_the_last(site: Path) -> None:
    assert "url=vecgym/guide.html" in (site / "index.html").read_text()
    page, seen = site / "vecgym" / "guide.html", list[str]()
    while True:
        links = dict(re.findall(r'<a rel="(prev|next)" href="([^"]*)"', page.read_text()))
        if seen:
            before = site / "vecgym" / ("guide.html" if len(seen) == 1 else f"guide/{seen[-2]}.html")
            assert (page.parent / links["prev"]).resolve() == before.resolve()
        if "next" not in links:
            break
        page = page.parent / links["next"]
        seen.append(page.stem)
    assert seen == ORDER


def test_code_is_copied_whole_and_without_prompts(site: Path, browser: Browser) -> None:
    for name in ORDER:
        text = getattr(vecgym.guide, name).__doc__
        browser.open(site / "vecgym" / "guide" / f"{name}.html")
        copied = browser.evaluate(COPIED)
        examples = [example.source for example in doctest.DocTestParser().get_examples(text)]
        assert not [block for block in copied if ">>>" in block]
        for code in (*examples, *python_blocks(text)):
            assert any(code.strip() in block for block in copied), f"{name}: {code}"


def test_the_search_finds_the_guide_and_no_private_names(site: Path, browser: Browser) -> None:
    home = (site / "vecgym" / "guide.html").as_uri()
    for question, page in QUESTIONS.items():
        browser.open(f"{home}?search={quote(question)}")
        count, found = browser.evaluate(RESULTS)
        assert browser.errors == []
        assert 0 < count < 100, question
        first = Path(found[0][1].removeprefix("file://").partition("#")[0])
        assert first == site / "vecgym" / f"{page}.html" if page else site / "vecgym.html", question
    index = (site / "search.js").read_text()
    assert set(re.findall(r'"kind": "(\w+)"', index)) == {"guide", "module", "class", "function"}
    assert not [name for name in re.findall(r'"fullname": "(vecgym[\w.]*)"', index) if "._" in name]


def test_every_strategy_is_in_the_index_as_a_class_and_in_a_section_of_the_guide(site: Path) -> None:
    docs = re.search(r"const docs = (\[.*\]);", (site / "search.js").read_text())
    assert docs is not None
    entries = json.loads(docs[1])
    classes = {entry["title"] for entry in entries if entry["kind"] == "class"}
    guide = " ".join(entry["doc"] for entry in entries if entry["modulename"] == "vecgym.guide.strategies")
    exported = [getattr(vecgym.strategy, name) for name in vecgym.strategy.__all__ if name.endswith("Strategy")]
    names = {strategy.__name__ for strategy in exported}
    assert "SCAFFOLDStrategy" in names
    assert names <= classes
    assert not [name for name in names - {"Strategy", "RankStrategy"} if name not in guide]


def test_the_site_is_small(site: Path) -> None:
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < 10e6
