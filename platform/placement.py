"""Where row blocks live: pure functions from tables and a world size to block -> owner.

Invariants, asserted by number in the test:
1. Every block of every table has exactly one owner, in [0, world_size).
2. The result is a pure function of its arguments: stable across machines and Python versions.
3. TABLE_WISE puts all blocks of a table on one worker; ROW_WISE gives owners of a table that differ by at most one
   block in number.
4. No worker is given more bytes than its limit, or PlanError names the table, the bytes needed and the bytes free.
5. A changed world (``replan_placement``) keeps the counts of 3 and moves as few row-wise blocks as they allow; blocks
   move between survivors only to keep the counts, to level bytes that differ by more than LEVEL_TOLERANCE of the mean,
   or where memory forces it. Planning the same world again moves nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence

from shoal.kernels.errors import PlanError
from shoal.kernels.spec import TableSpec

#: What the row store keeps per row beyond weights and optimizer: id, last step, count, id map cell (bench id_map).
ROW_METADATA_BYTES = 32
#: Row blocks of a large or dynamic table that is sharded row-wise, unless configured.
DEFAULT_NUM_BLOCKS = 64
#: A table of fixed size gets no more blocks than keep this many ids in each, so that small tables cost little.
MIN_IDS_PER_BLOCK = 256
#: Workers whose bytes differ by less than this part of the mean are left alone: a move has to gain something.
LEVEL_TOLERANCE = 0.1
#: Rows assumed for a dynamic table that declares none, for planning only.
DYNAMIC_ROWS_ESTIMATE = 1_000_000


class ShardingType(enum.Enum):
    """How a table is cut over workers; TorchRec's names."""

    TABLE_WISE = "table_wise"
    ROW_WISE = "row_wise"
    #: Owned row-wise, its values kept by every worker.
    DATA_PARALLEL = "data_parallel"


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
    memory_bytes_per_worker: int | None = None,
) -> tuple[TableLoad, ...]:
    """Assign every block of every table to a worker.

    Tables go largest first; TABLE_WISE ones to the worker with the fewest bytes so far (greedy LPT), ROW_WISE ones are
    spread, starting at the least loaded worker; loads that then differ by more than LEVEL_TOLERANCE are levelled. A
    table without an entry in ``sharding`` is ROW_WISE.

    Args:
        specs: the tables; names are unique.
        world_size: number of workers, >= 1.
        memory_bytes_per_worker: limit per worker, or None.

    Returns: one TableLoad per table, in the order of ``specs``.
    Raises: PlanError if a worker would exceed its limit.
    """
    wanted = dict(sharding or {})
    by_size = sorted(specs, key=lambda spec: (-table_bytes(spec), spec.name))
    load = [0.0] * world_size
    owners: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    for spec in by_size:
        lightest = min(range(world_size), key=lambda rank: (load[rank], rank))
        if is_whole(spec, wanted):
            owners[spec.name] = [lightest] * spec.num_blocks
            reasons[spec.name] = f"{table_bytes(spec)} bytes to the worker with the fewest bytes so far"
        else:
            owners[spec.name] = list(row_wise_owners(spec.num_blocks, world_size, first=lightest))
            reasons[spec.name] = f"{spec.num_blocks} row blocks spread over {min(world_size, spec.num_blocks)} workers"
        if memory_bytes_per_worker is not None:
            _check_fits(spec, _bytes_per_worker(spec, owners[spec.name], world_size), load, memory_bytes_per_worker)
        _add_load(spec, owners[spec.name], load)
    _level(by_size, owners, load, wanted)
    return tuple(
        TableLoad(
            table=spec.name,
            sharding=wanted.get(spec.name, ShardingType.ROW_WISE),
            owners=tuple(owners[spec.name]),
            bytes_per_worker=_bytes_per_worker(spec, owners[spec.name], world_size),
            reason=reasons[spec.name],
        )
        for spec in specs
    )


def is_whole(spec: TableSpec, sharding: Mapping[str, ShardingType]) -> bool:
    """Whether all blocks of a table live on one worker."""
    return spec.num_blocks == 1 or sharding.get(spec.name, ShardingType.ROW_WISE) is ShardingType.TABLE_WISE


