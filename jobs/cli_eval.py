"""``shoal eval``: metrics of a checkpoint on a data set."""

from __future__ import annotations

import argparse

from shoal.jobs.cli_options import add_address, add_json, add_overrides, print_json, with_address

HELP = "evaluate a run's checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_DIR|JOB", help="folder of the run, or its job file")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint of this step; default: the newest")
    text = "files, folders or globs to evaluate on; default: data.test, else data.eval"
    parser.add_argument("--data", nargs="+", metavar="PATH", help=text)
    add_overrides(parser)
    add_address(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from shoal.jobs.evaluate import evaluate_run
    from shoal.kernels.errors import ConfigError
    from shoal.platform.run_folder import load_job_or_run

    config = with_address(load_job_or_run(args.run, args.overrides), args)
    paths = tuple(args.data or config.data.test or config.data.eval)
    if not paths:
        raise ConfigError("there is nothing to evaluate on: set data.test in the job or pass --data")
    metrics = evaluate_run(config, paths=paths, step=args.step)
    if args.json:
        print_json(metrics)
        return 0
    for name, value in metrics.items():
        print(f"{name} = {value:.6g}" if isinstance(value, float) else f"{name} = {value}")
    return 0
