"""From tables and how they are used to a plan: enumerate what may be, cost it, choose, assign. Pure.

Invariants, asserted by number in the test:
1. A plan is a pure function of its arguments, whatever the order of mappings: the same on every machine.
2. A table keeps within its constraint: types, column blocks, row blocks, flow.
3. Owners are those that ``plan_placement`` gives the tables in a run's first view: what is shown is what runs.
4. Without profiles nothing is known of the traffic: every table that may be is row-wise, and bytes are evened out.
5. No worker exceeds its memory, or PlanError names the table, the bytes needed and the bytes free.

How a table is chosen: by the option that costs its owners least in all among those whose largest piece is no more than
a fair share of all tables on one worker; where there is none, the one with the smallest pieces. Then tables on the
fullest worker are cut finer while that helps, with at most ``TRIES_MAX`` tries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from shoal.kernels.column_blocks import column_widths, cut_columns
from shoal.kernels.errors import ConfigError, PlanError
from shoal.kernels.spec import TableSpec
from shoal.platform.costs import Codec, CostWeights, Flow, TableProfile, choose_flow, flow_bytes, table_seconds
from shoal.platform.placement import (
    DYNAMIC_ROWS_ESTIMATE,
    MIN_IDS_PER_BLOCK,
    default_num_blocks,
    plan_placement,
    table_bytes,
)
from shoal.platform.plan import Plan, PlannedTable
from shoal.platform.sharding import ShardingType
from shoal.platform.topology import Topology

#: What a planner may choose by itself. DATA_PARALLEL never sends fewer bytes than rows do (gradients and their rows
#: travel all the same), so it is used where asked for.
AUTO_TYPES = (
    ShardingType.TABLE_WISE,
    ShardingType.ROW_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.TABLE_ROW_WISE,
    ShardingType.TABLE_COLUMN_WISE,
    ShardingType.GRID_SHARD,
)
#: Column blocks that are tried where a constraint leaves their number open, beside TorchRec's rule.
_CUTS = (2, 4)
#: The narrowest column block that is tried, in columns: narrower rows cost more in ids and metadata than in values.
_NARROWEST = 32
#: Times that a table of the fullest worker is tried in smaller pieces: between these, so many that tries times tables
#: times workers is about this.
TRIES_MIN, TRIES_MAX, TRIES_SIZE = 3, 64, 4_000_000
#: Good enough: the fullest worker over the mean.
IMBALANCE_GOAL = 1.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constraint:
    """What a plan may do with a table; None: anything."""

    sharding_types: tuple[ShardingType, ...] | None = None
    column_blocks: int | None = None
    num_row_blocks: int | None = None
    flow: Flow | None = None
    values_codec: Codec = "fp32"
    gradients_codec: Codec = "fp32"
    #: With the pooled flow: a partial sum per row block, not per owner (S5).
    placement_exact: bool = True
    #: See ``kernels.spec.ColumnBlock``.
    has_own_statistic: bool = False


@dataclasses.dataclass(frozen=True)
class _Option:
    """One way to cut a table."""

    sharding: ShardingType
    blocks: tuple[TableSpec, ...]
    #: Per column block its load; the load and the bytes that some worker has of one.
    loads: tuple[float, ...]
    peak: float
    peak_bytes: float
    #: Partial sums that a bag over all of the table falls into.
    num_parts: int
    flow: Flow
    flow_reason: str

    @property
    def total(self) -> float:
        return sum(self.loads)


def plan_tables(
    specs: Sequence[TableSpec],
    topology: Topology,
    *,
    constraints: Mapping[str, Constraint] | None = None,
    profiles: Mapping[str, TableProfile] | None = None,
    weights: CostWeights | None = None,
    flows: Sequence[Flow] = ("rows",),
) -> Plan:
    """Plan all tables of a model.

    Args:
        specs: logical tables, uncut; names are unique.
        constraints: by table name; anything goes for a table without one.
        profiles: of every table, or None.
        flows: those that the data plane runs.

    Raises: PlanError where memory does not suffice, ConfigError for a constraint that leaves nothing.
    """
    topology.validate()
    maker = _Options(topology, constraints or {}, profiles, weights, tuple(flows))
    options = {spec.name: maker.of(spec) for spec in specs}
    share = sum(min(option.total for option in found) for found in options.values()) / topology.world_size
    chosen = {spec.name: _choose(options[spec.name], share) for spec in specs}
    if topology.memory_bytes_per_worker is not None:
        chosen = _make_room(specs, options, chosen, topology)
    plan = maker.plan(specs, chosen, share)
    return plan if profiles is None else _improve(plan, specs, maker, options, chosen, share)


def _improve(
    plan: Plan,
    specs: Sequence[TableSpec],
    maker: _Options,
    options: Mapping[str, Sequence[_Option]],
    chosen: Mapping[str, _Option],
    share: float,
) -> Plan:
    """``plan`` with tables of the fullest worker cut finer while that makes it less full; a bounded number of tries."""
    size = max(1, len(specs)) * plan.world_size
    num_left = min(TRIES_MAX, max(TRIES_MIN, TRIES_SIZE // size))
    best = plan
    is_better = True
    while is_better and best.imbalance > IMBALANCE_GOAL:
        is_better = False
        for finer in _cut_finer(plan, options, chosen):
            if num_left == 0:
                return best
            num_left -= 1
            try:
                other = maker.plan(specs, finer, share)
            except PlanError:
                continue
            # Two workers may be full for the same reason: the maximum falls only when both are relieved.
            if _unevenness(other) < _unevenness(plan):
                plan, chosen, is_better = other, finer, True
                best = min(best, plan, key=lambda plan: max(plan.worker_loads))
                break
    return best


def _unevenness(plan: Plan) -> float:
    """Falls with every step of ``_improve``, so that it ends."""
    return sum(load * load for load in plan.worker_loads)


def plan_whole_tables(
    specs: Sequence[TableSpec],
    topology: Topology,
    owners: Mapping[str, int],
    profiles: Mapping[str, TableProfile],
    *,
    weights: CostWeights | None = None,
) -> Plan:
    """The plan of uncut tables on workers that somebody else chose: what it costs by our measure."""
    kind = Constraint(sharding_types=(ShardingType.TABLE_WISE,))
    maker = _Options(topology, {spec.name: kind for spec in specs}, profiles, weights, ("rows",))
    chosen = {spec.name: maker.of(spec)[0] for spec in specs}
    share = sum(option.total for option in chosen.values()) / topology.world_size
    return maker.plan(specs, chosen, share, {name: (rank,) for name, rank in owners.items()})


def _choose(options: Sequence[_Option], share: float) -> _Option:
    """The cheapest option whose largest piece is within a fair share; else that with the smallest."""
    small = [option for option in options if option.peak <= share]
    if small:
        return min(small, key=lambda option: option.total)
    return min(options, key=lambda option: (option.peak, option.total))


def _make_room(
    specs: Sequence[TableSpec],
    options: Mapping[str, Sequence[_Option]],
    chosen: dict[str, _Option],
    topology: Topology,
) -> dict[str, _Option]:
    """Choices that fit the memory: whole tables give way to smaller pieces, the larger ones first, until all fit."""
    largest = max(map(table_bytes, specs), default=0)
    for bound in (largest, largest // 4, largest // 64, 0):
        try:
            _place(specs, chosen, topology)
            return chosen
        except PlanError:
            chosen = {
                spec.name: min(options[spec.name], key=_smallest_piece)
                if table_bytes(spec) >= bound
                else chosen[spec.name]
                for spec in specs
            }
    return chosen


def _smallest_piece(option: _Option) -> tuple[float, float]:
    """Order of options by the bytes that one worker has to hold at least."""
    return option.peak_bytes, option.total


def _cut_finer(
    plan: Plan, options: Mapping[str, Sequence[_Option]], chosen: Mapping[str, _Option]
) -> Iterator[dict[str, _Option]]:
    """``chosen`` with one table of the fullest worker in smaller pieces: the heaviest table first, cheap cuts first."""
    full = plan.worker_loads.index(max(plan.worker_loads))
    for table in sorted(plan.tables, key=lambda table: (-table.load_on(full), table.table)):
        if table.load_on(full) == 0:
            return
        now = chosen[table.table]
        smaller = [option for option in options[table.table] if option.peak < now.peak]
        for option in sorted(smaller, key=lambda option: (option.total, option.peak)):
            yield {**chosen, table.table: option}


def _place(specs: Sequence[TableSpec], chosen: Mapping[str, _Option], topology: Topology) -> dict[str, tuple[int, ...]]:
    """Owners of every physical table. Raises PlanError."""
    picked = [chosen[spec.name] for spec in specs]
    placed = plan_placement(
        [block for option in picked for block in option.blocks],
        topology.world_size,
        sharding={block.name: option.sharding for option in picked for block in option.blocks},
        hosts=topology.hosts,
        loads={b.name: load for option in picked for b, load in zip(option.blocks, option.loads)},
        memory_bytes_per_worker=topology.memory_bytes_per_worker,
    )
    return {table.table: table.owners for table in placed}


class _Options:
    """Enumerates and costs, and puts choices together."""

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, Constraint],
        profiles: Mapping[str, TableProfile] | None,
        weights: CostWeights | None,
        flows: tuple[Flow, ...],
    ) -> None:
        self._topology = topology
        self._constraints = constraints
        self._profiles = profiles
        self._weights = weights
        self._flows = flows

    def of(self, spec: TableSpec) -> list[_Option]:
        """The options of a table, in a fixed order. Raises ConfigError where there is none."""
        constraint = self._constraints.get(spec.name, Constraint())
        types = constraint.sharding_types or AUTO_TYPES
        if constraint.sharding_types is None and self._profiles is None:
            types = (ShardingType.ROW_WISE,)
        is_open = len(types) > 1
        found = []
        for kind in types:
            # On one host, or one worker a host, types that are bound to a host are others by another name.
            if is_open and kind.is_host_bound and self._topology.num_hosts in (1, self._topology.world_size):
                continue
            for widths in self._cuts(spec, kind, constraint, is_open):
                for num_blocks in self._row_blocks(spec, kind, constraint, is_open):
                    found.append(self._option(spec, kind, widths, num_blocks, constraint))
        if not found:
            raise ConfigError(f"table {spec.name!r}: none of {[kind.value for kind in types]} is possible here")
        return found

    def plan(
        self,
        specs: Sequence[TableSpec],
        chosen: Mapping[str, _Option],
        share: float,
        owners: Mapping[str, tuple[int, ...]] | None = None,
    ) -> Plan:
        """The plan of these choices, placed by us unless ``owners`` are given. Raises PlanError."""
        owners = owners or _place(specs, chosen, self._topology)
        tables = []
        for spec in specs:
            option = chosen[spec.name]
            constraint = self._constraints.get(spec.name, Constraint())
            tables.append(
                PlannedTable(
                    table=spec.name,
                    sharding=option.sharding,
                    num_row_blocks=option.blocks[0].num_blocks,
                    column_widths=tuple(block.embedding_dim for block in option.blocks),
                    owners=tuple(owners[block.name] for block in option.blocks),
                    flow=option.flow,
                    values_codec=constraint.values_codec,
                    gradients_codec=constraint.gradients_codec,
                    block_loads=option.loads,
                    block_bytes=tuple(table_bytes(block) for block in option.blocks),
                    block_rows=self._rows(spec, option),
                    block_wire_bytes=self._wire(spec, option, constraint),
                    growth=1.0 if self._profiles is None else self._profiles[spec.name].growth,
                    reason=self._reason(option, share),
                )
            )
        return Plan(hosts=self._topology.hosts, tables=tuple(tables), is_profiled=self._profiles is not None)

    def _cuts(
        self, spec: TableSpec, kind: ShardingType, constraint: Constraint, is_open: bool
    ) -> list[tuple[int, ...]]:
        """Column widths to try."""
        dim = spec.embedding_dim
        if constraint.column_blocks is not None:
            return [column_widths(dim, constraint.column_blocks, table=spec.name)]
        if not kind.cuts_columns:
            return [(dim,)]
        cuts = [column_widths(dim)]
        if is_open:
            cuts += [column_widths(dim, parts) for parts in _CUTS if dim // parts >= _NARROWEST]
            cuts = [widths for widths in cuts if len(widths) > 1]
        return list(dict.fromkeys(cuts))

    def _row_blocks(self, spec: TableSpec, kind: ShardingType, constraint: Constraint, is_open: bool) -> list[int]:
        """Numbers of row blocks to try: the default, and where the choice is ours one that all workers share evenly."""
        if constraint.num_row_blocks is not None:
            return [constraint.num_row_blocks]
        default = 1 if kind.is_whole else default_num_blocks(spec.num_embeddings)
        if not is_open or kind is not ShardingType.ROW_WISE:
            return [default]
        finer = default
        rows = spec.num_embeddings or DYNAMIC_ROWS_ESTIMATE
        while finer < 2 * self._topology.world_size and rows // (2 * finer) >= MIN_IDS_PER_BLOCK:
            finer *= 2
        return [default] if finer == default else [default, finer]

    def _option(
        self, spec: TableSpec, kind: ShardingType, widths: tuple[int, ...], num_blocks: int, constraint: Constraint
    ) -> _Option:
        cut = dataclasses.replace(spec, num_blocks=num_blocks)
        blocks = cut_columns(cut, widths, has_own_statistic=constraint.has_own_statistic)
        workers = self._topology.workers_per_host if kind.is_host_bound else float(self._topology.world_size)
        num_pieces = 1 if kind.is_whole else max(1, min(num_blocks, int(workers)))
        num_parts = num_blocks if constraint.placement_exact else num_pieces
        flow, flow_reason = self._flow(spec, kind, num_parts, constraint)
        loads = tuple(self._load(block, spec.name, num_pieces, flow, num_parts, constraint) for block in blocks)
        # Row blocks are not divisible: of 64 blocks on 48 workers some have two.
        largest = 1.0 if kind.is_whole else -(-num_blocks // num_pieces) / num_blocks
        peak, peak_bytes = max(loads) * largest, max(map(table_bytes, blocks)) * largest
        return _Option(kind, blocks, loads, peak, peak_bytes, num_parts, flow, flow_reason)

    def _flow(self, spec: TableSpec, kind: ShardingType, num_parts: int, constraint: Constraint) -> tuple[Flow, str]:
        if kind is ShardingType.DATA_PARALLEL:
            return "rows", "every worker keeps the rows"
        allowed = self._flows if constraint.flow is None else (constraint.flow,)
        if self._profiles is None:
            return allowed[0], "no sample of the data"
        if self._topology.world_size == 1:
            return allowed[0], "one worker exchanges nothing"
        return choose_flow(
            self._profiles[spec.name],
            spec.embedding_dim,
            num_parts,
            self._topology,
            allowed,
            values_codec=constraint.values_codec,
            gradients_codec=constraint.gradients_codec,
        )

    def _load(
        self,
        block: TableSpec,
        table: str,
        num_pieces: int,
        flow: Flow,
        num_parts: int,
        constraint: Constraint,
    ) -> float:
        if self._profiles is None:
            return float(table_bytes(block))
        return table_seconds(
            block,
            self._profiles[table],
            self._topology,
            num_pieces=num_pieces,
            flow=flow,
            num_parts=num_parts,
            values_codec=constraint.values_codec,
            gradients_codec=constraint.gradients_codec,
            weights=self._weights,
        )

    def _rows(self, spec: TableSpec, option: _Option) -> float:
        """Rows that the owners of one column block serve per step, to all ranks."""
        if self._profiles is None:
            return 0.0
        profile = self._profiles[spec.name]
        return self._topology.world_size * (profile.num_unique if option.flow == "rows" else profile.num_ids)

    def _wire(self, spec: TableSpec, option: _Option, constraint: Constraint) -> tuple[float, ...]:
        """Bytes per rank and step of every column block, if nothing were local."""
        if self._profiles is None:
            return (0.0,) * len(option.blocks)
        profile = self._profiles[spec.name]
        return tuple(
            flow_bytes(
                profile,
                block.embedding_dim,
                option.flow,
                option.num_parts,
                values_codec=constraint.values_codec,
                gradients_codec=constraint.gradients_codec,
            )
            for block in option.blocks
        )

    def _reason(self, option: _Option, share: float) -> str:
        where = {
            ShardingType.TABLE_WISE: "whole on one worker",
            ShardingType.COLUMN_WISE: f"{len(option.blocks)} column blocks",
            ShardingType.ROW_WISE: f"{option.blocks[0].num_blocks} row blocks over all workers",
            ShardingType.TABLE_ROW_WISE: f"{option.blocks[0].num_blocks} row blocks over the workers of one host",
            ShardingType.TABLE_COLUMN_WISE: f"{len(option.blocks)} column blocks on one host",
            ShardingType.GRID_SHARD: f"{len(option.blocks)} column blocks, a host each, by rows within it",
            ShardingType.DATA_PARALLEL: "values on every worker",
        }[option.sharding]
        if self._profiles is None:
            return f"{where}; bytes are evened out, no sample of the data"
        return (
            f"{where}: {option.total * 1e6:.1f} us a step in all, {option.peak * 1e6:.1f} at most on a worker; "
            f"a fair share is {share * 1e6:.1f} us; {option.flow}: {option.flow_reason}"
        )
