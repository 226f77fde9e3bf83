"""``shoal resume``: go on with a run from its folder."""

from __future__ import annotations

import argparse

from shoal.jobs.cli_options import add_address, add_json, add_overrides, with_address

HELP = "go on with a run from its newest complete checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_DIR", help="folder of the run (<storage_path>/<name>), local or a URI")
    parser.add_argument("--step", type=int, metavar="N", help="go on from the checkpoint of exactly this step")
    add_overrides(parser)
    add_address(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from shoal.jobs.cli_train import run_job
    from shoal.platform.run_folder import read_run_config

    config = read_run_config(args.run, args.overrides)
    resume = "must" if args.step is None else args.step
    config = with_address(config.replace(run=config.run.replace(resume=resume)), args)
    return run_job(config, as_json=args.json)
