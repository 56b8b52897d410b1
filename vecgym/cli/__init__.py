"""The command `vecgym`.

Each subcommand is a module here, listed in `COMMANDS`: `options(parser)` adds its options, `run(args)` runs it and
returns the exit code. torch is imported only when a command runs, so that help and usage errors appear at once.
"""

from __future__ import annotations

import argparse
import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

from vecgym import __version__
from vecgym.cli import compare, exogym, info, plot, price, report, run, sweep, verify
from vecgym.core.errors import DivergenceError, ProcessError

COMMANDS = {
    "compare": (compare, "train a small GPT with several strategies and compare them"),
    "run": (run, "train as configured by a function in a file"),
    "sweep": (sweep, "run a sweep as configured by a function in a file"),
    "plot": (plot, "draw saved runs"),
    "report": (report, "write a page about saved runs"),
    "price": (price, "compute how long strategies or recorded runs take on your network"),
    "verify": (verify, "check that strategies compute the same on real processes"),
    "exogym": (exogym, "run a script written for EXO Gym"),
    "info": (info, "show versions, devices, threads and engines, or the settings of saved runs"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (None: that of the process) and return the exit code.

    0: success; 1: an error, reported in one line on stderr, or in full with `--traceback`; 130: interrupted with
    Ctrl-C. As usual with argparse, an invalid command line raises `SystemExit(2)`, and `--help` raises `SystemExit(0)`.

    >>> main(["info"])  # doctest: +ELLIPSIS
    vecgym      0.3.0
    ...
    0
    """
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    if unknown:  # reported by the subcommand, whose usage line shows what is allowed
        args.parser.error(f"there is no option {' '.join(unknown)}; see {args.parser.prog} --help")
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except Exception as error:
        if args.traceback:
            traceback.print_exc()
        else:
            print(f"{args.parser.prog}: error: {in_short(error)}", file=sys.stderr)
        return 1


# Errors whose messages suffice without the names of their classes.
CLEAR_ERRORS = (ValueError, TypeError, OSError, ImportError, MemoryError, DivergenceError)


def in_short(error: Exception) -> str:
    """Describe an error without its traceback, but with the line of the user's code that caused it, if any.

    >>> in_short(KeyError("weight")), in_short(ValueError("H=0 must be an integer >= 1."))
    ("KeyError: 'weight' (--traceback shows where)", 'H=0 must be an integer >= 1.')
    """
    text = str(error).partition("\n\nThere:\n")[0]
    line = users_line(error)
    if isinstance(error, CLEAR_ERRORS):
        return f"{line}{text}"
    kind = "" if isinstance(error, ProcessError) else f"{type(error).__name__}: "
    return f"{line}{kind}{text} (--traceback shows where)"


def users_line(error: BaseException) -> str:
    """Return `FILE:LINE: ` of the last frame in a traceback that is not in vecgym, torch or Python's library."""
    if isinstance(error, ProcessError):
        places = re.findall(r'^ *File "(.+?)", line (\d+)', error.traceback, re.MULTILINE)
    else:
        places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename is not None:
        places.append((error.filename, error.lineno))
    paths = sysconfig.get_paths()
    installed = (str(Path(__file__).parent.parent), *(paths[kind] for kind in ("stdlib", "purelib", "platlib")))
    users = [place for place in places if not place[0].startswith((*installed, "<"))]
    if users:
        return f"{users[-1][0]}:{users[-1][1]}: "
    return users_line(error.__cause__) if error.__cause__ is not None and not isinstance(error, CLEAR_ERRORS) else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vecgym",
        description="Simulate distributed training of one model on K nodes as one program in one process.",
        epilog="example: vecgym compare --strategies allreduce diloco --H 50",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"vecgym {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    for name, (module, about) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=module.options.__doc__, allow_abbrev=False)
        command.set_defaults(parser=command, run=module.run)
        command.add_argument("--traceback", action="store_true", help="show the full traceback of an error")
        module.options(command)
    return parser
