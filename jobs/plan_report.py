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

from shoal.jobs.doctor import memory_bytes
from shoal.jobs.plan_advice import flow_notes
from shoal.jobs.plan_bytes import (
    batch_bytes,
    copies_held,
    dense_bytes,
    exchange_bytes,
    snapshot_bytes,
    version_bytes,
)
from shoal.jobs.plan_traffic import Traffic, make_traffic
from shoal.jobs.progress import format_bytes
from shoal.kernels.errors import PlanError
from shoal.kernels.spec import ROW_DTYPE_BYTES, OptimizerKind, TableSpec
from shoal.platform.auto_tables import has_auto, job_topology, plan_job_tables, resolve_auto, table_profiles
from shoal.platform.cluster_choice import choose_cluster
from shoal.platform.config import JobConfig
from shoal.platform.data_sample import DataSample
from shoal.platform.job import LoadOf
from shoal.platform.placement import (
    DYNAMIC_ROWS_ESTIMATE,
    ROW_METADATA_BYTES,
    TableLoad,
    plan_placement,
)

#: Part of a host's memory that is left to Ray's object store, the feed and the system when no limit is configured.
HOST_SHARE = 0.6

#: Python, torch and Ray in one worker, before any table.
PROCESS_BYTES = 400 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablePlan:
    """One table, or one column block of it: its rows and bytes, and where they go."""

    name: str
    #: The table that this is a column block of, from column ``first_column`` on; its own name where it is not cut.
    logical_name: str
    first_column: int
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
    #: Copies of the rows of another worker.
    copies_max: int
    copies_estimate: int
    #: Older versions of rows that changed since the last snapshots, and changes staged for another worker.
    versions: int
    dense: int
    batches: int
    exchange: int

    @property
    def other(self) -> int:
        """Everything but rows and their copies."""
        return self.versions + self.dense + self.batches + self.exchange + PROCESS_BYTES

    @property
    def total_max(self) -> int:
        """All of it, with every id touched."""
        return self.tables_max + self.copies_max + self.other

    @property
    def total_estimate(self) -> int:
        """All of it, with as many ids touched as the sample suggests."""
        return self.tables_estimate + self.copies_estimate + self.other


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
    #: How rows travel between workers, and what a host is.
    exchange: str
    hosts: str
    #: Whether workers keep copies for each other, and why or why not.
    keeps_copies: bool
    recovery_reason: str
    notes: tuple[str, ...]
    #: Of an elastic job: the plan with as few workers as it may have, when each holds the most.
    at_min: PlanReport | None = None
    #: What is expected of every step; None without a sample.
    traffic: Traffic | None = None

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(dataclasses.replace(self, traffic=None))
        values["traffic"] = self.traffic.to_dict() if self.traffic is not None else None
        for table, plan in zip(values["tables"], self.tables):
            table |= {"row_bytes": plan.row_bytes, "bytes_max": plan.bytes_max}
        values["at_min"] = self.at_min.to_dict() if self.at_min is not None else None
        return values