def _bytes_per_worker(spec: TableSpec, owners: Sequence[int], world_size: int) -> tuple[int, ...]:
    return tuple(table_bytes(spec) * owners.count(rank) // spec.num_blocks for rank in range(world_size))


def _check_fits(spec: TableSpec, per_worker: Sequence[int], load: Sequence[float], limit: int) -> None:
    """Raise PlanError if ``spec`` does not fit beside what is placed already."""
    for rank, more in enumerate(per_worker):
        if load[rank] + more > limit:
            free = ", ".join(f"worker {r}: {max(0, limit - math.ceil(used))}" for r, used in enumerate(load))
            raise PlanError(
                f"table {spec.name!r} does not fit: it needs {more} bytes on worker {rank} "
                f"({table_bytes(spec)} in all); bytes free: {free}. Add workers, raise scaling.memory_per_worker, "
                f"shard it row_wise, or use data_type fp16/bf16 or a row-wise optimizer"
            )


def replan_placement(
    specs: Sequence[TableSpec],
    world_size: int,
    base: Mapping[str, Sequence[int | None]],
    *,
    copies: Mapping[str, Sequence[int | None]] | None = None,
    sharding: Mapping[str, ShardingType] | None = None,
    memory_bytes_per_worker: int | None = None,
) -> dict[str, tuple[int, ...]]:
    """Assign the blocks of a world whose workers have changed, moving few of them.

    Args:
        base: table -> for every block the worker (by its new number) that owns it now, None where that one is gone.
            A table without an entry is new.
        copies: table -> for every block the worker that holds a copy, or None: it is preferred for a block that moves.
        memory_bytes_per_worker: limit per worker, or None.

    Returns: table -> owner of every block. Raises: PlanError if a worker would exceed its limit however placed.
    """
    wanted = dict(sharding or {})
    by_size = sorted(specs, key=lambda spec: (-table_bytes(spec), spec.name))
    load = [0.0] * world_size
    slack = LEVEL_TOLERANCE * sum(map(table_bytes, specs)) / world_size
    owners: dict[str, list[int]] = {}
    for spec in by_size:
        nobody = (None,) * spec.num_blocks
        old, held = base.get(spec.name, nobody), (copies or {}).get(spec.name, nobody)
        if is_whole(spec, wanted):
            owners[spec.name] = [_choose_whole(old, held, load, slack)] * spec.num_blocks
        else:
            owners[spec.name] = _spread(old, held, load)
        _add_load(spec, owners[spec.name], load)
    _level(by_size, owners, load, wanted)
    if memory_bytes_per_worker is not None and max(load) > memory_bytes_per_worker:
        fresh = plan_placement(specs, world_size, sharding=wanted, memory_bytes_per_worker=memory_bytes_per_worker)
        return {table.table: table.owners for table in fresh}
    return {spec.name: tuple(owners[spec.name]) for spec in specs}


def _choose_whole(old: Sequence[int | None], held: Sequence[int | None], load: Sequence[float], slack: float) -> int:
    """Owner of a table that lives on one worker: who owns it now, else who holds copies unless that one is fuller than
    the emptiest worker by more than ``slack`` bytes, else the emptiest."""
    kept = [rank for rank in old if rank is not None]
    if kept:
        return max(set(kept), key=lambda rank: (kept.count(rank), -rank))
    lightest = load.index(min(load))
    holder = held[0]
    return lightest if holder is None or load[holder] > load[lightest] + slack else holder


def _add_load(spec: TableSpec, owners: Sequence[int], load: list[float]) -> None:
    block_bytes = table_bytes(spec) / spec.num_blocks
    for rank in owners:
        load[rank] += block_bytes


def _spread(old: Sequence[int | None], held: Sequence[int | None], load: Sequence[float]) -> list[int]:
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


def _level(
    by_size: Sequence[TableSpec],
    owners: dict[str, list[int]],
    load: list[float],
    sharding: Mapping[str, ShardingType],
) -> None:
    """Move whole tables, and blocks where the counts allow it, from the fullest to the emptiest worker, in place.

    Every move lowers the sum of squares of the loads, so it ends; the bound is for the reader.
    """
    tolerance = LEVEL_TOLERANCE * sum(load) / len(load)
    units = {spec.name: _unit(spec, sharding) for spec in by_size}
    for _ in range(len(by_size) * len(load) + 1):
        full, empty = load.index(max(load)), load.index(min(load))
        gap = load[full] - load[empty]
        if gap <= tolerance:
            return
        best: tuple[float, str] | None = None
        for name, (size, whole) in units.items():
            distance = abs(2 * size - gap)
            if not 0 < size < gap or (best is not None and distance >= best[0]):
                continue
            numbers = owners[name]
            if numbers[0] == full if whole else numbers.count(full) > numbers.count(empty):
                best = (distance, name)
        if best is None:
            return
        size, whole = units[best[1]]
        numbers = owners[best[1]]
        for block in range(len(numbers)) if whole else [_last(numbers, full)]:
            numbers[block] = empty
        load[full] -= size
        load[empty] += size


def _unit(spec: TableSpec, sharding: Mapping[str, ShardingType]) -> tuple[float, bool]:
    """(bytes that move at once, whether that is the whole table)."""
    whole = is_whole(spec, sharding)
    return table_bytes(spec) / (1 if whole else spec.num_blocks), whole


def _last(numbers: Sequence[int], rank: int) -> int:
    return max(block for block, owner in enumerate(numbers) if owner == rank)
