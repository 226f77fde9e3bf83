"""``shoal data check``: read a data set against its declared schema."""

from __future__ import annotations

import argparse
import dataclasses

from shoal.jobs.cli_options import add_job, add_json, load_job, print_json

HELP = "check a data set against the job's schema"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="report every value that breaks the schema: file, row group, row")
    add_job(check)
    text = "which data to read (again for more); default: all that the job names"
    check.add_argument("--split", action="append", choices=("train", "eval", "test"), help=text)
    check.add_argument("--examples", type=int, default=5, metavar="N", help="examples per kind of violation (5)")
    add_json(check)


def run(args: argparse.Namespace) -> int:
    from shoal.kernels.errors import ConfigError
    from shoal.platform.datacheck import check_dataset

    config = load_job(args)
    splits = args.split or [name for name in ("train", "eval", "test") if getattr(config.data, name)]
    if not splits:
        raise ConfigError("the job names no data: set data.train")
    sizes = {}
    if config.model.factory:
        # Ids outside a table can only be told from the model, which knows how large its tables are.
        from shoal.jobs.job_tables import checked_sizes, describe_job

        sizes = checked_sizes(describe_job(config)[1])
    reports = {}
    for split in splits:
        paths = getattr(config.data, split)
        if not paths:
            raise ConfigError(f"data.{split} names no files")
        schema = config.data.schema()
        reports[split] = check_dataset(list(paths), schema, table_sizes=sizes, max_examples=args.examples)
        if not args.json:
            for line in reports[split].lines():
                print(f"{split}: {line}")
    if args.json:
        values = {split: {"is_ok": report.is_ok, **dataclasses.asdict(report)} for split, report in reports.items()}
        print_json(values)
    return 0 if all(report.is_ok for report in reports.values()) else 1
