"""``shoal plan``: the bytes of every table on every worker, before anything starts.

Rows take memory when they are first trained, so two figures are given: an upper bound, with every id of every table,
and an estimate from a sample of the data. A worker also holds the dense part, batches on their way and exchange
buffers. ``make_report`` is pure; ``plan_job`` builds the model, samples the data and calls it; ``plan_text`` shows it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.jobs.data_sample import DataSample
from shoal.jobs.doctor import memory_bytes
from shoal.jobs.progress import format_bytes
from shoal.kernels.errors import PlanError
from shoal.kernels.spec import ROW_DTYPE_BYTES, OptimizerKind, TableSpec
from shoal.platform.cluster_choice import choose_cluster
from shoal.platform.config import JobConfig
from shoal.platform.placement import (
    DYNAMIC_ROWS_ESTIMATE,
    ROW_METADATA_BYTES,
    ShardingType,
    TableLoad,
    plan_placement,
)

#: Part of a host's memory that is left to Ray's object store, the feed and the system when no limit is configured.
HOST_SHARE = 0.6

#: Python, torch and Ray in one worker, before any table.
PROCESS_BYTES = 400 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablePlan:
    """One table: its rows and bytes, and where they go."""

    name: str
    features: tuple[str, ...]
    num_embeddings: int
    embedding_dim: int
    data_type: str
    optimizer: str
    sharding: str
    num_blocks: int
    #: Bytes of one row: weights, optimizer state, and what the store keeps beside them.
    weight_bytes: int
    optimizer_bytes: int
    metadata_bytes: int
    #: Rows at most, and as the sample suggests; None without a sample.
    rows_max: int
    rows_estimate: int | None
    bytes_per_worker: tuple[int, ...]
    reason: str

    @property
    def row_bytes(self) -> int:
        return self.weight_bytes + self.optimizer_bytes + self.metadata_bytes

    @property
    def bytes_max(self) -> int:
        return self.rows_max * self.row_bytes

    @property
    def estimate_share(self) -> float:
        """Part of the upper bound that is expected to be touched; 1 when unknown."""
        return 1.0 if self.rows_estimate is None else self.rows_estimate / max(1, self.rows_max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """What one worker holds, in bytes."""

    tables_max: int
    tables_estimate: int
    dense: int
    batches: int
    exchange: int

    @property
    def other(self) -> int:
        """Everything but tables."""
        return self.dense + self.batches + self.exchange + PROCESS_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The whole plan."""

    job: str
    num_workers: int
    tables: tuple[TablePlan, ...]
    workers: tuple[WorkerPlan, ...]
    #: Bytes each worker may use, where the limit comes from; None when it is not known here.
    limit_bytes: int | None
    limit_reason: str
    #: Bytes of tables on the fullest worker over the mean.
    imbalance: float
    sample_rows: int
    total_rows: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        for table, plan in zip(values["tables"], self.tables):
            table |= {"row_bytes": plan.row_bytes, "bytes_max": plan.bytes_max}
        return values


def plan_job(config: JobConfig, *, use_sample: bool = True) -> PlanReport:
    """The plan of a job: builds the model without its tables, and samples the training data if there is any.

    Raises PlanError when it cannot fit, ConfigError and DataError as training would.
    """
    from shoal.jobs.data_sample import sample_dataset
    from shoal.jobs.job_tables import describe_job, features_by_table

    model, described = describe_job(config)
    sample = None
    if use_sample and config.data.train:
        from shoal.actors.dataset import scan_dataset

        schema = config.data.schema()
        dataset = scan_dataset(list(config.data.train), schema, max_bad_files=config.data.max_bad_files)
        local_rows = math.ceil(config.data.batch_size / max(1, config.scaling.max_workers))
        sample = sample_dataset(dataset, schema, batch_rows=local_rows)
    dense_parameters = sum(parameter.numel() for parameter in model.parameters())
    return make_report(
        config,
        described.tables,
        features_by_table(described),
        dense_parameters=dense_parameters,
        sample=sample,
        host_bytes=_host_bytes(config),
    )


