"""``shoal plan``: bytes per table and worker, before anything starts."""

from __future__ import annotations

import argparse

from shoal.jobs.cli_options import add_job, add_json, load_job, print_json

HELP = "show the bytes per table and worker before anything starts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--no-sample", action="store_true", help="do not read data; touched rows are then unknown")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from shoal.jobs.plan_report import plan_job

    report = plan_job(load_job(args), use_sample=not args.no_sample)
    if args.json:
        print_json(report.to_dict())
    else:
        from shoal.jobs.plan_text import format_report

        print(format_report(report))
    return 0
