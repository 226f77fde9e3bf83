"""ShardHost: the shards one rank owns in a view, and how they reach and leave storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shoal.actors.datafile import METRICS_PREFIX, FileEntry, PlannedFile
from shoal.actors.messages import BlockSet
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
    """The row store of one worker, filled with the row blocks that views and checkpoints give it."""

    def __init__(self, tables: Sequence[TableSpec], *, num_threads: int, version_bytes_max: int | None = None) -> None:
        self.tables = tuple(tables)
        # No undo log: a recovery rolls back to a snapshot's cut, and a skipped step never reaches the rows.
        self.store = RowStore(self.tables, num_threads=num_threads, undo_steps=0, version_bytes_max=version_bytes_max)
        #: Table name -> row blocks owned in the current view; replaced, never changed.
        self.owned: Mapping[str, tuple[int, ...]] = {}

    def take(self, blocks: BlockSet) -> None:
        """Own exactly ``blocks``, all of which are in the store."""
        owned = blocks.as_dict()
        self.owned = {table.name: owned.get(table.name, ()) for table in self.tables}

    def assign(self, blocks: BlockSet) -> None:
        """Own exactly ``blocks``. Blocks that are not in the store yet begin without rows; none is dropped."""
        self.take(blocks)
        for number, table in enumerate(self.tables):
            for block in self.owned[table.name]:
                self.store.add_block(number, block)

    def num_rows(self) -> int:
        """Rows of the blocks it owns."""
        return self.store.num_rows()

    def restore_rows(self, restore: Restore, storage: Any, blocks: Mapping[str, Sequence[int]] | None = None) -> None:
        """Replace the rows of ``blocks`` (all it owns by default) by those of the checkpoint."""
        blocks = self.owned if blocks is None else blocks
        load_rows(self.store, self.tables, blocks, restore.parts, storage)

    def restore(self, restore: Restore, storage: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], Mapping[str, Any]]:
        """Load this rank's rows; returns (dense state tensors, metric state tensors, metadata) of the checkpoint."""
        self.restore_rows(restore, storage)
        # Later checkpoints may build on this one. Not so where only some blocks are loaded (partial recovery): another
        # checkpoint, newer than theirs, may be built on next. Tables without parts start afresh, whatever is stored.
        loaded = {part.table for part in restore.parts}
        for number, table in enumerate(self.tables):
            for block in self.owned[table.name] if table.name in loaded else ():
                self.store.deletions.mark_known(number, block, restore.step)
        tensors, metadata = read_dense(storage, restore.directory, restore.dense)
        metrics = {name[len(METRICS_PREFIX) :]: t for name, t in tensors.items() if name.startswith(METRICS_PREFIX)}
        return {name: t for name, t in tensors.items() if not name.startswith(METRICS_PREFIX)}, metrics, metadata
