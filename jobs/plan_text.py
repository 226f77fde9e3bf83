"""A plan as text for the console. Pure."""

from __future__ import annotations

from shoal.jobs.cli_options import table_lines
from shoal.jobs.plan_report import PROCESS_BYTES, PlanReport
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
    header = ["worker", "tables", "touched", "dense", "batches", "exchange", "process", "total at most"]
    rows = [
        [
            str(rank),
            format_bytes(worker.tables_max),
            format_bytes(worker.tables_estimate) if report.sample_rows else "?",
            format_bytes(worker.dense),
            format_bytes(worker.batches),
            format_bytes(worker.exchange),
            format_bytes(PROCESS_BYTES),
            format_bytes(worker.tables_max + worker.other),
        ]
        for rank, worker in enumerate(report.workers)
    ]
    lines += table_lines(rows, header, right=_NUMBERS)
    lines += ["", f"imbalance: the fullest worker holds {report.imbalance:.2f}x the mean of table bytes"]
    shown = "not known here" if report.limit_bytes is None else format_bytes(report.limit_bytes)
    lines.append(f"limit per worker: {shown} ({report.limit_reason})")
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(lines)
