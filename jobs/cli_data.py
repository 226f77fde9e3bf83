"""``shoal data check``: read a data set against its declared schema."""

from __future__ import annotations

import argparse

from shoal.jobs.cli_options import add_job, add_json, load_job, print_json

HELP = "check a data set against the job's schema"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="report every value that breaks the schema: file, row group, row")
    add_job(check)
    text = "which data to read (again for more); default: all that the job names"
    check.add_argument("--split", action="append", choices=("train", "eval", "test"), help=text)
    check.add_argument("--max-problems", type=int, default=100, metavar="N", help="stop listing after N (default 100)")
    add_json(check)


def run(args: argparse.Namespace) -> int:
    from shoal.kernels.errors import ConfigError
    from shoal.platform.datacheck import check_dataset

    config = load_job(args)
    splits = args.split or [name for name in ("train", "eval", "test") if getattr(config.data, name)]
    if not splits:
        raise ConfigError("the job names no data: set data.train")
    reports = {}
    for split in splits:
        paths = getattr(config.data, split)
        if not paths:
            raise ConfigError(f"data.{split} names no files")
        reports[split] = check_dataset(list(paths), config.data.schema(), max_problems=args.max_problems)
    if args.json:
        print_json({split: report.to_dict() for split, report in reports.items()})
    else:
        for split, report in reports.items():
            for problem in report.problems:
                print(f"{split}: {problem}")
            print(f"{split}: {report.summary()}")
    return 0 if all(report.is_ok for report in reports.values()) else 1
