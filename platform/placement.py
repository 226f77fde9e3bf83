"""Where row blocks live: pure functions from tables and workers to block -> owner.

A column block is a table here (``kernels/column_blocks``); what its type asks for is in ``sharding``.

Invariants, asserted by number in the test:
1. Every block of every table has exactly one owner, in [0, world_size).
2. The result is a pure function of its arguments: stable across machines and Python versions.
3. A type's rule holds: all blocks of a whole table are on one worker; what is bound to a host is on one host; the
   owners of any other table, among all workers or those of its host, differ by at most one block in number.
4. No worker is given more bytes than its limit, or PlanError names the table, the bytes needed and the bytes free.
5. A changed world (``replan_placement``) keeps the rules of 3 and moves as few row-wise blocks as they allow; blocks
   move between survivors only to keep the counts, to level loads that differ by more than LEVEL_TOLERANCE of the mean,
   or where memory forces it. Planning the same world again moves nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from shoal.kernels.errors import PlanError
from shoal.kernels.spec import TableSpec
from shoal.platform.levelling import LEVEL_TOLERANCE, Unit, level_loads
from shoal.platform.sharding import ShardingType, host_group, is_whole, sharding_of

__all__ = [
    "DEFAULT_NUM_BLOCKS",
    "DYNAMIC_ROWS_ESTIMATE",
    "LEVEL_TOLERANCE",
    "MIN_IDS_PER_BLOCK",
    "ROW_METADATA_BYTES",
    "ShardingType",
    "TableLoad",
    "default_num_blocks",
    "is_whole",
    "plan_placement",
    "replan_placement",
    "row_wise_owners",
    "table_bytes",
]

#: What the row store keeps per row beyond weights and optimizer: id, last step, count, id map cell (bench id_map).
ROW_METADATA_BYTES = 32
#: Row blocks of a large or dynamic table that is sharded row-wise, unless configured.
DEFAULT_NUM_BLOCKS = 64
#: A table of fixed size gets no more blocks than keep this many ids in each, so that small tables cost little.
MIN_IDS_PER_BLOCK = 256
#: Rows assumed for a dynamic table that declares none, for planning only.
DYNAMIC_ROWS_ESTIMATE = 1_000_000
#: Workers whose free bytes a refusal lists.
SHOWN_WORKERS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableLoad:
    """Bytes of one table on every worker."""

    table: str
    sharding: ShardingType
    owners: tuple[int, ...]
    bytes_per_worker: tuple[int, ...]
    reason: str


def default_num_blocks(num_embeddings: int) -> int:
    """Row blocks of a row-wise table that nobody configured, a power of two."""
    if num_embeddings == 0:
        return DEFAULT_NUM_BLOCKS
    wanted = max(1, num_embeddings // MIN_IDS_PER_BLOCK)
    return min(DEFAULT_NUM_BLOCKS, 1 << (wanted.bit_length() - 1))


def table_bytes(spec: TableSpec) -> int:
    """Upper bound of a table's resident bytes when every row has been touched."""
    rows = spec.num_embeddings or DYNAMIC_ROWS_ESTIMATE
    return rows * (spec.row_bytes + ROW_METADATA_BYTES)


