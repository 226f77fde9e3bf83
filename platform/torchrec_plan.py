"""TorchRec's ShardingPlan, both ways: as plain dictionaries, and as its own objects where torchrec is installed.

The plain form has the names of ``torchrec/distributed/types.py``: module path -> table -> {sharding_type,
compute_kernel, ranks, sharding_spec: {shards: [{shard_offsets, shard_sizes, placement}]}}.

What a plan of theirs says of types and column cuts becomes settings of tables; its ranks do not: which worker owns what
is placement's decision in every view, for workers come and go. Our row blocks are ranges of hashed ids and more than
workers, so an exported row-wise table shows TorchRec's own equal cut over the ranks that hold some of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.kernels.column_blocks import column_widths
from shoal.kernels.errors import ConfigError
from shoal.kernels.spec import TableSpec
from shoal.platform.config_train import TableConfig
from shoal.platform.plan import Plan, PlannedTable
from shoal.platform.sharding import ShardingType

PlainPlan = dict[str, dict[str, dict[str, Any]]]


def read_torchrec_plan(plan: Any) -> PlainPlan:
    """A ShardingPlan, or its plain form, in the plain form. Raises ConfigError for anything else."""
    modules = getattr(plan, "plan", plan)
    if not isinstance(modules, Mapping):
        raise ConfigError(f"{type(plan).__name__} is no TorchRec ShardingPlan: it has no mapping 'plan'")
    return {
        path: {table: _plain_sharding(table, sharding) for table, sharding in tables.items()}
        for path, tables in modules.items()
    }


def tables_from_torchrec(plan: Any, specs: Sequence[TableSpec]) -> dict[str, TableConfig]:
    """Settings for ``tables.overrides`` that cut tables as a TorchRec plan does.

    Args:
        plan: a ShardingPlan or its plain form.
        specs: the logical tables of the model.

    Raises ConfigError naming the table: not in the model, in the plan twice, of an unknown type, or cut into columns in
    a way that ``column_blocks`` cannot express.
    """
    known = {spec.name: spec for spec in specs}
    settings: dict[str, TableConfig] = {}
    for tables in read_torchrec_plan(plan).values():
        for name, sharding in tables.items():
            if name not in known:
                raise ConfigError(f"the plan shards table {name!r}, which the model does not have")
            if name in settings:
                raise ConfigError(f"the plan shards table {name!r} in two modules")
            settings[name] = _settings(known[name], sharding)
    return settings


def torchrec_plan(
    plan: Plan, specs: Sequence[TableSpec], *, modules: Mapping[str, str] | None = None, device: str = "cpu"
) -> PlainPlan:
    """Our plan in TorchRec's plain form.

    Args:
        specs: the logical tables of the plan; dynamic ones have no TorchRec counterpart and are refused (ConfigError).
        modules: table -> path of the module that holds it; "" (the root) where absent.
        device: ``cpu``, or ``cuda``: rank r then has device ``cuda:r`` modulo its host's number of ranks.
    """
    known = {spec.name: spec for spec in specs}
    found: PlainPlan = {}
    for table in plan.tables:
        spec = known[table.table]
        if not spec.is_static:
            raise ConfigError(f"table {spec.name!r} is dynamic; a TorchRec plan needs num_embeddings")
        found.setdefault((modules or {}).get(spec.name, ""), {})[spec.name] = _export(table, spec, plan, device)
    return found


def to_torchrec(plain: PlainPlan) -> Any:
    """The plain form as a ``torchrec.distributed.types.ShardingPlan``. Raises ImportError without torchrec."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

    def parameter(sharding: Mapping[str, Any]) -> Any:
        spec = sharding["sharding_spec"]
        shards = None if spec is None else EnumerableShardingSpec([ShardMetadata(**shard) for shard in spec["shards"]])
        return ParameterSharding(
            sharding_type=sharding["sharding_type"],
            compute_kernel=sharding["compute_kernel"],
            ranks=sharding["ranks"],
            sharding_spec=shards,
        )

    return ShardingPlan(
        {
            path: EmbeddingModuleShardingPlan({name: parameter(sharding) for name, sharding in tables.items()})
            for path, tables in plain.items()
        }
    )


