"""A plan as text for the console. Pure."""

from __future__ import annotations

from shoal.jobs.cli_options import table_lines
from shoal.jobs.plan_report import PROCESS_BYTES, PlanReport
from shoal.jobs.plan_traffic import traffic_lines
from shoal.jobs.progress import format_bytes

#: All columns but the first hold numbers or read like them.
_NUMBERS = frozenset(range(1, 16))


def format_report(report: PlanReport) -> str:
    """The plan as text."""
    lines = [f"plan of {report.job}: {report.num_workers} workers, {len(report.tables)} tables", ""]
    header = ["table", "rows", "touched", "dim", "type", "optimizer", "row", "bytes", "touched", "sharding"]
    rows = [
        [
            table.name,
            f"{table.rows_max:,}" if table.num_embeddings else "dynamic",
            "?" if table.rows_estimate is None else f"{table.rows_estimate:,}",
            str(table.embedding_dim),
            table.data_type,
            table.optimizer,
            f"{table.weight_bytes}+{table.optimizer_bytes}+{table.metadata_bytes} B",
            format_bytes(table.bytes_max),
            "?" if table.rows_estimate is None else format_bytes(table.rows_estimate * table.row_bytes),
            f"{table.sharding}/{table.num_blocks}",
        ]
        for table in report.tables
    ]
    lines += table_lines(rows, header, right=_NUMBERS)
    lines += ["", "(row: weights + optimizer + metadata; touched: estimated from a sample, bytes: with every id)", ""]
    lines += _worker_lines(report)
    lines += ["", f"imbalance: the fullest worker holds {report.imbalance:.2f}x the mean of table bytes"]
    shown = "not known here" if report.limit_bytes is None else format_bytes(report.limit_bytes)
    lines.append(f"limit per worker: {shown} ({report.limit_reason})")
    lines.append(f"copies: {'yes' if report.keeps_copies else 'no'} ({report.recovery_reason})")
    if report.traffic is not None:
        lines += ["", *traffic_lines(report.traffic), ""]
    lines += [f"note: {note}" for note in report.notes]
    if report.at_min is not None:
        smaller = report.at_min
        lines += ["", f"with as few workers as the job may have ({smaller.num_workers}):", ""]
        lines += _worker_lines(smaller)
        lines += [f"note: {note}" for note in smaller.notes if note not in report.notes]
    return "\n".join(lines)


def _worker_lines(report: PlanReport) -> list[str]:
    header = ["worker", "tables", "touched", "copies", "versions", "dense", "batches", "exchange", "process", "at most"]
    rows = [
        [
            str(rank),
            format_bytes(worker.tables_max),
            format_bytes(worker.tables_estimate) if report.sample_rows else "?",
            format_bytes(worker.copies_max),
            format_bytes(worker.versions),
            format_bytes(worker.dense),
            format_bytes(worker.batches),
            format_bytes(worker.exchange),
            format_bytes(PROCESS_BYTES),
            format_bytes(worker.total_max),
        ]
        for rank, worker in enumerate(report.workers)
    ]
    return table_lines(rows, header, right=_NUMBERS)
