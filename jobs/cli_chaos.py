"""``shoal chaos``: train a job while things go wrong on purpose, and see whether its promises hold."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from shoal.jobs.cli_options import add_json, add_overrides, load_job, print_json, results_only

HELP = "train a job under seeded faults on a local Ray cluster and check its promises"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", nargs="?", help="job file (YAML)")
    add_overrides(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which schedule of faults (default 0)")
    parser.add_argument("--out", metavar="FOLDER", help="keep both runs here; default: a folder that is removed")
    parser.add_argument("--list", action="store_true", help="list the fault points, or with JOB the faults of the seed")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.list:
        return _list(args)
    if args.job is None:
        raise SystemExit("shoal chaos: a job file is needed (or --list)")
    from shoal.jobs.chaos import plan_for, run_chaos
    from shoal.platform.preflight import check_job

    config = load_job(args)
    check_job(config)
    plan = plan_for(config, args.seed)
    folder = Path(args.out or tempfile.mkdtemp(prefix="shoal-chaos-")).absolute()
    out = sys.stdout
    with results_only():
        report = run_chaos(config, plan, folder, lambda line: None if args.json else print(line, file=out, flush=True))
    if args.json:
        verdicts = [{"promise": v.promise, "held": not v.problems, "problems": v.problems} for v in report.verdicts]
        print_json({"seed": args.seed, "is_good": report.is_good, "verdicts": verdicts, "folder": str(folder)})
    else:
        for verdict in report.verdicts:
            print(f"{'broken' if verdict.problems else 'held  '}  {verdict.promise}")
            for problem in verdict.problems:
                print(f"        {problem}")
    if report.is_good and args.out is None:
        shutil.rmtree(folder, ignore_errors=True)
    elif not args.json:
        print(f"both runs are in {folder}")
    return 0 if report.is_good else 1


def _list(args: argparse.Namespace) -> int:
    from shoal.kernels.faults import POINTS, ROLES
    from shoal.platform.chaos import plan_chaos

    if args.job is None:
        rows = [{"point": p.name, "roles": list(p.roles), "text": p.text} for p in POINTS.values()]
        lines = [f"{row['point']:<24}{', '.join(row['roles']):<30}{row['text']}" for row in rows]
    else:
        faults = plan_chaos(args.seed, roles=ROLES).faults
        rows = [{"point": f.point, "role": f.role, "action": f.action.value, "nth": f.nth} for f in faults]
        lines = [f"{f.point:<24}{f.role:<12}{f.action.value:<10}passage {f.nth}" for f in faults]
    if args.json:
        print_json(rows)
    else:
        print("\n".join(lines))
    return 0
