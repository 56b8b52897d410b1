"""`python -m tests.fuzz [--campaign NAME ...] --cases N --seed S --workers W [--minutes M]`; exit code 1: a failure."""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.running import run

CAMPAIGNS = (  # modules of this package
    "configurations", "sweeps", "rollouts", "oddities", "asynchronous", "relations", "behaviours", "products",
    "intervals", "arguments", "files", "kills",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Try random cases on the library.")
    parser.add_argument("--campaign", nargs="+", choices=CAMPAIGNS, default=CAMPAIGNS, help="those to run (all)")
    parser.add_argument("--cases", type=int, default=1000, help="cases of each campaign (1000)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same cases (0)")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    parser.add_argument("--minutes", type=float, default=60.0, help="the most that one campaign may take (60)")
    args = parser.parse_args(arguments)
    failures = 0
    for name in args.campaign:
        report = run(name, args.seed, args.cases, args.workers, args.minutes * 60)
        print(report, flush=True)
        failures += report.num_failures
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