def plan_job(config: JobConfig, *, use_sample: bool = True) -> PlanReport:
    """The plan of a job: builds the model without its tables, and samples the training data if there is any.

    Raises PlanError when it cannot fit, ConfigError and DataError as training would.
    """
    from shoal.jobs.job_tables import describe_job, features_by_table
    from shoal.platform.data_sample import sample_dataset

    model, described = describe_job(config)
    sample = None
    if use_sample and config.data.train:
        from shoal.actors.dataset import scan_dataset

        schema = config.data.schema()
        dataset = scan_dataset(list(config.data.train), schema, max_bad_files=config.data.max_bad_files)
        local_rows = math.ceil(config.data.batch_size / max(1, config.scaling.max_workers))
        sample = sample_dataset(dataset, schema, batch_rows=local_rows)
    host_bytes = _host_bytes(config)
    world_size = max(1, config.scaling.max_workers)
    topology = job_topology(config, world_size, is_one_host=host_bytes is not None)
    plan = plan_job_tables(config, described.tables, described.features, sample, topology)
    if has_auto(config):
        config = resolve_auto(config, plan)
        model, described = describe_job(config)
    report = make_report(
        config,
        described.tables,
        features_by_table(described),
        dense_parameters=sum(parameter.numel() for parameter in model.parameters()),
        sample=sample,
        host_bytes=host_bytes,
    )
    profiles = table_profiles(
        described.tables, described.features, sample, math.ceil(config.data.batch_size / world_size)
    )
    traffic = make_traffic(plan, described.tables, topology, profiles)
    return dataclasses.replace(report, traffic=traffic, notes=(*report.notes, *flow_notes(config)))


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
    scaling = config.scaling
    sizes = [scaling.max_workers, scaling.min_workers] if scaling.is_elastic else [scaling.max_workers]
    reports = [
        _report_at(
            config, size, specs, features, dense_parameters=dense_parameters, sample=sample, host_bytes=host_bytes
        )
        for size in sizes
    ]
    return dataclasses.replace(reports[0], at_min=reports[1] if scaling.is_elastic else None)


def _report_at(
    config: JobConfig,
    num_workers: int,
    specs: Sequence[TableSpec],
    features: Mapping[str, Sequence[str]],
    *,
    dense_parameters: int,
    sample: DataSample | None,
    host_bytes: int | None,
) -> PlanReport:
    """The plan with exactly ``num_workers`` workers (0: this process)."""
    world_size = max(1, num_workers)
    sharding = {spec.name: config.tables.of(spec.logical_name).placement for spec in specs}
    weigh = LoadOf(config)
    limit, reason = _limit(config, world_size, host_bytes)
    configured = config.scaling.memory_per_worker
    loads = plan_placement(
        specs,
        world_size,
        sharding=sharding,
        hosts=job_topology(config, world_size, is_one_host=host_bytes is not None).hosts,
        loads={spec.name: weigh(spec) for spec in specs},
        memory_bytes_per_worker=configured,
    )
    tables = tuple(
        _table_plan(spec, load, tuple(features.get(spec.name, ())), _rows_estimate(spec, features, sample))
        for spec, load in zip(specs, loads)
    )
    keeps_copies, recovery_reason = _copies(config, world_size, host_bytes)
    changed = (
        snapshot_bytes(config, specs, features, sample) if keeps_copies or _is_partial(config, num_workers) else {}
    )
    common = {
        "dense": dense_bytes(config, dense_parameters),
        "batches": batch_bytes(config, world_size, sample),
        "exchange": exchange_bytes(config, world_size, specs, features, sample),
    }
    workers = _worker_plans(config, tables, world_size, changed, keeps_copies, common)
    mean = sum(worker.tables_max for worker in workers) / world_size
    report = PlanReport(
        job=config.run.name,
        num_workers=num_workers,
        tables=tables,
        workers=workers,
        limit_bytes=limit,
        limit_reason=reason,
        imbalance=max(worker.tables_max for worker in workers) / mean if mean else 1.0,
        sample_rows=sample.rows if sample else 0,
        total_rows=sample.total_rows if sample else 0,
        exchange="flat" if config.scaling.exchange == "auto" else config.scaling.exchange,
        hosts=config.scaling.hosts,
        keeps_copies=keeps_copies,
        recovery_reason=recovery_reason,
        notes=(),
    )
    _check_fits(report, is_estimate_enough=configured is None)
    return dataclasses.replace(report, notes=tuple(_notes(report, specs)))