def row_wise_owners(num_blocks: int, world_size: int, first: int = 0) -> tuple[int, ...]:
    """Owner of each block: contiguous runs from worker ``first`` on, so that small tables do not pile up on rank 0."""
    return tuple((first + block * world_size // num_blocks) % world_size for block in range(num_blocks))


def plan_placement(
    specs: Sequence[TableSpec],
    world_size: int,
    *,
    sharding: Mapping[str, ShardingType] | None = None,
    hosts: Sequence[str] | None = None,
    loads: Mapping[str, float] | None = None,
    memory_bytes_per_worker: int | None = None,
) -> tuple[TableLoad, ...]:
    """Assign every block of every table to a worker.

    Tables go largest load first; whole ones to the worker with the least load so far that has room (greedy LPT), others
    are spread, starting at the least loaded worker; loads that then differ by more than LEVEL_TOLERANCE are levelled.

    Args:
        specs: the tables; names are unique.
        world_size: number of workers, >= 1.
        sharding: type by table name; ROW_WISE without an entry.
        hosts: host of every worker; None: one host.
        loads: what is evened out, by table name, in any unit; by default a table's bytes.
        memory_bytes_per_worker: limit per worker, or None.

    Returns: one TableLoad per table, in the order of ``specs``.
    Raises: PlanError if a worker would exceed its limit.
    """
    placing = _Placing(specs, world_size, sharding, hosts, loads, memory_bytes_per_worker)
    for spec in placing.by_load:
        placing.place(spec)
    placing.level()
    return tuple(placing.result(spec) for spec in specs)


def replan_placement(
    specs: Sequence[TableSpec],
    world_size: int,
    base: Mapping[str, Sequence[int | None]],
    *,
    copies: Mapping[str, Sequence[int | None]] | None = None,
    sharding: Mapping[str, ShardingType] | None = None,
    hosts: Sequence[str] | None = None,
    loads: Mapping[str, float] | None = None,
    memory_bytes_per_worker: int | None = None,
) -> dict[str, tuple[int, ...]]:
    """Assign the blocks of a world whose workers have changed, moving few of them.

    Args:
        base: table -> for every block the worker (by its new number) that owns it now, None where that one is gone.
            A table without an entry is new.
        copies: table -> for every block the worker that holds a copy, or None: it is preferred for a block that moves.
        sharding, hosts, loads, memory_bytes_per_worker: as of ``plan_placement``.

    Returns: table -> owner of every block. Raises: PlanError if a worker would exceed its limit however placed.
    """
    placing = _Placing(specs, world_size, sharding, hosts, loads, None)
    placing.keep(base, copies or {})
    placing.level()
    if memory_bytes_per_worker is not None and max(placing.used) > memory_bytes_per_worker:
        fresh = plan_placement(
            specs,
            world_size,
            sharding=sharding,
            hosts=hosts,
            loads=loads,
            memory_bytes_per_worker=memory_bytes_per_worker,
        )
        return {table.table: table.owners for table in fresh}
    return {spec.name: tuple(placing.owners[spec.name]) for spec in specs}


class _Placing:
    """A placement in the making: owners so far, and load and bytes of every worker."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        world_size: int,
        sharding: Mapping[str, ShardingType] | None,
        hosts: Sequence[str] | None,
        loads: Mapping[str, float] | None,
        limit: int | None,
    ) -> None:
        self.sharding = dict(sharding or {})
        self.bytes = {spec.name: table_bytes(spec) for spec in specs}
        self.loads = {spec.name: float((loads or {}).get(spec.name, self.bytes[spec.name])) for spec in specs}
        self.by_load = sorted(specs, key=lambda spec: (-self.loads[spec.name], -self.bytes[spec.name], spec.name))
        self.everybody = tuple(range(world_size))
        names = list(hosts or ("",) * world_size)
        #: The workers of every host, hosts in the order of their first worker.
        self.hosts = [tuple(r for r in self.everybody if names[r] == host) for host in dict.fromkeys(names)]
        self.limit = limit
        self.load = [0.0] * world_size
        self.used = [0.0] * world_size
        self.owners: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        #: Host group -> the workers of its host.
        self.chosen: dict[str, tuple[int, ...]] = {}

    def place(self, spec: TableSpec) -> None:
        """Place a table that is nowhere yet. Raises PlanError."""
        tried = []
        for ranks in self._pools(spec):
            owners = self._whole(spec, ranks) if is_whole(spec, self.sharding) else self._spread(spec, ranks)
            if self._fits(spec, owners):
                self._take(spec, owners, ranks)
                return
            tried.append(owners)
        raise PlanError(self._refusal(spec, tried[0]))

    def keep(self, base: Mapping[str, Sequence[int | None]], copies: Mapping[str, Sequence[int | None]]) -> None:
        """Place all tables near to where they are."""
        slack = LEVEL_TOLERANCE * sum(self.loads.values()) / len(self.everybody)
        stay: dict[str, Counter[int]] = {}
        for spec in self.by_load:
            group = host_group(spec, self.sharding)
            if group is not None:
                block_bytes = self.bytes[spec.name] // spec.num_blocks + 1
                for rank in base.get(spec.name, ()):
                    if rank is not None:
                        stay.setdefault(group, Counter())[rank] += block_bytes
        for spec in self.by_load:
            nobody = (None,) * spec.num_blocks
            old, held = base.get(spec.name, nobody), copies.get(spec.name, nobody)
            ranks = self._kept_pool(spec, stay)
            local = {rank: i for i, rank in enumerate(ranks)}
            load = [self.load[rank] for rank in ranks]
            old_here = [None if rank is None else local.get(rank) for rank in old]
            held_here = [None if rank is None else local.get(rank) for rank in held]
            if is_whole(spec, self.sharding):
                owners = [_choose_whole(old_here, held_here, load, slack)] * spec.num_blocks
            else:
                owners = _spread_near(old_here, held_here, load)
            self._take(spec, [ranks[i] for i in owners], ranks)

    def level(self) -> None:
        """Even out loads."""
        everybody = frozenset(self.everybody)
        units = []
        for spec in self.by_load:
            whole = is_whole(spec, self.sharding)
            parts = 1 if whole else spec.num_blocks
            group = host_group(spec, self.sharding)
            ranks = everybody if group is None else frozenset(self.chosen[group])
            units.append(
                Unit(
                    load=self.loads[spec.name] / parts,
                    size=self.bytes[spec.name] / parts,
                    is_whole=whole,
                    ranks=None if ranks == everybody else ranks,
                )
            )
        room = None if self.limit is None else [self.limit - used for used in self.used]
        level_loads(units, [self.owners[s.name] for s in self.by_load], self.load, hosts=self.hosts, room=room)
        self.used = [0.0] * len(self.everybody)
        for spec in self.by_load:
            _add(self.used, self.owners[spec.name], self.bytes[spec.name] / spec.num_blocks)

    def result(self, spec: TableSpec) -> TableLoad:
        counts = Counter(self.owners[spec.name])
        size = self.bytes[spec.name]
        return TableLoad(
            table=spec.name,
            sharding=sharding_of(spec, self.sharding),
            owners=tuple(self.owners[spec.name]),
            bytes_per_worker=tuple([size * counts.get(rank, 0) // spec.num_blocks for rank in self.everybody]),
            reason=self.reasons[spec.name],
        )

    def _pools(self, spec: TableSpec) -> list[tuple[int, ...]]:
        """The workers that may have a table: all, those of the host its group is on, or of each host, emptiest first;
        a host that no column block of the same logical table is on yet before the others."""
        group = host_group(spec, self.sharding)
        if group is None:
            return [self.everybody]
        if group in self.chosen:
            return [self.chosen[group]]
        return sorted(self.hosts, key=self._emptiness(spec))

    def _emptiness(self, spec: TableSpec) -> Callable[[tuple[int, ...]], tuple[bool, int, float, int]]:
        """Order of hosts for a new host group: those with room for all of it first."""
        group = host_group(spec, self.sharding)
        needed = sum(self.bytes[other.name] for other in self.by_load if host_group(other, self.sharding) == group)
        taken = Counter(
            self.chosen[other.name]
            for other in self.by_load
            if spec.columns is not None and other.logical_name == spec.logical_name and other.name in self.chosen
        )

        def order(ranks: tuple[int, ...]) -> tuple[bool, int, float, int]:
            room = math.inf if self.limit is None else sum(self.limit - self.used[rank] for rank in ranks)
            return needed > room, taken[ranks], sum(self.load[rank] for rank in ranks) / len(ranks), ranks[0]

        return order

    def _kept_pool(self, spec: TableSpec, stay: Mapping[str, Counter[int]]) -> tuple[int, ...]:
        """The workers that may have a table that is somewhere already: its group stays on the host with most of it."""
        group = host_group(spec, self.sharding)
        if group is None or group in self.chosen or group not in stay:
            return self._pools(spec)[0]
        return max(self.hosts, key=lambda ranks: (sum(stay[group][rank] for rank in ranks), -ranks[0]))

    def _whole(self, spec: TableSpec, ranks: Sequence[int]) -> list[int]:
        able = [rank for rank in ranks if self.limit is None or self.used[rank] + self.bytes[spec.name] <= self.limit]
        return [min(able or ranks, key=lambda rank: (self.load[rank], rank))] * spec.num_blocks

    def _spread(self, spec: TableSpec, ranks: Sequence[int]) -> list[int]:
        first = min(range(len(ranks)), key=lambda i: (self.load[ranks[i]], i))
        return [ranks[i] for i in row_wise_owners(spec.num_blocks, len(ranks), first=first)]

    def _take(self, spec: TableSpec, owners: list[int], ranks: tuple[int, ...]) -> None:
        self.owners[spec.name] = owners
        group = host_group(spec, self.sharding)
        if group is not None:
            self.chosen[group] = ranks
        where = "" if group is None or len(self.hosts) == 1 else " of one host"
        if is_whole(spec, self.sharding):
            unit = "bytes" if self.loads[spec.name] == self.bytes[spec.name] else "load"
            self.reasons[spec.name] = f"{self.bytes[spec.name]} bytes to the worker{where} with the least {unit} so far"
        else:
            num_workers = min(len(ranks), spec.num_blocks)
            self.reasons[spec.name] = f"{spec.num_blocks} row blocks spread over {num_workers} workers{where}"
        _add(self.load, owners, self.loads[spec.name] / spec.num_blocks)
        _add(self.used, owners, self.bytes[spec.name] / spec.num_blocks)

    def _fits(self, spec: TableSpec, owners: Sequence[int]) -> bool:
        if self.limit is None:
            return True
        block_bytes = self.bytes[spec.name] / spec.num_blocks
        return all(self.used[rank] + n * block_bytes <= self.limit for rank, n in Counter(owners).items())

    def _refusal(self, spec: TableSpec, owners: Sequence[int]) -> str:
        limit = self.limit or 0
        counts = Counter(owners)
        needs = {rank: n * self.bytes[spec.name] // spec.num_blocks for rank, n in counts.items()}
        rank = min(rank for rank, more in needs.items() if self.used[rank] + more > limit)
        free = [f"worker {r}: {max(0, limit - math.ceil(used))}" for r, used in enumerate(self.used)]
        shown = ", ".join(free[:SHOWN_WORKERS]) + (
            f", and {len(free) - SHOWN_WORKERS} more" if free[SHOWN_WORKERS:] else ""
        )
        return (
            f"table {spec.name!r} does not fit: it needs {needs[rank]} bytes on worker {rank} "
            f"({self.bytes[spec.name]} in all); bytes free: {shown}. Add workers, raise scaling.memory_per_worker, "
            f"shard it row_wise, or use data_type fp16/bf16 or a row-wise optimizer"
        )


def _add(totals: list[float], owners: Sequence[int], amount: float) -> None:
    for rank in owners:
        totals[rank] += amount


def _choose_whole(old: Sequence[int | None], held: Sequence[int | None], load: Sequence[float], slack: float) -> int:
    """Owner of a table that lives on one worker: who owns it now, else who holds copies unless that one is fuller than
    the emptiest worker by more than ``slack`` bytes, else the emptiest."""
    kept = [rank for rank in old if rank is not None]
    if kept:
        return max(set(kept), key=lambda rank: (kept.count(rank), -rank))
    lightest = load.index(min(load))
    holder = held[0]
    return lightest if holder is None or load[holder] > load[lightest] + slack else holder


def _spread_near(old: Sequence[int | None], held: Sequence[int | None], load: Sequence[float]) -> list[int]:
    """Owners of a row-wise table's blocks: equal counts but for one, as many blocks as possible where they are."""
    world_size = len(load)
    least, num_extra = divmod(len(old), world_size)
    counts = [0] * world_size
    for rank in old:
        if rank is not None:
            counts[rank] += 1
    # One block more costs no move on a worker that has it already; else it goes where bytes are few.
    order = sorted(range(world_size), key=lambda rank: (counts[rank] <= least, load[rank], rank))
    room = [least] * world_size
    for rank in order[:num_extra]:
        room[rank] += 1
    owners: list[int] = [-1] * len(old)
    for prefer in (old, held):
        for block, rank in enumerate(prefer):
            if owners[block] < 0 and rank is not None and room[rank] > 0:
                owners[block] = rank
                room[rank] -= 1
    by_room = sorted(range(world_size), key=lambda rank: (-room[rank], load[rank], rank))
    vacant = (rank for rank in by_room for _ in range(room[rank]))
    return [rank if rank >= 0 else next(vacant) for rank in owners]