def _plain_sharding(table: str, sharding: Any) -> dict[str, Any]:
    def read(name: str) -> Any:
        return sharding.get(name) if isinstance(sharding, Mapping) else getattr(sharding, name, None)

    if not isinstance(read("sharding_type"), str):
        raise ConfigError(f"table {table!r}: its TorchRec sharding names no sharding_type")
    spec = read("sharding_spec")
    shards = spec.get("shards") if isinstance(spec, Mapping) else getattr(spec, "shards", None)
    return {
        "sharding_type": read("sharding_type"),
        "compute_kernel": read("compute_kernel") or "fused",
        "ranks": None if read("ranks") is None else [int(rank) for rank in read("ranks")],
        "sharding_spec": None if shards is None else {"shards": [_plain_shard(shard) for shard in shards]},
    }


def _plain_shard(shard: Any) -> dict[str, Any]:
    names = ("shard_offsets", "shard_sizes", "placement")
    values = shard if isinstance(shard, Mapping) else {name: getattr(shard, name, None) for name in names}
    return {
        "shard_offsets": [int(offset) for offset in values["shard_offsets"]],
        "shard_sizes": [int(size) for size in values["shard_sizes"]],
        "placement": None if values.get("placement") is None else str(values["placement"]),
    }


def _settings(spec: TableSpec, sharding: Mapping[str, Any]) -> TableConfig:
    try:
        kind = ShardingType(sharding["sharding_type"])
    except ValueError:
        known = ", ".join(kind.value for kind in ShardingType)
        raise ConfigError(
            f"table {spec.name!r}: sharding type {sharding['sharding_type']!r} is unknown; known are {known}"
        ) from None
    widths = _column_widths(sharding)
    if not kind.cuts_columns or not widths:
        return TableConfig(sharding_type=kind.value)  # type: ignore[arg-type]
    ours = column_widths(spec.embedding_dim, len(widths), table=spec.name)
    if widths != ours:
        raise ConfigError(
            f"table {spec.name!r}: the plan cuts its columns into {list(widths)}; column_blocks cuts them into "
            f"{list(ours)}. Use blocks of equal width"
        )
    return TableConfig(sharding_type=kind.value, column_blocks=len(widths))  # type: ignore[arg-type]


def _column_widths(sharding: Mapping[str, Any]) -> tuple[int, ...]:
    """Widths of the column blocks in column order; none where the plan does not say."""
    spec = sharding["sharding_spec"]
    by_offset = {} if spec is None else {s["shard_offsets"][1]: s["shard_sizes"][1] for s in spec["shards"]}
    return tuple(by_offset[offset] for offset in sorted(by_offset))


def _export(table: PlannedTable, spec: TableSpec, plan: Plan, device: str) -> dict[str, Any]:
    if table.sharding is ShardingType.DATA_PARALLEL:
        everybody = list(range(plan.world_size))
        return {"sharding_type": "data_parallel", "compute_kernel": "dense", "ranks": everybody, "sharding_spec": None}
    shards: list[dict[str, Any]] = []
    ranks: list[int] = []
    column = 0
    for width, owners in zip(table.column_widths, table.owners):
        holders = sorted(set(owners))
        if table.sharding is ShardingType.ROW_WISE:
            holders = list(range(plan.world_size))
        rows = -(-spec.num_embeddings // len(holders))
        for index, rank in enumerate(holders):
            first = min(index * rows, spec.num_embeddings)
            size = min(rows, spec.num_embeddings - first)
            where = device if device == "cpu" else f"{device}:{plan.hosts[:rank].count(plan.hosts[rank])}"
            shards.append(
                {"shard_offsets": [first, column], "shard_sizes": [size, width], "placement": f"rank:{rank}/{where}"}
            )
        ranks += holders
        column += width
    return {
        "sharding_type": table.sharding.value,
        "compute_kernel": "fused",
        "ranks": ranks,
        "sharding_spec": {"shards": shards},
    }
