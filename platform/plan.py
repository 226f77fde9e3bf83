"""A plan of tables: an immutable value with what it promises computed from it. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from shoal.kernels.column_blocks import block_name
from shoal.platform.costs import Codec, Flow
from shoal.platform.sharding import ShardingType


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTable:
    """One logical table: how it is cut, and who owns what."""

    table: str
    sharding: ShardingType
    num_row_blocks: int
    #: Of the column blocks, in columns; one: uncut.
    column_widths: tuple[int, ...]
    #: Owner of every (column block, row block).
    owners: tuple[tuple[int, ...], ...]
    flow: Flow
    values_codec: Codec
    gradients_codec: Codec
    #: Per column block: its load (seconds per step; bytes in a plan without profiles), and its bytes in memory with
    #: every id touched.
    block_loads: tuple[float, ...]
    block_bytes: tuple[int, ...]
    #: Rows per step that the owners of one column block serve to all ranks.
    block_rows: float
    #: Per column block: bytes of one rank's step, both directions, if nothing were local.
    block_wire_bytes: tuple[float, ...]
    reason: str
    #: See ``costs.TableProfile``.
    growth: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the data plane's tables."""
        if len(self.column_widths) == 1:
            return (self.table,)
        return tuple(block_name(self.table, index) for index in range(len(self.column_widths)))

    def load_on(self, rank: int) -> float:
        """This table's load on one worker."""
        return sum(
            load * owners.count(rank) / self.num_row_blocks for load, owners in zip(self.block_loads, self.owners)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """All tables on all workers. Loads are seconds of owner's work per step, or bytes where nothing is profiled."""

    #: Host of every worker.
    hosts: tuple[str, ...]
    tables: tuple[PlannedTable, ...]
    is_profiled: bool

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @cached_property
    def worker_loads(self) -> tuple[float, ...]:
        """Expected load of every worker."""
        return self._per_worker(lambda table: table.block_loads)

    @cached_property
    def worker_bytes(self) -> tuple[int, ...]:
        """Bytes of tables of every worker, with every id touched."""
        return tuple(round(size) for size in self._per_worker(lambda table: table.block_bytes))

    @cached_property
    def worker_rows(self) -> tuple[float, ...]:
        """Expected rows that every worker serves per step, its own rank's included."""
        return self._per_worker(lambda table: (table.block_rows,) * len(table.column_widths))

    @cached_property
    def worker_value_bytes(self) -> tuple[float, ...]:
        """Expected float32 bytes of the rows that every worker serves per step."""
        return self._per_worker(lambda table: tuple(4 * width * table.block_rows for width in table.column_widths))

    @property
    def imbalance(self) -> float:
        """The fullest worker's load over the mean; 1 is perfect."""
        mean = sum(self.worker_loads) / self.world_size
        return max(self.worker_loads) / mean if mean else 1.0

    @cached_property
    def exchange_bytes(self) -> tuple[float, float]:
        """Expected bytes per step between workers of all ranks together, flat: (within hosts, between hosts)."""
        size_of = Counter(self.hosts)
        local = network = 0.0
        for table in self.tables:
            for sent, owners in zip(table.block_wire_bytes, table.owners):
                for rank, num_blocks in Counter(owners).items():
                    part = sent * num_blocks / len(owners)
                    on_host = size_of[self.hosts[rank]]
                    local += part * (on_host - 1)
                    network += part * (self.world_size - on_host)
        return local, network

    @cached_property
    def hierarchical_bytes(self) -> tuple[float, float]:
        """The same with the hierarchical exchange. A host of n workers asks another one for the ids that they ask for
        together; what comes by way of a carrier passes within the host once more, but for its own part of 1/n. Pooled
        tables go straight."""
        local, network = self.exchange_bytes
        size_of = Counter(self.hosts)
        for table in self.tables:
            if table.flow != "rows":
                continue
            for sent, owners in zip(table.block_wire_bytes, table.owners):
                for rank, num_blocks in Counter(owners).items():
                    part = sent * num_blocks / len(owners)
                    for host, size in size_of.items():
                        if host != self.hosts[rank]:
                            local += part * (size - 1)
                            network -= part * (size - size**table.growth)
        return local, network

    @property
    def placement(self) -> Mapping[str, tuple[int, ...]]:
        """Name of every table of the data plane -> owner of each row block."""
        return {name: owners for table in self.tables for name, owners in zip(table.names, table.owners)}

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that differ where anything that ranks must agree on does."""
        text = json.dumps([self.hosts, [_agreed(table) for table in self.tables]], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def find(self, table: str) -> PlannedTable:
        """The plan of one table. Raises KeyError."""
        return {found.table: found for found in self.tables}[table]

    def _per_worker(self, values: Callable[[PlannedTable], Sequence[float]]) -> tuple[float, ...]:
        totals = [0.0] * self.world_size
        for table in self.tables:
            for value, owners in zip(values(table), table.owners):
                for rank, num_blocks in Counter(owners).items():
                    totals[rank] += value * num_blocks / len(owners)
        return tuple(totals)


def _agreed(table: PlannedTable) -> list[Any]:
    return [
        table.table,
        table.sharding.value,
        table.num_row_blocks,
        table.column_widths,
        table.owners,
        table.flow,
        table.values_codec,
        table.gradients_codec,
    ]
