"""Campaigns of random cases against the library: `python -m tests.fuzz --cases 10000 --seed 0`.

A campaign is a module of this package, named in `CAMPAIGNS` of `__main__`, with

* `NAME`, a str;
* `cases(seed, count)`, an iterator of `count` cases (see `Case`), the same for the same seed;
* `run(case)`, which tries one and gives back None, a `Failure` or a `Refusal`. Whatever it raises is a failure too;

and, if it can, with

* `smaller(case)`, an iterator of cases that are a little simpler, simplest first: a failure is shrunk by them;
* `reproducer(case)`, a short script that shows the failure to somebody who has vecgym alone;
* `tally`, a Counter of its own, which the report shows.
"""

from tests.fuzz.common import Case, Failure, Outcome, Refusal

__all__ = ["Case", "Failure", "Outcome", "Refusal"]
