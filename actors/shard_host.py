"""ShardHost: the shards one rank owns in a view, and how they reach and leave storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shoal.actors.datafile import METRICS_PREFIX, FileEntry, PlannedFile
from shoal.actors.messages import View
from shoal.actors.restore import load_rows, read_dense
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import TableSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restore:
    """What one rank reads of a checkpoint; the controller plans it from the manifest and the placement."""

    #: Steps applied when it was taken: training goes on with this step.
    step: int
    directory: str
    parts: tuple[PlannedFile, ...]
    dense: FileEntry


class ShardHost:
    """The row store of one rank, filled with the row blocks the view gives it."""

    def __init__(self, tables: Sequence[TableSpec], view: View, rank: int, *, num_threads: int) -> None:
        self.tables = tuple(tables)
        self.rank = rank
        # No undo log: a failed step ends the run, and a skipped one never reaches the rows.
        self.store = RowStore(self.tables, num_threads=num_threads, undo_steps=0)
        self.owned: dict[str, tuple[int, ...]] = {}
        for index, table in enumerate(self.tables):
            blocks = tuple(b for b, owner in enumerate(view.placement[table.name]) if owner == rank)
            for block in blocks:
                self.store.add_block(index, block)
            self.owned[table.name] = blocks

    def restore(self, restore: Restore, storage: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], Mapping[str, Any]]:
        """Load this rank's rows; returns (dense state tensors, metric state tensors, metadata) of the checkpoint."""
        load_rows(self.store, self.tables, self.owned, restore.parts, storage)
        tensors, metadata = read_dense(storage, restore.directory, restore.dense)
        metrics = {name[len(METRICS_PREFIX) :]: t for name, t in tensors.items() if name.startswith(METRICS_PREFIX)}
        return {name: t for name, t in tensors.items() if not name.startswith(METRICS_PREFIX)}, metrics, metadata
