"""Check links without fetching any: `python .ci/check_links.py SITE [FILE.md ...]`.

In the HTML pages below SITE, every link and image must lead to a file there, and every #fragment to an element of that
name. In Markdown files, every relative link must lead to a file, or to a heading of the file. Links to other hosts are
not followed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


class Page(HTMLParser):
    """The links and the anchors of one HTML page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def broken_in_site(site: Path) -> Iterator[str]:
    """Every broken link of the HTML pages below `site`, with its page."""
    pages = {path.resolve(): Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: there is no HTML page"
    for path, page in pages.items():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not target.is_file():
                yield f"{path.relative_to(site.resolve())}: {link}: no such file"
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].anchors:
                yield f"{path.relative_to(site.resolve())}: {link}: no such place in the page"


def anchors_of_markdown(text: str) -> set[str]:
    """The names that GitHub gives to the headings of a Markdown text."""
    headings = re.findall(r"^#+ (.*)", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def broken_in_markdown(path: Path) -> Iterator[str]:
    """Every broken relative link of a Markdown file."""
    text = path.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))):
        url = urlsplit(link)
        if url.scheme or url.netloc:
            continue
        target = path.parent / unquote(url.path) if url.path else path
        if not target.exists():
            yield f"{path}: {link}: no such file"
        elif url.fragment and target.suffix == ".md" and url.fragment not in anchors_of_markdown(target.read_text()):
            yield f"{path}: {link}: no such heading"


def main(site: str, *markdown: str) -> int:
    broken = [*broken_in_site(Path(site)), *(line for path in markdown for line in broken_in_markdown(Path(path)))]
    print("\n".join(broken) or "All links lead somewhere.")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