def make_report(
    config: JobConfig,
    specs: Sequence[TableSpec],
    features: Mapping[str, Sequence[str]],
    *,
    dense_parameters: int,
    sample: DataSample | None,
    host_bytes: int | None,
) -> PlanReport:
    """The plan from values. ``features``: table -> names of the features that read it; ``host_bytes``: memory of the
    one host that all workers share, or None. Raises PlanError when a worker cannot hold its part."""
    world_size = max(1, config.scaling.max_workers)
    sharding = {
        spec.name: ShardingType.TABLE_WISE if config.tables.of(spec.name).is_table_wise else ShardingType.ROW_WISE
        for spec in specs
    }
    other = [
        _dense_bytes(config, dense_parameters),
        _batch_bytes(config, world_size, sample),
        _exchange_bytes(config, world_size, specs, features, sample),
    ]
    limit, reason = _limit(config, world_size, host_bytes)
    configured = config.scaling.memory_per_worker
    loads = plan_placement(specs, world_size, sharding=sharding, memory_bytes_per_worker=configured)
    tables = tuple(
        _table_plan(spec, load, tuple(features.get(spec.name, ())), _rows_estimate(spec, features, sample))
        for spec, load in zip(specs, loads)
    )
    workers = tuple(_worker_plan(tables, rank, *other) for rank in range(world_size))
    mean = sum(worker.tables_max for worker in workers) / world_size
    report = PlanReport(
        job=config.run.name,
        num_workers=config.scaling.max_workers,
        tables=tables,
        workers=workers,
        limit_bytes=limit,
        limit_reason=reason,
        imbalance=max(worker.tables_max for worker in workers) / mean if mean else 1.0,
        sample_rows=sample.rows if sample else 0,
        total_rows=sample.total_rows if sample else 0,
        notes=(),
    )
    _check_fits(report, is_estimate_enough=configured is None)
    return dataclasses.replace(report, notes=tuple(_notes(report, specs)))


def _table_plan(spec: TableSpec, load: TableLoad, features: tuple[str, ...], rows_estimate: int | None) -> TablePlan:
    weight_bytes = spec.embedding_dim * ROW_DTYPE_BYTES[spec.data_type]
    return TablePlan(
        name=spec.name,
        features=features,
        num_embeddings=spec.num_embeddings,
        embedding_dim=spec.embedding_dim,
        data_type=spec.data_type.value.lower(),
        optimizer=OptimizerKind(spec.optimizer.kind).name.lower(),
        sharding=load.sharding.value,
        num_blocks=spec.num_blocks,
        weight_bytes=weight_bytes,
        optimizer_bytes=spec.row_bytes - weight_bytes,
        metadata_bytes=ROW_METADATA_BYTES,
        rows_max=spec.num_embeddings or max(rows_estimate or 0, DYNAMIC_ROWS_ESTIMATE),
        rows_estimate=rows_estimate,
        bytes_per_worker=load.bytes_per_worker,
        reason=load.reason,
    )


def _worker_plan(tables: Sequence[TablePlan], rank: int, dense: int, batches: int, exchange: int) -> WorkerPlan:
    return WorkerPlan(
        tables_max=sum(table.bytes_per_worker[rank] for table in tables),
        tables_estimate=sum(round(table.bytes_per_worker[rank] * table.estimate_share) for table in tables),
        dense=dense,
        batches=batches,
        exchange=exchange,
    )


def _rows_estimate(spec: TableSpec, features: Mapping[str, Sequence[str]], sample: DataSample | None) -> int | None:
    """Rows that training will touch: the distinct ids of the features that read the table, at most all of them."""
    names = features.get(spec.name, ())
    if sample is None or any(name not in sample.features for name in names):
        return None
    total = sum(sample.features[name].unique_of(sample.total_rows, sample.rows) for name in names)
    return min(total, spec.num_embeddings) if spec.num_embeddings else total


def _dense_bytes(config: JobConfig, num_parameters: int) -> int:
    """Parameters, gradients, the flat reduction buffer, and the optimizer's state."""
    num_slots = {"sgd": 1 if config.train.dense_optimizer.momentum else 0, "adagrad": 1, "adam": 2, "adamw": 2}
    return 4 * num_parameters * (3 + num_slots[config.train.dense_optimizer.kind])


def _batch_bytes(config: JobConfig, world_size: int, sample: DataSample | None) -> int:
    """Batches a worker holds: those prepared ahead, the one in use, and the lanes of two windows they are cut from."""
    ids = sum(
        sample.features[feature.name].ids_per_row if sample and feature.name in sample.features else 1.0
        for feature in config.data.sparse
    )
    weighted = any(feature.weights_column for feature in config.data.sparse)
    row_bytes = ids * (12 if weighted else 8) + 8 * len(config.data.sparse) + 4 * len(config.data.dense) + 8
    rows = config.data.batch_size / world_size * (config.data.prefetch_batches + 2)
    windows = 2 * min(config.data.window_rows, sample.total_rows if sample else config.data.window_rows) / world_size
    return round((rows + windows) * row_bytes)


