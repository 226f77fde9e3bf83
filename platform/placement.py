"""Where row blocks live: pure functions from tables and a world size to block -> owner.

Invariants, asserted by number in the test:
1. Every block of every table has exactly one owner, in [0, world_size).
2. The result is a pure function of its arguments: stable across machines and Python versions.
3. TABLE_WISE puts all blocks of a table on one worker; ROW_WISE gives owners of a table that differ by at most one
   block in number, each a contiguous run of blocks.
4. No worker is given more bytes than its limit, or PlanError names the table, the bytes needed and the bytes free.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from shoal.kernels.errors import PlanError
from shoal.kernels.spec import TableSpec

#: What the row store keeps per row beyond weights and optimizer: id, last step, count, id map cell (bench id_map).
ROW_METADATA_BYTES = 32
#: Row blocks of a large or dynamic table that is sharded row-wise, unless configured.
DEFAULT_NUM_BLOCKS = 64
#: A table of fixed size gets no more blocks than keep this many ids in each, so that small tables cost little.
MIN_IDS_PER_BLOCK = 256
#: Rows assumed for a dynamic table that declares none, for planning only.
DYNAMIC_ROWS_ESTIMATE = 1_000_000


class ShardingType(enum.Enum):
    """How a table is cut over workers; TorchRec's names."""

    TABLE_WISE = "table_wise"
    ROW_WISE = "row_wise"


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
    spread, starting at the least loaded worker. A table without an entry in ``sharding`` is ROW_WISE.

    Args:
        specs: the tables; names are unique.
        world_size: number of workers, >= 1.
        memory_bytes_per_worker: limit per worker, or None.

    Returns: one TableLoad per table, in the order of ``specs``.
    Raises: PlanError if a worker would exceed its limit.
    """
    wanted = sharding or {}
    load = [0] * world_size
    placed: dict[str, TableLoad] = {}
    for spec in sorted(specs, key=lambda spec: (-table_bytes(spec), spec.name)):
        kind = wanted.get(spec.name, ShardingType.ROW_WISE)
        lightest = min(range(world_size), key=lambda rank: (load[rank], rank))
        if kind is ShardingType.TABLE_WISE or spec.num_blocks == 1:
            owners = (lightest,) * spec.num_blocks
            reason = f"{table_bytes(spec)} bytes to the worker with the fewest bytes so far ({load[lightest]})"
        else:
            owners = row_wise_owners(spec.num_blocks, world_size, first=lightest)
            reason = f"{spec.num_blocks} row blocks spread over {min(world_size, spec.num_blocks)} workers"
        total = table_bytes(spec)
        counts = [owners.count(rank) for rank in range(world_size)]
        per_worker = tuple(total * count // spec.num_blocks for count in counts)
        placed[spec.name] = TableLoad(
            table=spec.name, sharding=kind, owners=owners, bytes_per_worker=per_worker, reason=reason
        )
        if memory_bytes_per_worker is not None:
            _check_fits(spec, per_worker, load, memory_bytes_per_worker)
        load = [have + more for have, more in zip(load, per_worker)]
    return tuple(placed[spec.name] for spec in specs)


def _check_fits(spec: TableSpec, per_worker: Sequence[int], load: Sequence[int], limit: int) -> None:
    """Raise PlanError if ``spec`` does not fit beside what is placed already."""
    for rank, more in enumerate(per_worker):
        if load[rank] + more > limit:
            free = ", ".join(f"worker {r}: {max(0, limit - used)}" for r, used in enumerate(load))
            raise PlanError(
                f"table {spec.name!r} does not fit: it needs {more} bytes on worker {rank} "
                f"({table_bytes(spec)} in all); bytes free: {free}. Add workers, raise scaling.memory_per_worker, "
                f"shard it row_wise, or use data_type fp16/bf16 or a row-wise optimizer"
            )