def _table_plan(spec: TableSpec, load: TableLoad, features: tuple[str, ...], rows_estimate: int | None) -> TablePlan:
    weight_bytes = spec.embedding_dim * ROW_DTYPE_BYTES[spec.data_type]
    return TablePlan(
        name=spec.name,
        logical_name=spec.logical_name,
        first_column=spec.first_column,
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


def _worker_plans(
    config: JobConfig,
    tables: Sequence[TablePlan],
    world_size: int,
    changed: Mapping[str, int],
    keeps_copies: bool,
    common: Mapping[str, int],
) -> tuple[WorkerPlan, ...]:
    """Every worker's rows, copies and versions; ``common`` holds what is the same for all."""
    ranks = range(world_size)
    rows_max = [sum(table.bytes_per_worker[rank] for table in tables) for rank in ranks]
    rows_estimate = [
        sum(round(table.bytes_per_worker[rank] * table.estimate_share) for table in tables) for rank in ranks
    ]
    parts = [
        {t.name: t.bytes_per_worker[rank] / t.bytes_max for t in tables if t.name in changed and t.bytes_max}
        for rank in ranks
    ]
    copies_max = copies_held(rows_max, keeps_copies=keeps_copies)
    copies_estimate = copies_held(rows_estimate, keeps_copies=keeps_copies)
    versions = version_bytes(config, parts, changed, keeps_copies=keeps_copies)
    return tuple(
        WorkerPlan(
            tables_max=rows_max[rank],
            tables_estimate=rows_estimate[rank],
            copies_max=copies_max[rank],
            copies_estimate=copies_estimate[rank],
            versions=versions[rank],
            **common,
        )
        for rank in ranks
    )


def _copies(config: JobConfig, world_size: int, host_bytes: int | None) -> tuple[bool, str]:
    """Whether workers keep copies for each other. How many hosts a cluster elsewhere has is not known here."""
    recovery = config.run.failure.recovery
    if world_size == 1:
        return False, "a single worker has nobody to keep copies"
    if recovery != "auto":
        return recovery == "replicated", f"run.failure.recovery is {recovery}"
    if host_bytes is not None:
        return False, "run.failure.recovery auto keeps copies with two hosts or more, and this is one"
    return True, "run.failure.recovery auto keeps copies with two hosts or more, which is assumed"


def _is_partial(config: JobConfig, num_workers: int) -> bool:
    """Whether snapshots are taken without copies."""
    return config.run.failure.recovery == "partial" and num_workers > 1


def _rows_estimate(spec: TableSpec, features: Mapping[str, Sequence[str]], sample: DataSample | None) -> int | None:
    """Rows that training will touch: the distinct ids of the features that read the table, at most all of them."""
    names = features.get(spec.name, ())
    if sample is None or any(name not in sample.features for name in names):
        return None
    total = sum(sample.features[name].unique_of(sample.total_rows, sample.rows) for name in names)
    return min(total, spec.num_embeddings) if spec.num_embeddings else total


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
        return worker.total_estimate if use_estimate else worker.total_max

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
        f"({format_bytes(table.bytes_per_worker[rank])} of it for this table), all {report.num_workers} workers "
        f"{format_bytes(total)}; "
        f"free for tables per worker: {free} ({report.limit_reason}). {_options(report, table)}"
    )


def _options(report: PlanReport, table: TablePlan) -> str:
    options = [f"add workers (now {report.num_workers})", "raise scaling.memory_per_worker or use larger nodes"]
    where = f"tables.overrides.{table.name}"
    if report.keeps_copies:
        options.append("set run.failure.recovery to checkpoint, which keeps no copies")
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
    largest = max(worker.total_max for worker in report.workers)
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
    if report.keeps_copies:
        notes.append("versions are for snapshots every run.failure.protect_every_steps; fewer steps need less")
    if report.imbalance > 1.2 and report.num_workers > 1:
        notes.append("table bytes are uneven; row_wise tables with more blocks spread better")
    return notes


def _host_bytes(config: JobConfig) -> int | None:
    """Memory of this host when all workers run on it; None for a cluster elsewhere."""
    choice = choose_cluster(config.scaling.address, os.environ)
    return memory_bytes()[0] if choice.is_local or config.scaling.max_workers == 0 else None
