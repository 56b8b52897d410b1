#!/usr/bin/env python3
"""Render the guide and the reference with pdoc and the templates here: `python .ci/pages/build.py FOLDER`.

The guide's pages come in the order of the list in `vecgym/guide/__init__.py`. The reference is the public interface:
what modules have in `__all__`, at that place, and the modules that the guide names.
"""

from __future__ import annotations

import json
import pkgutil
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from pdoc import render
from pdoc.doc import Class, Doc, Function, Module, Namespace
from pdoc.render_helpers import format_signature, to_html, to_markdown

import vecgym
from vecgym import *  # noqa: F403  pdoc reads the attributes of `vecgym`, which are there once they have been used

HERE = Path(__file__).parent
Page = dict[str, str]


def guide_pages() -> list[Module]:
    names = re.findall(r"^- `(vecgym\.guide\.\w+)`: ", str(vecgym.guide.__doc__), re.MULTILINE)
    return [Module.from_name(name) for name in ("vecgym.guide", *names)]


def reference_pages(guide: list[Module]) -> Iterator[Module]:
    """The public modules: packages, those directly in vecgym, and what has `__all__` or is named by the guide."""
    root = Module.from_name("vecgym")
    named = set(re.findall(r"`(vecgym[\w.]*)`", " ".join(page.docstring for page in (root, *guide))))
    yield root
    for info in pkgutil.walk_packages(vecgym.__path__, "vecgym."):
        if not re.search(r"\.guide\b|__main__", info.name):
            module = Module.from_name(info.name)
            if info.ispkg or info.name.count(".") == 1 or hasattr(module.obj, "__all__") or info.name in named:
                yield module


def public_places(reference: list[Module]) -> dict[tuple[str, str], tuple[str, str]]:
    """The page on which each class and function is documented first, by the module and the name of its definition."""
    places: dict[tuple[str, str], tuple[str, str]] = {}
    for module in reference:
        for member in module.own_members:
            if isinstance(member, Class | Function):
                places.setdefault(member.taken_from, (module.modulename, member.qualname))
    return places


def html(doc: Doc, module: Module) -> str:
    return re.sub(r"<img [^>]*>", "", to_html(to_markdown(doc.docstring, module, "google")))


def sections(page: Module) -> Iterator[Page]:
    """A page of the guide, cut at its headings."""
    title = page.docstring.partition("\n")[0]
    for part in re.split(r'(?=<h[23] id=")', html(page, page)):
        heading = re.match(r'<h[23] id="([^"]*)">(.*?)</h', part)
        found = {"title": title.partition(":")[0], "fullname": title, "modulename": page.modulename, "kind": "guide"}
        if heading:
            name = re.sub("<.*?>", "", heading[2])
            found |= {"title": name, "fullname": f"{title} &rsaquo; {name}", "qualname": heading[1]}
        yield {**found, "doc": part}


def entries(module: Module, space: Namespace, places: dict[tuple[str, str], tuple[str, str]]) -> Iterator[Page]:
    """A module or class and what is public in it, described and not inherited: no attributes, no private names."""
    common = {"fullname": space.fullname, "title": space.name, "modulename": module.modulename}
    yield {**common, "qualname": space.qualname, "kind": space.kind, "doc": html(space, module)}
    for member in space.own_members:
        here = space is not module or places.get(member.taken_from) == (module.modulename, member.qualname)
        if not here or member.name.startswith("_") or not getattr(member.obj, "__doc__", None):
            continue
        if isinstance(member, Class):
            yield from entries(module, member, places)
        elif isinstance(member, Function):
            own = {"fullname": member.fullname, "title": member.name, "qualname": member.qualname}
            shown = {
                "kind": "function",
                "funcdef": member.funcdef,
                "signature": format_signature(member.signature, True),
            }
            yield {**common, **own, **shown, "doc": html(member, module)}


def main(folder: str) -> None:
    site, guide = Path(folder), guide_pages()
    reference = sorted(reference_pages(guide), key=lambda module: module.modulename)
    places = public_places(reference)
    render.configure(
        docformat="google", include_undocumented=False, show_source=False, favicon="data:,", template_directory=HERE
    )
    render.env.globals.update(guide=guide, reference=reference, places=places)
    modules = {module.modulename: module for module in (*guide, *reference)}
    for name, module in modules.items():
        path = site / f"{name.replace('.', '/')}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render.html_module(module, modules))
    found = [entry for page in guide for entry in sections(page)]
    found += [entry for module in reference for entry in entries(module, module, places)]
    for name, settings in {"index.html": {}, "style.css": {}, "search.js": {"search_index": json.dumps(found)}}.items():
        (site / name).write_text(render.env.get_template(f"{name}.jinja2").render(settings))
    shutil.copy(HERE / "copy.js", site)


if __name__ == "__main__":
    main(*sys.argv[1:])
