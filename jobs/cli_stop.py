"""``shoal stop``: end a run that is alive, in good order."""

from __future__ import annotations

import argparse

from shoal.jobs.cli_options import add_live_run

HELP = "end a live run after its step and a checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_live_run(parser)
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="wait this long for its end (600)")


def run(args: argparse.Namespace) -> int:
    from shoal.jobs.live import stop

    stop(args.name, address=args.address, timeout_s=args.timeout)
    print(f"run {args.name} stopped; it can be resumed")
    return 0
