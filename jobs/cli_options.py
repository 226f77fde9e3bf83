"""Options that several subcommands share, and how they become a job. Imports nothing heavy at the top."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.platform.config import JobConfig


def add_job(parser: argparse.ArgumentParser, what: str = "job file (YAML)") -> None:
    """The job file and its overrides."""
    parser.add_argument("job", metavar="JOB", help=what)
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """``-o key.path=value``, any number of times."""
    parser.add_argument(
        "-o",
        "--override",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override a value of the job, e.g. -o train.lr=0.1 (again for more; list entries by position)",
    )


def add_address(parser: argparse.ArgumentParser) -> None:
    """The Ray cluster to use."""
    text = "Ray cluster (host:port or auto); default: the submitted job's own cluster, else a local one"
    parser.add_argument("--address", metavar="ADDRESS", help=text)


def add_live_run(parser: argparse.ArgumentParser) -> None:
    """A run that is alive, and where to look for it."""
    parser.add_argument("name", metavar="NAME", help="name of the run (run.name of its job)")
    text = "Ray cluster it runs in (host:port); default: RAY_ADDRESS, else the one on this machine"
    parser.add_argument("--address", metavar="ADDRESS", help=text)


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Where to begin."""
    text = "auto: go on from the newest complete checkpoint, if any; must: fail without one; never: from step 0; "
    text += "N: from the checkpoint of exactly that step; default: run.resume of the job (auto)"
    parser.add_argument("--resume", metavar="auto|must|never|N", type=resume_policy, help=text)


def resume_policy(text: str) -> str | int:
    """The value of ``--resume``."""
    if text in ("auto", "must", "never"):
        return text
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not auto, must, never or a step number")


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json`` for machines."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def load_job(args: argparse.Namespace) -> JobConfig:
    """The validated job that the arguments name, with overrides and ``--address`` applied."""
    from shoal.platform.config_file import load_config

    config = load_config(args.job, args.overrides)
    return with_address(config, args)


def with_address(config: JobConfig, args: argparse.Namespace) -> JobConfig:
    """The job with ``--address`` in place of scaling.address, where it was given."""
    if getattr(args, "address", None):
        return config.replace(scaling=config.scaling.replace(address=args.address))
    return config


def results_only() -> contextlib.AbstractContextManager[Any]:
    """While a run is watched stdout belongs to its result: Ray's messages about lost workers, which it prints there
    (2.60), go to stderr."""
    return contextlib.redirect_stdout(sys.stderr)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    json.dump(value, sys.stdout, indent=2, default=str)
    print()


def table_lines(rows: list[list[str]], header: list[str], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Aligned columns, the header first; columns whose index is in ``right`` are right-aligned."""
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = []
    for row in table:
        pairs = enumerate(zip(row, widths))
        cells = [cell.rjust(width) if i in right else cell.ljust(width) for i, (cell, width) in pairs]
        lines.append("  ".join(cells).rstrip())
    return lines
