"""Which rows were deleted from a store since a step: what an incremental checkpoint must say beside its rows (K3).

Rows carry the step of their last update, so what was updated since a checkpoint is read off the rows. Of a deleted row
nothing is left to read; its id is kept here until a newer checkpoint has been built on.

1. Of a block that is known since step b, every deletion after step s >= b is told for s. Of any other block nothing is.
2. More may be told: an undone deletion stays. Whoever asks leaves out the ids that exist.
3. A block is unknown again when its rows are replaced or it is no longer owned: others may have deleted in between.
4. Above ``bytes_max`` everything is forgotten: the next checkpoint then writes all rows, which costs less memory.

Used by the thread that trains only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from shoal.kernels.hashing import row_blocks


@dataclasses.dataclass
class _Batch:
    """Ids (int64) deleted from one table; ``until``: of the first checkpoint taken after, None: none yet."""

    table: int
    ids: torch.Tensor
    until: int | None = None


class DeletionLog:
    """Deleted ids of one store. ``num_blocks``: of each table. Costs nothing where nothing is deleted."""

    def __init__(self, num_blocks: Sequence[int], bytes_max: int = 256 * 2**20) -> None:
        self._num_blocks = tuple(num_blocks)
        self._bytes_max = bytes_max
        self._known_since: dict[tuple[int, int], int] = {}
        self._batches: list[_Batch] = []

    @property
    def nbytes(self) -> int:
        return sum(batch.ids.numel() * 8 for batch in self._batches)

    def record(self, table: int, ids: torch.Tensor) -> None:
        """``ids`` (int64) were deleted, or may have been."""
        if ids.numel():
            self._batches.append(_Batch(table, ids.clone()))
            if self.nbytes > self._bytes_max:
                self._batches, self._known_since = [], {}

    def mark_known(self, table: int, block: int, step: int) -> None:
        """The block's rows are now as they are after ``step``, and all later deletions will be recorded."""
        self._known_since[table, block] = min(step, self._known_since.get((table, block), step))

    def forget(self, table: int, block: int) -> None:
        """The block's past is unknown from now on."""
        self._known_since.pop((table, block), None)

    def seal(self, step: int) -> None:
        """A checkpoint of ``step`` is taken now: it is without what was deleted so far."""
        for batch in self._batches:
            if batch.until is None:
                batch.until = step

    def trim(self, step: int) -> None:
        """Nobody will ask for a step before ``step`` any more: give back the memory."""
        self._batches = [batch for batch in self._batches if batch.until is None or batch.until > step]
        self._known_since = {key: max(known, step) for key, known in self._known_since.items()}

    def since(self, step: int) -> Mapping[tuple[int, int], torch.Tensor]:
        """(table, block) -> ids (int64) deleted after the checkpoint of ``step``, for every block whose past is known
        that far back."""
        nothing = torch.empty(0, dtype=torch.int64)
        found = {key: nothing for key, known in self._known_since.items() if known <= step}
        for table, num_blocks in enumerate(self._num_blocks):
            recent = [b.ids for b in self._batches if b.table == table and (b.until is None or b.until > step)]
            if recent:
                ids = torch.unique(torch.cat(recent))
                blocks = row_blocks(ids.numpy(), num_blocks)
                for block in np.unique(blocks).tolist():
                    if (table, block) in found:
                        found[table, block] = ids[torch.from_numpy(blocks == block)]
        return found
