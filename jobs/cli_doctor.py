"""``shoal doctor``: can this machine, cluster and storage run Shoal?"""

from __future__ import annotations

import argparse

from shoal.jobs.cli_options import add_address, add_json, add_overrides, load_job, print_json

HELP = "check this machine, the Ray cluster and the storage"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", nargs="?", help="job file: also check its cluster and storage")
    add_overrides(parser)
    add_address(parser)
    parser.add_argument("--storage", metavar="URI", help="folder or URI to test writing to")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from shoal.jobs.doctor import Level, examine

    storage, address = args.storage, args.address
    if args.job:
        config = load_job(args)
        storage = storage or config.run.storage_path
        address = address or config.scaling.address
    findings = []
    for finding in examine(address=address, storage=storage):
        findings.append(finding)
        if not args.json:
            print(f"{finding.level.value:4}  {finding.name}: {finding.detail}", flush=True)
            if finding.fix:
                print(f"      {finding.fix}")
    if args.json:
        print_json([finding.to_dict() for finding in findings])
    return 1 if any(finding.level is Level.FAIL for finding in findings) else 0
