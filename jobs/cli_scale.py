"""``shoal scale``: change the number of workers of a run that is alive."""

from __future__ import annotations

import argparse

from shoal.jobs.cli_options import add_live_run

HELP = "change the number of workers of a live run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_live_run(parser)
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="workers from now on, 1 or more")


def run(args: argparse.Namespace) -> int:
    from shoal.jobs.live import scale

    print(scale(args.name, args.workers, address=args.address))
    return 0
