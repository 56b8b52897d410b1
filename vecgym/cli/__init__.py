"""The command `vecgym`.

A subcommand is a module here: `options(parser)` adds its options, `run(args)` runs it and returns the exit code;
`COMMANDS` names it. Nothing heavy is imported until a command runs, so that help and errors come at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vecgym import __version__
from vecgym.cli import compare, exogym, info, plot, run, sweep, verify
from vecgym.errors import DivergenceError, ProcessError

COMMANDS = {
    "compare": (compare, "train a small GPT with several strategies, and compare them"),
    "run": (run, "train as a function in a file says"),
    "sweep": (sweep, "run a grid of configurations as a function in a file says"),
    "plot": (plot, "draw runs that were logged"),
    "verify": (verify, "show that strategies give the same numbers on real processes"),
    "exogym": (exogym, "run a script that was written for EXO Gym"),
    "info": (info, "show versions, devices, threads and engines"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (None: the program's own) and return its exit code.

    0: done; 1: it cannot be done, for a reason in one line on stderr; 130: interrupted with Ctrl-C. As argparse
    does, a command line that makes no sense raises `SystemExit(2)`, and one that asks for help `SystemExit(0)`.

    >>> main(["info"])  # doctest: +ELLIPSIS
    vecgym      0.1.0
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
    except (ValueError, TypeError, OSError, ImportError, DivergenceError, ProcessError) as error:
        print(f"{args.parser.prog}: error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vecgym",
        description="Distributed training of one model on K nodes, simulated as one program in one process.",
        epilog="example: vecgym compare --strategies allreduce diloco --H 50",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"vecgym {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    for name, (module, about) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=module.options.__doc__, allow_abbrev=False)
        command.set_defaults(parser=command, run=module.run)
        module.options(command)
    return parser
