"""``shoal attach``: watch a run that is alive, in the place of its driver."""

from __future__ import annotations

import argparse

from shoal.jobs.cli_options import add_json, add_live_run, results_only

HELP = "watch a live run to its end, as the command that started it would"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_live_run(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from shoal.jobs.cli_train import show_result
    from shoal.jobs.live import attach
    from shoal.platform.run_folder import read_run_config

    with results_only():
        result = attach(args.name, address=args.address)
    return show_result(read_run_config(result.path), result, as_json=args.json)
