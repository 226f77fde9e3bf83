"""The ``shoal`` command. Each subcommand is a module ``cli_<name>`` with ``HELP``, ``add_arguments`` and ``run``.

Nothing here, and nothing at the top of those modules, imports torch, ray or numpy, so that ``shoal --help`` and the
messages about a wrong job file come at once.

Exit codes: 0 done; 1 an error, in one line on stderr; 2 wrong usage; 130 interrupted: the run can be resumed.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

import shoal
from shoal.jobs import (
    cli_attach,
    cli_chaos,
    cli_ckpt,
    cli_config,
    cli_data,
    cli_doctor,
    cli_eval,
    cli_plan,
    cli_quickstart,
    cli_resume,
    cli_scale,
    cli_simulate,
    cli_stop,
    cli_synth,
    cli_train,
)
from shoal.kernels.errors import ShoalError
from shoal.platform.config_fields import did_you_mean

COMMANDS: dict[str, ModuleType] = {
    "train": cli_train,
    "resume": cli_resume,
    "scale": cli_scale,
    "attach": cli_attach,
    "stop": cli_stop,
    "eval": cli_eval,
    "plan": cli_plan,
    "config": cli_config,
    "ckpt": cli_ckpt,
    "data": cli_data,
    "doctor": cli_doctor,
    "chaos": cli_chaos,
    "quickstart": cli_quickstart,
    "synth": cli_synth,
    "simulate": cli_simulate,
}

EXIT_ERROR, EXIT_INTERRUPTED = 1, 130


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests the word that was meant."""

    def error(self, message: str) -> NoReturn:
        wrong = message.partition("invalid choice: ")[2]
        if wrong:
            word = wrong.split(" ")[0].strip("'")
            choices = [choice.strip("' )") for choice in wrong.partition("(choose from ")[2].split(",")]
            message = f"unknown command {word!r}{did_you_mean(word, choices)}"
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = Parser(prog="shoal", description="Train large recommendation models on Ray.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error (anywhere on the line)")
    parser.add_argument("--version", action="version", version=f"shoal {shoal.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, module in COMMANDS.items():
        subparser = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(subparser)
        subparser.set_defaults(handler=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Taken out here, because argparse would have to be told of it in every subcommand's own parser.
    is_debug = "--debug" in words
    args = build_parser().parse_args([word for word in words if word != "--debug"])
    try:
        return int(args.handler(args) or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`, a closed pager) has enough. What Python still holds must not be flushed into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except Exception as error:
        if is_debug:
            traceback.print_exc()
        print(f"error: {error_line(error)}", file=sys.stderr)
        return EXIT_ERROR


def error_line(error: BaseException) -> str:
    """What to tell a user about an error: ours as it is, also from inside a Ray task; others with their type."""
    # Ray wraps what a remote call raised; the original is its cause.
    cause = getattr(error, "cause", None)
    if isinstance(cause, ShoalError):
        return str(cause)
    if isinstance(error, ShoalError):
        return str(error)
    message = " ".join(str(error).split())
    return f"[{ShoalError.code}] unexpected {type(error).__name__}: {message[:300]} (--debug shows the traceback)"


if __name__ == "__main__":
    sys.exit(main())
