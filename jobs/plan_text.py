"""A plan as text for the console. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.jobs.cli_options import table_lines
from shoal.jobs.plan_report import PROCESS_BYTES, PlanReport, TablePlan
from shoal.jobs.plan_traffic import traffic_lines
from shoal.jobs.progress import format_bytes

#: All columns but the first hold numbers or read like them.
_NUMBERS = frozenset(range(1, 16))


def format_report(report: PlanReport) -> str:
    """The plan as text."""
    groups = _by_logical_table(report.tables)
    lines = [f"plan of {report.job}: {report.num_workers} workers, {len(groups)} tables", ""]
    header = ["table", "rows", "touched", "dim", "type", "optimizer", "row", "bytes", "touched", "sharding"]
    rows = []
    for name, blocks in groups.items():
        rows.append(_table_row(name, blocks))
        if len(blocks) > 1:
            rows += [_block_row(block) for block in blocks]
    lines += table_lines(rows, header, right=_NUMBERS)
    lines += ["", "(row: weights + optimizer + metadata; touched: estimated from a sample, bytes: with every id)", ""]
    lines += _worker_lines(report)
    lines += ["", f"imbalance: the fullest worker holds {report.imbalance:.2f}x the mean of table bytes"]
    shown = "not known here" if report.limit_bytes is None else format_bytes(report.limit_bytes)
    lines.append(f"limit per worker: {shown} ({report.limit_reason})")
    lines.append(f"exchange: {report.exchange}; hosts: {report.hosts}")
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


def _by_logical_table(tables: Sequence[TablePlan]) -> dict[str, list[TablePlan]]:
    groups: dict[str, list[TablePlan]] = {}
    for table in tables:
        groups.setdefault(table.logical_name, []).append(table)
    return groups


def _table_row(name: str, blocks: Sequence[TablePlan]) -> list[str]:
    """A table's line: all its column blocks together."""
    first = blocks[0]
    sharding = f"{first.sharding}/{first.num_blocks}"
    weights, optimizer, metadata = (
        sum(sizes) for sizes in zip(*((b.weight_bytes, b.optimizer_bytes, b.metadata_bytes) for b in blocks))
    )
    return [
        name,
        f"{first.rows_max:,}" if first.num_embeddings else "dynamic",
        "?" if first.rows_estimate is None else f"{first.rows_estimate:,}",
        str(sum(block.embedding_dim for block in blocks)),
        first.data_type,
        first.optimizer,
        f"{weights}+{optimizer}+{metadata} B",
        format_bytes(sum(block.bytes_max for block in blocks)),
        _touched(blocks),
        sharding if len(blocks) == 1 else f"{sharding} x {len(blocks)}",
    ]


def _block_row(block: TablePlan) -> list[str]:
    last = block.first_column + block.embedding_dim - 1
    return [
        f"  columns {block.first_column}-{last}",
        *("", "", str(block.embedding_dim), "", ""),
        f"{block.weight_bytes}+{block.optimizer_bytes}+{block.metadata_bytes} B",
        format_bytes(block.bytes_max),
        _touched([block]),
        f"{block.sharding}/{block.num_blocks}",
    ]


def _touched(blocks: Sequence[TablePlan]) -> str:
    if any(block.rows_estimate is None for block in blocks):
        return "?"
    return format_bytes(sum((block.rows_estimate or 0) * block.row_bytes for block in blocks))


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
