"""`vecgym exogym`: run a script written for EXO Gym."""

from __future__ import annotations

import argparse
import os
import traceback


def options(parser: argparse.ArgumentParser) -> None:
    """Run a script written for EXO Gym, unmodified, as python would: "import exogym" imports vecgym's classes under
    EXO Gym's names. The exit code is that of the script."""
    parser.epilog = "example: vecgym exogym example/nanogpt_train.py --dataset shakespeare --strategy diloco"
    parser.add_argument("--device", metavar="NAME", help="train on this device, not the script's: cpu, cuda, mps")
    parser.add_argument("script", metavar="SCRIPT", help="the script to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="the arguments of the script")


def run(args: argparse.Namespace) -> int:
    """Run the script; return 1 if it raises an exception, which is printed as python would print it."""
    from vecgym.compat.exogym import run_script

    if not os.path.isfile(args.script):
        args.parser.error(f"can't open file {args.script!r}: there is no such file")
    try:
        run_script(args.script, args.args, args.device)
    except Exception as error:  # the traceback begins in the script, as in python
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != args.script:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace or error.__traceback__)
        return 1
    return 0
