"""``shoal config``: show a resolved job, check it, or print the JSON schema for editors."""

from __future__ import annotations

import argparse

from shoal.jobs.cli_options import add_job, add_json, load_job, print_json

HELP = "show, check or describe a job file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print the job with every default filled in")
    add_job(show)
    add_json(show)
    validate = actions.add_parser("validate", help="check the job, its files and its storage")
    add_job(validate)
    text = "check only what is written; touch neither data nor storage"
    validate.add_argument("--static", action="store_true", help=text)
    actions.add_parser("schema", help="print the JSON schema of job files, for editors")


def run(args: argparse.Namespace) -> int:
    if args.action == "schema":
        from shoal.platform.config_schema import job_schema

        print_json(job_schema())
        return 0
    config = load_job(args)
    if args.action == "show":
        from shoal.platform.config_file import dump_config
        from shoal.platform.secrets import redact_tree

        if args.json:
            print_json(redact_tree(config.to_dict()))
        else:
            print(dump_config(config), end="")
        return 0
    if not args.static:
        from shoal.platform.preflight import check_job

        check_job(config)
    print(f"{args.job}: valid")
    return 0