def _exchange_bytes(
    config: JobConfig,
    world_size: int,
    specs: Sequence[TableSpec],
    features: Mapping[str, Sequence[str]],
    sample: DataSample | None,
) -> int:
    """Send and receive buffers, two of each: ids and float32 rows of one step's distinct ids that live elsewhere."""
    local_rows = math.ceil(config.data.batch_size / world_size)
    total = 0
    for spec in specs:
        for name in features.get(spec.name, ()):
            is_sampled = sample is not None and name in sample.features
            unique = sample.features[name].unique_per_batch if sample and is_sampled else local_rows
            total += unique * (8 + 4 * spec.embedding_dim)
    return round(4 * total * (world_size - 1) / world_size)


def _limit(config: JobConfig, world_size: int, host_bytes: int | None) -> tuple[int | None, str]:
    if config.scaling.memory_per_worker is not None:
        return config.scaling.memory_per_worker, "scaling.memory_per_worker"
    if host_bytes is None:
        return None, "set scaling.memory_per_worker to check against the cluster's nodes"
    share = int(host_bytes * HOST_SHARE / world_size)
    return share, f"{HOST_SHARE:.0%} of this host's {format_bytes(host_bytes)}, shared by {world_size} workers"


def _check_fits(report: PlanReport, *, is_estimate_enough: bool) -> None:
    """Raise PlanError when a worker cannot hold its part: the largest table, bytes needed and free, and the options.

    Against a configured limit the upper bound counts, as it does when training starts; against this host's memory the
    estimate, where there is one, because untouched rows take none.
    """
    if report.limit_bytes is None:
        return
    use_estimate = is_estimate_enough and report.sample_rows > 0

    def needed(worker: WorkerPlan) -> int:
        return worker.other + (worker.tables_estimate if use_estimate else worker.tables_max)

    full = [rank for rank, worker in enumerate(report.workers) if needed(worker) > report.limit_bytes]
    if not full:
        return
    rank = max(full, key=lambda rank: needed(report.workers[rank]))
    table = max(report.tables, key=lambda table: table.bytes_per_worker[rank] * table.estimate_share)
    total = sum(needed(worker) for worker in report.workers)
    free = ", ".join(
        f"worker {rank}: {format_bytes(max(0, report.limit_bytes - worker.other))}"
        for rank, worker in enumerate(report.workers)
    )
    raise PlanError(
        f"table {table.name!r} does not fit: worker {rank} needs {format_bytes(needed(report.workers[rank]))} "
        f"({format_bytes(table.bytes_per_worker[rank])} of it for this table), all workers {format_bytes(total)}; "
        f"free for tables per worker: {free} ({report.limit_reason}). {_options(report, table)}"
    )


def _options(report: PlanReport, table: TablePlan) -> str:
    options = [f"add workers (now {report.num_workers})", "raise scaling.memory_per_worker or use larger nodes"]
    where = f"tables.overrides.{table.name}"
    if table.sharding == "table_wise":
        options.append(f"set {where}.sharding_type to row_wise")
    if table.data_type == "fp32":
        options.append(
            f"set {where}.data_type to bf16 (saves {format_bytes(table.rows_max * 2 * table.embedding_dim)})"
        )
    if table.optimizer in ("adam", "adagrad"):
        saved = table.rows_max * (table.optimizer_bytes - 4)
        options.append(f"use rowwise_adagrad for it (saves {format_bytes(saved)})")
    if table.num_embeddings:
        options.append(f"lower {where}.num_embeddings with id_policy hash")
    return "Options: " + "; ".join(options)


def _notes(report: PlanReport, specs: Sequence[TableSpec]) -> list[str]:
    notes = []
    largest = max(worker.tables_max + worker.other for worker in report.workers)
    if report.limit_bytes is not None and largest > report.limit_bytes:
        notes.append("it fits as long as the touched rows stay near the estimate; with every id it would not")
    if report.sample_rows:
        notes.append(f"touched rows are extrapolated from {report.sample_rows:,} of {report.total_rows:,} rows")
    if any(spec.num_embeddings == 0 for spec in specs):
        notes.append(f"dynamic tables are planned with at least {DYNAMIC_ROWS_ESTIMATE:,} rows")
    touched = max(worker.tables_estimate for worker in report.workers)
    notes.append(
        f"while a checkpoint is written, old versions of changed rows take at most {format_bytes(touched)} more"
    )
    if report.imbalance > 1.2 and report.num_workers > 1:
        notes.append("table bytes are uneven; row_wise tables with more blocks spread better")
    return notes


def _host_bytes(config: JobConfig) -> int | None:
    """Memory of this host when all workers run on it; None for a cluster elsewhere."""
    choice = choose_cluster(config.scaling.address, os.environ)
    return memory_bytes()[0] if choice.is_local or config.scaling.max_workers == 0 else None
