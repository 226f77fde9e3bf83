"""The four public greedy planners, as named baselines: whole tables, largest cost first, to the least loaded worker.

Costs as in the AutoShard, DreamShard and NeuroShard papers: ``dim``, ``size`` (rows * dim), ``lookup`` (dim * pooling)
and ``size_lookup`` (dim * pooling * log10 rows). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from shoal.kernels.errors import PlanError
from shoal.kernels.spec import TableSpec
from shoal.platform.costs import TableProfile
from shoal.platform.placement import DYNAMIC_ROWS_ESTIMATE, table_bytes
from shoal.platform.plan import Plan
from shoal.platform.planner import plan_whole_tables
from shoal.platform.topology import Topology


def _rows(spec: TableSpec) -> int:
    return spec.num_embeddings or DYNAMIC_ROWS_ESTIMATE


BASELINES: Mapping[str, Callable[[TableSpec, TableProfile], float]] = {
    "dim": lambda spec, profile: float(spec.embedding_dim),
    "size": lambda spec, profile: float(_rows(spec) * spec.embedding_dim),
    "lookup": lambda spec, profile: spec.embedding_dim * profile.pooling,
    "size_lookup": lambda spec, profile: spec.embedding_dim * profile.pooling * math.log10(max(_rows(spec), 10)),
}


def plan_baseline(
    name: str, specs: Sequence[TableSpec], topology: Topology, profiles: Mapping[str, TableProfile]
) -> Plan:
    """The plan of one of the ``BASELINES``, with loads by our measure. Raises PlanError."""
    owners = greedy_owners(name, specs, profiles, topology.world_size, topology.memory_bytes_per_worker)
    return plan_whole_tables(specs, topology, owners, profiles)


def greedy_owners(
    name: str,
    specs: Sequence[TableSpec],
    profiles: Mapping[str, TableProfile],
    world_size: int,
    memory_bytes_per_worker: int | None = None,
) -> dict[str, int]:
    """Table -> worker by one of the ``BASELINES``: into the least loaded worker that still has room.

    Raises PlanError naming the table that fits nowhere, its bytes and the bytes free.
    """
    cost = {spec.name: BASELINES[name](spec, profiles[spec.name]) for spec in specs}
    load, used = [0.0] * world_size, [0] * world_size
    owners: dict[str, int] = {}
    for spec in sorted(specs, key=lambda spec: (-cost[spec.name], spec.name)):
        size = table_bytes(spec)
        limit = memory_bytes_per_worker
        able = [rank for rank in range(world_size) if limit is None or used[rank] + size <= limit]
        if not able:
            free = max((limit or 0) - bytes_used for bytes_used in used)
            raise PlanError(f"table {spec.name!r} does not fit: it needs {size} bytes, at most {free} are free")
        rank = min(able, key=lambda rank: (load[rank], rank))
        owners[spec.name] = rank
        load[rank] += cost[spec.name]
        used[rank] += size
    return owners
