"""``shoal synth``: write a seeded, Criteo-shaped click log."""

from __future__ import annotations

import argparse
import dataclasses

from shoal.jobs.cli_options import add_json, print_json

HELP = "write a seeded synthetic click log as Parquet"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="DIR", help="new or empty folder")
    parser.add_argument("--rows", type=int, default=1_000_000, metavar="N", help="rows, test rows included (1,000,000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same files (0)")
    parser.add_argument("--alpha", type=float, default=1.05, metavar="X", help="Zipf exponent of the ids (1.05)")
    parser.add_argument("--drift", type=float, default=1.0, metavar="X", help="how fast popular ids change (1)")
    parser.add_argument("--cardinality-max", type=int, metavar="N", help="at most N distinct ids per column")
    parser.add_argument("--test-fraction", type=float, default=0.1, metavar="X", help="last part of the rows (0.1)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from shoal.jobs.synth import synth

    report = synth(
        args.out,
        args.rows,
        args.seed,
        alpha=args.alpha,
        drift=args.drift,
        cardinality_max=args.cardinality_max,
        test_fraction=args.test_fraction,
    )
    values = dataclasses.asdict(report)
    if args.json:
        print_json(values)
        return 0
    for name, value in values.items():
        print(f"{name} = {value}")
    return 0
