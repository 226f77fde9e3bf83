"""How a table may be cut over workers: TorchRec's sharding types as rules for placement. Pure.

A column block is a table of its own to placement (``kernels/column_blocks``), so a rule has two halves: whether all row
blocks of such a table stay together, and whether it, or all column blocks of its logical table, stay on one host.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from shoal.kernels.spec import TableSpec


class ShardingType(enum.Enum):
    """TorchRec's names."""

    #: The table on one worker.
    TABLE_WISE = "table_wise"
    #: Each column block on one worker.
    COLUMN_WISE = "column_wise"
    #: Row blocks over all workers.
    ROW_WISE = "row_wise"
    #: Row blocks over the workers of one host.
    TABLE_ROW_WISE = "table_row_wise"
    #: Each column block on one worker, all of them on one host.
    TABLE_COLUMN_WISE = "table_column_wise"
    #: Each column block's row blocks over the workers of one host, column blocks on different hosts.
    GRID_SHARD = "grid_shard"
    #: Owned row-wise, its values kept by every worker.
    DATA_PARALLEL = "data_parallel"

    @property
    def is_whole(self) -> bool:
        """Whether all row blocks of a table, or of a column block, are on one worker."""
        return self in (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE)

    @property
    def is_host_bound(self) -> bool:
        """Whether a table, or a column block, stays within one host."""
        return self in (ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID_SHARD)

    @property
    def cuts_columns(self) -> bool:
        """Whether a table is cut into columns unless told into how many."""
        return self in (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID_SHARD)


def sharding_of(spec: TableSpec, sharding: Mapping[str, ShardingType]) -> ShardingType:
    """The type of a table, or column block, by its name; ROW_WISE where none is given."""
    return sharding.get(spec.name, ShardingType.ROW_WISE)


def is_whole(spec: TableSpec, sharding: Mapping[str, ShardingType]) -> bool:
    """Whether all row blocks of a table, or column block, live on one worker."""
    return spec.num_blocks == 1 or sharding_of(spec, sharding).is_whole


def host_group(spec: TableSpec, sharding: Mapping[str, ShardingType]) -> str | None:
    """Name that all tables share which have to be on the same host; None where the host does not matter."""
    kind = sharding_of(spec, sharding)
    if not kind.is_host_bound:
        return None
    return spec.name if kind is ShardingType.GRID_SHARD else spec.logical_name
