"""Ask the questions of `atlas/` and `reproductions/`, and draw the tables and figures of `vecgym.guide.what_holds`.

The head of each file has the question, the setting, the expectation (or the claim and its source) and the rule of the
verdict, written before the first run. An answer goes to `results/`. An interrupted question keeps what it trained
in `vecgym-runs/what_holds/`. A question with an answer is not asked again, unless --again is given.

python benchmarks/what_holds.py [atlas/03 reproductions ...] [--scales tiny text gpt]
python benchmarks/what_holds.py --page        # writes the tables into the guide, and the figures

On one core a question takes about half a minute at "tiny", some minutes at "text", and up to several hours at "gpt".
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from figures import FOLDER as FIGURES
from figures import WIDTH, Size, save
from matplotlib.figure import Figure
from study import COMPARED, SCALES, TUNED, Answer, Study
from workloads import header, machine

from vecgym.core import files

FOLDER = Path(__file__).parent
KINDS = ("reproductions", "atlas")
PAGE = FOLDER.parent / "vecgym" / "guide" / "what_holds.py"


def questions(wanted: list[str]) -> dict[str, Path]:
    """Name, such as "atlas/03_outer_momentum" -> file, of those that begin with one of the words."""
    found = {f"{kind}/{path.stem}": path for kind in KINDS for path in sorted((FOLDER / kind).glob("[0-9]*.py"))}
    return {name: path for name, path in found.items() if not wanted or name.startswith(tuple(wanted))}


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"question_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def head(module: ModuleType) -> dict[str, str]:
    """The question, and the paragraphs of a head by their names: "Setting", "Expected" or "Claim", "Verdict"."""
    question, rest = (module.__doc__ or "").split("\n\n", 1)
    found = {"Question": " ".join(question.split())}
    for line in rest.strip().splitlines():
        name, colon, text = line.partition(": ")
        if colon and name in ("Setting", "Expected", "Claim", "Verdict"):
            found[name] = text
        else:
            found[list(found)[-1]] += " " + line.strip()
    return found


def ask(name: str, path: Path, scale: str, args: argparse.Namespace) -> None:
    """Ask one question at one scale, and add the answer to its file."""
    results = args.results / f"{name}.json"
    known: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    if scale in known.get("answers", {}) and not args.again:
        return
    module = loaded(path)
    if scale not in getattr(module, "SCALES", tuple(SCALES)):
        return
    source = path.read_bytes() + (FOLDER / "study.py").read_bytes()  # what older ones trained is not these ones'
    edition = hashlib.sha256(source).hexdigest()[:8]
    kept = None if args.quick else args.kept / f"{name}_{scale}_{edition}.json"
    study = Study(SCALES[scale], kept, args.quick)
    answer = module.ask(study)
    known |= {"head": head(module)}
    known.setdefault("answers", {})[scale] = as_json(study, answer)
    results.parent.mkdir(parents=True, exist_ok=True)
    with files.write_atomically(results, "w") as file:
        json.dump(known, file, indent=1)
    print(f"{name}, {scale}: {answer.verdict}. {answer.why}", flush=True)


def as_json(study: Study, answer: Answer) -> dict[str, Any]:
    """The answer as plain data. "settings" are those of the scale: a question may have others, see its head."""
    arms = {arm.name: {"best": {k: str(v) for k, v in arm.best.items()}, "edge": arm.edge, "loss": finite(arm.mean())}
            for arm in study.arms.values()}  # fmt: skip
    rows = {label: {k: finite(v) for k, v in row._asdict().items()} for label, row in answer.rows.items()}
    settings = {"steps": study.steps, "num_nodes": study.scale.num_nodes, "batch_size": study.scale.batch_size,
                "walks": study.scale.walks}  # fmt: skip
    seeds = {"tuned": list(TUNED), "compared": list(COMPARED)}
    return {"verdict": answer.verdict, "why": answer.why, "rows": rows, "arms": arms, "settings": settings,
            "seeds": seeds, "machine": machine()}  # fmt: skip


def finite(x: float) -> float | None:
    """A number that every reader of JSON takes: None for infinite ones and nan.

    >>> finite(0.123456), finite(float("inf"))
    (0.12346, None)
    """
    return round(x, 5) if math.isfinite(x) else None


# ------------------------------------------------------------------------------------------------ the page


TITLES = {"reproductions": "claimed", "atlas": "expected"}


def table(kind: str, results: Path) -> str:
    """The answers of a kind, one row for each question."""
    lines = [f"| | question | {TITLES[kind]} | {' | '.join(SCALES)} |", "|--:|---|---|" + "---|" * len(SCALES)]
    for name in questions([f"{kind}/"]):
        if (file := results / f"{name}.json").exists():
            found = json.loads(file.read_text())
            head = found["head"]
            answers = [found["answers"].get(scale) for scale in SCALES]
            cells = [f"**{one['verdict']}**. {one['why']}" if one else "" for one in answers]
            expected = head.get("Claim") or head["Expected"]
            lines.append(f"| {int(Path(name).name[:2])} | {head['Question']} | {expected} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page_with(text: str, results: Path) -> str:
    """The page, each of its tables anew from the answers."""
    for kind, title in TITLES.items():
        begin = text.index(f"| | question | {title} ")
        rest = text[begin:].splitlines()
        count = next(i for i, line in enumerate(rest) if not line.startswith("|"))
        end = begin + sum(len(line) + 1 for line in rest[:count])
        text = f"{text[:begin]}{table(kind, results)}\n{text[end:]}"
    return text


def figure(kind: str, results: Path) -> tuple[Figure, Size]:
    """One panel for each question: the differences that decide, with two standard errors, at each scale."""
    found = {name: json.loads(file.read_text()) for name in questions([f"{kind}/"])
             if (file := results / f"{name}.json").exists()}  # fmt: skip
    rows = max(1, -(-len(found) // 2))
    shown = Figure(layout="constrained")
    axes = shown.subplots(rows, 2, squeeze=False)
    scales = [scale for scale in SCALES if any(scale in one["answers"] for one in found.values())]
    for axis, (name, one) in zip(axes.flat, found.items()):
        labels = list(dict.fromkeys(label for answer in one["answers"].values() for label in answer["rows"]))
        for scale, answer in one["answers"].items():
            i = scales.index(scale)
            points = [(labels.index(label) + 0.2 * i, row) for label, row in answer["rows"].items()
                      if row["mean"] is not None]  # fmt: skip
            axis.errorbar([row["mean"] for _, row in points], [-y for y, _ in points], fmt="o", ms=3, c=f"C{i}",
                          xerr=[2 * row["error"] for _, row in points])  # fmt: skip
        axis.axvline(0, color="0.7", lw=0.8)
        axis.set_yticks([-y for y in range(len(labels))], labels, fontsize=7)
        axis.tick_params(axis="x", labelsize=7)
        axis.set_title(Path(name).name.replace("_", " "), fontsize=8)
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    if found:
        for i, scale in enumerate(scales):
            axes.flat[0].errorbar([], [], xerr=[], fmt="o", ms=3, c=f"C{i}", label=scale)
        axes.flat[0].legend(fontsize=7)
    return shown, (WIDTH, 20 + 160 * rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", help="how their names begin; none: all")
    parser.add_argument("--scales", nargs="+", choices=list(SCALES), default=["tiny"])
    parser.add_argument("--again", action="store_true", help="also what has an answer")
    parser.add_argument("--results", type=Path, default=FOLDER / "results")
    parser.add_argument("--kept", type=Path, default=Path("vecgym-runs") / "what_holds")
    parser.add_argument("--page", action="store_true", help="write the guide's tables and figures, and ask nothing")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few steps and seeds: does it work?")
    args = parser.parse_args()
    if unknown := [word for word in args.questions if not questions([word])]:
        parser.error(f"no question begins with {', '.join(unknown)}. There are: {', '.join(questions([]))}.")
    torch.set_num_threads(args.threads)
    if args.page:
        PAGE.write_text(page_with(PAGE.read_text(), args.results))
        for kind in KINDS:
            save(FIGURES / f"{kind}.png", [figure(kind, args.results)], colours=32)
        return
    print(header(), flush=True)
    for scale in args.scales:
        for name, path in questions(args.questions).items():
            ask(name, path, scale, args)


if __name__ == "__main__":
    main()
