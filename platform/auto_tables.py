"""From a job's tables and a sample of its data to a plan, and to settings without ``auto``. Pure.

What ``auto`` becomes is written into the configuration, and so into the run's config.yaml: ``shoal resume`` keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.kernels.column_blocks import logical_table, logical_tables
from shoal.kernels.spec import FeatureSpec, PoolingType, TableSpec
from shoal.platform.config import JobConfig
from shoal.platform.costs import Flow, TableProfile
from shoal.platform.data_sample import DataSample
from shoal.platform.plan import Plan
from shoal.platform.planner import Constraint, plan_tables
from shoal.platform.topology import Topology, uniform_hosts


def job_topology(config: JobConfig, world_size: int, *, is_one_host: bool) -> Topology:
    """The workers that a job is planned for: on one host, or ``tables.planner.workers_per_host`` on each."""
    planner = config.tables.planner
    per_host = planner.workers_per_host or (world_size if is_one_host else 1)
    return Topology(
        hosts=uniform_hosts(world_size, per_host),
        memory_bytes_per_s=float(planner.memory_bytes_per_s),
        local_bytes_per_s=float(planner.local_bytes_per_s),
        network_bytes_per_s=float(planner.network_bytes_per_s),
        memory_bytes_per_worker=config.scaling.memory_per_worker,
    )


def job_constraints(
    config: JobConfig, tables: Sequence[TableSpec], features: Sequence[FeatureSpec]
) -> dict[str, Constraint]:
    """By logical table: what its settings leave to the planner.

    With flow auto a table that a weighted feature reads stays with rows: its weights may be learned, which needs them.
    """
    constraints = {}
    weighted = {tables[feature.table].logical_name for feature in features if feature.is_weighted}
    for name, blocks in logical_tables(tables).items():
        table = config.tables.of(name)
        is_auto = table.sharding_type == "auto"
        constraints[name] = Constraint(
            sharding_types=None if is_auto else (table.placement,),
            column_blocks=table.column_blocks,
            num_row_blocks=table.num_blocks if is_auto else blocks[0].num_blocks,
            flow=_open_flow(table.flow, is_weighted=name in weighted),
            placement_exact=table.placement_exact is not False,
            values_codec=table.values_codec or "fp32",
            gradients_codec=table.gradients_codec or "fp32",
            has_own_statistic=table.optimizer_scope == "shard",
        )
    return constraints


def _open_flow(flow: str | None, *, is_weighted: bool) -> Flow | None:
    """The flow that settings name; None: the planner's choice."""
    if flow == "auto":
        return "rows" if is_weighted else None
    return "pooled" if flow == "pooled" else "rows"


def table_profiles(
    tables: Sequence[TableSpec], features: Sequence[FeatureSpec], sample: DataSample | None, batch_rows: int
) -> dict[str, TableProfile] | None:
    """By logical table: its use by one rank's ``batch_rows`` samples; None without a sample.

    Distinct ids of several features of a table are added up, as if they had none in common.
    """
    if sample is None:
        return None
    profiles = {name: TableProfile(num_unique=0, num_ids=0, num_bags=0) for name in logical_tables(tables)}
    for feature in features:
        table = tables[feature.table]
        found = sample.features.get(feature.name)
        if found is None or table.first_column > 0:
            continue
        num_ids = found.ids_per_row * batch_rows
        before = profiles[table.logical_name]
        is_sequence = feature.pooling is PoolingType.NONE
        num_unique = before.num_unique + found.unique_per_batch
        # The mean over features, by what each adds.
        growth = (before.growth * before.num_unique + found.growth * found.unique_per_batch) / max(1, num_unique)
        profiles[table.logical_name] = TableProfile(
            num_unique=min(num_unique, table.num_embeddings or num_unique),
            num_ids=before.num_ids + num_ids,
            num_bags=before.num_bags + (num_ids if is_sequence else min(num_ids, batch_rows)),
            is_weighted=before.is_weighted or feature.is_weighted,
            needs_rows=before.needs_rows or is_sequence,
            growth=growth,
        )
    return profiles


def plan_job_tables(
    config: JobConfig,
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec],
    sample: DataSample | None,
    topology: Topology,
) -> Plan:
    """The plan of a job's tables. Raises PlanError, ConfigError."""
    batch_rows = math.ceil(config.data.batch_size / topology.world_size)
    return plan_tables(
        [logical_table(blocks[0]) for blocks in logical_tables(tables).values()],
        topology,
        constraints=job_constraints(config, tables, features),
        profiles=table_profiles(tables, features, sample, batch_rows),
        flows=("rows", "pooled"),
    )


def resolve_auto(config: JobConfig, plan: Plan) -> JobConfig:
    """The configuration with the plan's choices in place of ``auto``, and its loads where they are known."""
    overrides = dict(config.tables.overrides)
    total_load = sum(sum(table.block_loads) for table in plan.tables) or 1.0
    total_bytes = sum(sum(table.block_bytes) for table in plan.tables) or 1
    for planned in plan.tables:
        table = config.tables.of(planned.table)
        changes: dict[str, object] = {}
        if table.sharding_type == "auto":
            changes = {"sharding_type": planned.sharding.value, "num_blocks": planned.num_row_blocks}
            if len(planned.column_widths) > 1 or planned.sharding.cuts_columns:
                changes["column_blocks"] = len(planned.column_widths)
        if table.flow == "auto":
            changes["flow"] = planned.flow
        if plan.is_profiled and table.load_factor is None and sum(planned.block_bytes):
            busy = sum(planned.block_loads) / total_load / (sum(planned.block_bytes) / total_bytes)
            changes["load_factor"] = float(f"{max(busy, 1e-9):.4g}")
        if changes:
            overrides[planned.table] = overrides.get(planned.table, type(table)()).replace(**changes)
    return config.replace(tables=config.tables.replace(overrides=overrides))


def has_auto(config: JobConfig) -> bool:
    """Whether any table's sharding or flow is left to the planner."""
    tables = (config.tables.defaults, *config.tables.overrides.values())
    return any("auto" in (table.sharding_type, table.flow) for table in tables)
