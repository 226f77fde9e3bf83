"""``shoal simulate``: the production state machines under simulated faults, from a seed."""

from __future__ import annotations

import argparse
import os
import sys

HELP = "run the elastic protocols under simulated faults, from a seed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, help="first seed; default: a random one, printed first")
    parser.add_argument(
        "--histories", type=int, default=1, metavar="N", help="seeds to run, one history each (default 1)"
    )
    parser.add_argument("--faults", type=int, metavar="N", help="only the first N faults of the history")
    parser.add_argument("--verbose", action="store_true", help="print every event of one history")


def run(args: argparse.Namespace) -> int:
    from shoal.jobs.simulate import find_failure, replay, summary

    seed = int.from_bytes(os.urandom(4), "little") if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    if args.verbose or args.faults is not None:
        problem = replay(seed, args.faults, print if args.verbose else lambda text: None)
        print(problem or "no rule was broken")
        return 0 if problem is None else 1
    report, failure = find_failure(seed, args.histories, lambda done: print(f"{done} histories", flush=True))
    print(summary(report))
    if failure is None:
        return 0
    print(f"seed {failure.seed}, {failure.num_faults} faults: {failure.text}", file=sys.stderr)
    print(f"replay: {failure.command}", file=sys.stderr)
    return 1
