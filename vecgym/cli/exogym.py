"""`vecgym exogym`: run a script that was written for EXO Gym."""

from __future__ import annotations

import argparse
import os
import traceback


def options(parser: argparse.ArgumentParser) -> None:
    """Run a script written for EXO Gym unmodified, as python would: "import exogym" finds vecgym's classes under EXO
    Gym's names. The exit code is the script's."""
    parser.epilog = "example: vecgym exogym example/nanogpt_train.py --dataset shakespeare --strategy diloco"
    parser.add_argument("--device", metavar="NAME", help="train there, whatever the script says: cpu, cuda, mps")
    parser.add_argument("script", metavar="SCRIPT", help="the script")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="its command line")


def run(args: argparse.Namespace) -> int:
    """Run it; return 1 if it ends with an exception, which is shown as python would show it."""
    from vecgym.compat.exogym import run_script

    if not os.path.isfile(args.script):
        args.parser.error(f"can't open file {args.script!r}: there is no such file")
    try:
        run_script(args.script, args.args, args.device)
    except Exception as error:  # from the script's own lines on
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != args.script:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace or error.__traceback__)
        return 1
    return 0
