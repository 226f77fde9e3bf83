"""``shoal ckpt``: list, verify and export the checkpoints of a run."""

from __future__ import annotations

import argparse
from typing import Any

from shoal.jobs.cli_options import add_json, print_json, table_lines

HELP = "list, verify or export checkpoints"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    ls = actions.add_parser("ls", help="list the checkpoints of a run and what each is worth")
    verify = actions.add_parser("verify", help="read every file of a checkpoint and compare it with its manifest")
    export = actions.add_parser("export", help="write the tables of a checkpoint as Parquet files")
    for action in (ls, verify, export):
        action.add_argument("path", metavar="RUN_DIR", help="folder of the run; verify, export: or of one checkpoint")
        add_json(action)
    for action in (verify, export):
        action.add_argument("--step", type=int, metavar="N", help="checkpoint of this step; default: the newest")
    export.add_argument("--out", required=True, metavar="DIR", help="folder or URI to write to")
    export.add_argument("--table", action="append", metavar="NAME", help="only this table (again for more)")
    export.add_argument("--slots", action="store_true", help="also optimizer state, last step and access count")


def run(args: argparse.Namespace) -> int:
    return {"ls": _list, "verify": _verify, "export": _export}[args.action](args)


def _list(args: argparse.Namespace) -> int:
    from shoal.jobs.progress import format_bytes
    from shoal.platform.checkpoint import list_checkpoints

    infos = list_checkpoints(args.path)
    if args.json:
        print_json([_info_dict(info) for info in infos])
        return 0
    if not infos:
        print(f"no checkpoints in {args.path}")
        return 0
    rows = [
        [
            str(info.name),
            info.state.value,
            _rows(info),
            format_bytes(info.size_bytes),
            info.parent or "-",
            info.created or "-",
            info.reason,
        ]
        for info in infos
    ]
    header = ["checkpoint", "state", "rows", "size", "builds on", "created", "why"]
    print("\n".join(table_lines(rows, header, right=frozenset({2, 3}))))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from shoal.jobs.progress import format_bytes
    from shoal.platform.checkpoint import verify_checkpoint

    report = verify_checkpoint(_checkpoint_uri(args))
    if args.json:
        print_json({"uri": report.uri, "is_ok": report.is_ok, "problems": list(report.problems)})
    elif report.is_ok:
        others = report.num_checkpoints - 1
        chain = f", with the {others} it builds on" if others else ""
        print(f"{report.uri}: {report.num_files} files, {format_bytes(report.size_bytes)}{chain}: sound")
    else:
        for problem in report.problems:
            print(f"{report.uri}: {problem}")
    return 0 if report.is_ok else 1


def _export(args: argparse.Namespace) -> int:
    from shoal.platform.export import export_parquet

    report = export_parquet(_checkpoint_uri(args), args.out, args.table, slots=args.slots)
    tables = [{"table": t.table, "path": t.path, "files": t.num_files, "rows": t.num_rows} for t in report.tables]
    if args.json:
        print_json({"checkpoint": str(report.name), "out": report.out, "tables": tables})
        return 0
    for table in tables:
        print(f"{table['table']}: {table['rows']} rows in {table['files']} files below {report.out}/{table['path']}")
    return 0


def _checkpoint_uri(args: argparse.Namespace) -> str:
    """The folder of the checkpoint that was asked for; a run's folder when it is the newest one."""
    if args.step is None:
        return args.path
    from shoal.platform.checkpoint import decide_resume, list_checkpoints
    from shoal.platform.storage import Storage

    storage = Storage(args.path)
    decision = decide_resume(list_checkpoints(storage), args.step, where=storage.shown_uri)
    assert decision.manifest is not None
    return storage.child(decision.manifest.name.directory).uri


def _rows(info: Any) -> str:
    """Rows in the whole checkpoint and, of an incremental one, how many it holds itself."""
    total = info.manifest.num_rows_total if info.manifest is not None else None
    if info.parent is None or total is None:
        return str(info.num_rows)
    return f"{info.num_rows} of {total}"


def _info_dict(info: Any) -> dict[str, Any]:
    return {
        "name": str(info.name),
        "step": info.name.step,
        "epoch": info.name.epoch,
        "uri": info.uri,
        "state": info.state.value,
        "reason": info.reason,
        "size_bytes": info.size_bytes,
        "num_rows": info.num_rows,
        "num_rows_total": info.manifest.num_rows_total if info.manifest is not None else None,
        "parent": info.parent,
        "created": info.created,
    }
