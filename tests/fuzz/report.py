"""Findings of a campaign: counts, seconds, failures by cause with the smallest case of each, refusals by message."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass, field

from tests.fuzz.common import Case, Failure, Outcome, Refusal, kind


@dataclass
class Found:
    """The failures of one cause."""

    count: int
    message: str
    case: Case  # shrunk
    script: str


@dataclass
class Report:
    """The outcomes of one campaign; those of several workers add up."""

    name: str
    count: int = 0
    seconds: float = 0.0
    failures: dict[str, Found] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)  # by kind of message
    examples: dict[str, str] = field(default_factory=dict)  # a message of each kind
    tally: Counter[str] = field(default_factory=Counter)  # what the campaign itself has counted

    def add(self, outcome: Outcome) -> bool:
        """Count an outcome; whether it is a failure of a cause not seen before."""
        self.count += 1
        if isinstance(outcome, Refusal):
            self.refusals[kind(outcome.message)] += 1
            self.examples.setdefault(kind(outcome.message), outcome.message)
        if isinstance(outcome, Failure):
            if outcome.cause not in self.failures:
                return True
            self.failures[outcome.cause].count += 1
        return False

    def merge(self, other: Report) -> None:
        self.count += other.count
        self.seconds = max(self.seconds, other.seconds)
        self.refusals += other.refusals
        self.tally += other.tally
        self.examples = other.examples | self.examples
        for cause, found in other.failures.items():
            if cause in self.failures:
                self.failures[cause].count += found.count
            else:
                self.failures[cause] = found

    @property
    def num_failures(self) -> int:
        return sum(found.count for found in self.failures.values())

    def __str__(self) -> str:
        refused = sum(self.refusals.values())
        lines = [
            f"{self.name}: {self.count} cases in {self.seconds:.0f} s, {refused} refused, "
            f"{self.num_failures} failures of {len(self.failures)} causes"
        ]
        lines += [f"  {what}: {count}" for what, count in self.tally.items()]
        for cause, found in sorted(self.failures.items(), key=lambda item: -item[1].count):
            lines += ["", f"  FAILURE, {found.count} times: {cause}", textwrap.indent(found.message, "    ")]
            lines += [f"    {found.case}", textwrap.indent(found.script, "      ")]
        for text, count in self.refusals.most_common():
            lines.append(f"  refused {count} times: {self.examples[text]}")
        lines += ["", f"{self.name}, all causes of failures:"] if self.failures else []
        lines += [f"  {found.count} times: {cause}" for cause, found in sorted(self.failures.items())]
        return "\n".join(lines)
