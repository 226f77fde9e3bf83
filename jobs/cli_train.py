"""``shoal train``: run a job."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from shoal.jobs.cli_options import add_address, add_job, add_json, add_resume, load_job, print_json, results_only

if TYPE_CHECKING:
    from shoal.jobs.result import Result
    from shoal.platform.config import JobConfig

#: Of a run that Ctrl-C or SIGTERM ended in good order: a shell or a scheduler must not take it for a finished one.
EXIT_STOPPED = 130

HELP = "train the model of a job file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    add_resume(parser)
    add_address(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    config = load_job(args)
    if args.resume is not None:
        config = config.replace(run=config.run.replace(resume=args.resume))
    return run_job(config, as_json=args.json)


def summary_line(name: str, result: Result) -> str:
    """How a run ended: its last training window, and its last evaluation where there was one."""
    wanted = ("loss", "ne", "auc", "samples_per_s", "eval/auc", "eval/log_loss", "eval/ne", "eval/calibration")
    values = [f"{name}={result.metrics[name]:.5g}" for name in wanted if name in result.metrics]
    ended = "stopped" if result.is_stopped else "finished"
    return " ".join([f"run {name} {ended}: steps={result.steps}", *values])


def run_job(config: JobConfig, *, as_json: bool = False) -> int:
    """Check, train, and say what came out and what to do next. Returns the exit code: 130 when it was stopped."""
    from shoal.platform.preflight import check_job

    check_job(config)
    from shoal.jobs.train import ElasticTrainer

    with results_only():
        result = ElasticTrainer.from_config(config).fit()
    return show_result(config, result, as_json=as_json)


def show_result(config: JobConfig, result: Result, *, as_json: bool) -> int:
    """Say what came out of a run and what to do next. Returns the exit code: 130 when it was stopped."""
    from shoal.jobs.next_steps import format_next_steps, next_commands

    if as_json:
        print_json({"run_dir": result.path, "checkpoint": result.checkpoint, "metrics": dict(result.metrics)})
        return EXIT_STOPPED if result.is_stopped else 0
    print(summary_line(config.run.name, result))
    has_test_data = bool(config.data.test or config.data.eval)
    has_checkpoint = result.checkpoint is not None
    commands = next_commands(
        result.path, has_test_data=has_test_data, has_checkpoint=has_checkpoint, train=config.train
    )
    print(format_next_steps(commands))
    return EXIT_STOPPED if result.is_stopped else 0
