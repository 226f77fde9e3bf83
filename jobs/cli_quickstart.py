"""``shoal quickstart``: train DLRM on MovieLens-100K and compare it with a logistic regression."""

from __future__ import annotations

import argparse

from shoal.jobs.cli_options import add_json, print_json

HELP = "train DLRM on MovieLens-100K with 2 workers and compare it with a logistic regression"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="workers; 0: without Ray (2)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed (0)")
    parser.add_argument("--out", default="quickstart-run", metavar="DIR", help="folder for data and run")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from shoal.jobs.quickstart import quickstart

    report = quickstart(num_workers=args.workers, seed=args.seed, out=args.out)
    if args.json:
        print_json(report)
    return 0
