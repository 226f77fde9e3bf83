"""Rows taken out of a store: one block's rows as columns, and a frozen view of the whole store (PROTOCOLS C1)."""

from __future__ import annotations

import dataclasses
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from shoal.kernels import _core
from shoal.kernels.spec import DataType, TableSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

TORCH_DTYPES = {DataType.FP32: torch.float32, DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class BlockRows:
    """All state of n rows of one (table, row block), sorted by id as uint64; CPU tensors, contiguous.

    Complete: what these columns hold is what a row is, so an imported row trains on as if it had never moved.
    """

    #: int64[n]; the bit patterns of the ids.
    ids: torch.Tensor
    #: [n, D] in the table's row type.
    weights: torch.Tensor
    #: float32[n, S]: the optimizer state, in the order of ``OptimizerSpec.slots``.
    slots: torch.Tensor
    #: int64[n]: step of the last update.
    last_step: torch.Tensor
    #: int64[n]: number of steps that updated the row.
    count: torch.Tensor

    def __len__(self) -> int:
        return self.ids.numel()

    @property
    def nbytes(self) -> int:
        # Not ``dataclasses.astuple``, which copies every column.
        columns = (self.ids, self.weights, self.slots, self.last_step, self.count)
        return sum(t.numel() * t.element_size() for t in columns)

    @staticmethod
    def empty(table: TableSpec, num_rows: int = 0) -> BlockRows:
        """Uninitialised columns for ``num_rows`` rows of ``table``."""
        slot_width = table.optimizer.slot_width(table.embedding_dim)
        return BlockRows(
            ids=torch.empty(num_rows, dtype=torch.int64),
            weights=torch.empty(num_rows, table.embedding_dim, dtype=TORCH_DTYPES[table.data_type]),
            slots=torch.empty(num_rows, slot_width, dtype=torch.float32),
            last_step=torch.empty(num_rows, dtype=torch.int64),
            count=torch.empty(num_rows, dtype=torch.int64),
        )

    def head(self, num_rows: int) -> BlockRows:
        """The first rows; shares memory with this."""
        return BlockRows(*(column[:num_rows] for column in self.columns()))

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.ids, self.weights, self.slots, self.last_step, self.count

    def addresses(self) -> tuple[int, int, int, int, int]:
        """Raw addresses of the columns, in the order the native code takes them."""
        ids, weights, slots, last_step, count = self.columns()
        return ids.data_ptr(), weights.data_ptr(), slots.data_ptr(), last_step.data_ptr(), count.data_ptr()


@dataclasses.dataclass(frozen=True)
class BlockChanges:
    """What changed in one row block between two cuts; applied to a copy as of the older, it is one of the younger."""

    #: Rows made or updated, as they are at the younger cut.
    rows: BlockRows
    #: int64[m]: ids deleted, sorted as uint64.
    deleted: torch.Tensor
    #: Sum of hash(new row) - hash(old row) over the changes, modulo 2^64: the change of the block's checksum.
    checksum_delta: int

    def __len__(self) -> int:
        return len(self.rows) + self.deleted.numel()

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + 8 * self.deleted.numel()


def rows_checksum(rows: BlockRows) -> int:
    """Sum modulo 2^64 of a 64-bit hash per row over all its state: no order, so parts and changes add up.

    Equals ``hashing.rows_checksum_reference``. Raises ValueError for columns that are not contiguous.
    """
    n = len(rows)
    if not all(column.is_contiguous() for column in rows.columns()):
        raise ValueError("rows_checksum needs contiguous columns")
    weight_bytes = rows.weights.shape[1] * rows.weights.element_size()
    return _core.rows_checksum(n, *rows.addresses(), weight_bytes, rows.slots.shape[1] * 4)


def export_rows(store: _core.RowStore, cut: _core.Cut | None, spec: TableSpec, table: int, block: int) -> BlockRows:
    """Rows of one block from a cut, or from the live store where ``cut`` is None. O(rows), near memory speed."""
    export = _core.BlockExport(store, cut, table, block)
    rows = BlockRows.empty(spec, export.num_rows)
    export.fill(*rows.addresses())
    return rows


class Cut:
    """A frozen view of a store, made by ``RowStore.cut()`` at a step boundary.

    Any thread may export from it while the training thread goes on. Until it is released the store keeps the old value
    of every row that changes (``RowStore.version_bytes``). A context manager; releasing twice is harmless.
    """

    def __init__(self, store: _core.RowStore, tables: Sequence[TableSpec]) -> None:
        self._store = store
        self.tables = tables
        self._cut = _core.Cut(store)

    def export_block(self, table: int, block: int) -> BlockRows:
        """The block's rows as they were at the cut.

        Raises ValueError where the store did not own the block at the cut, RuntimeError after ``release``.
        """
        return export_rows(self._store, self._cut, self.tables[table], table, block)

    def pack_changes(self, since: Cut, keys: Sequence[tuple[int, int]], origin: int = 0) -> _core.ChangePack:
        """Rows of the blocks ``keys`` made or updated, and ids deleted, between the older cut ``since`` and this one,
        to be filled into buffers as sections of packed rows (``kernels.packed``) that name ``origin``.

        Both cuts are open, of one store. A row that was written but is the same again is left out, unless it was
        deleted and made again. O(changed rows); the first of a pair of cuts lists the changes of all blocks.
        Any thread; exports of one cut wait for each other. Raises ValueError where a block was not owned at one of
        the cuts or was dropped between them (send its rows whole then), RuntimeError after ``release``; filling does.
        """
        return _core.ChangePack(self._cut, since._cut, list(keys), origin)

    def pack_block(self, table: int, block: int) -> _core.BlockPack:
        """The block's rows as they were at the cut, packed, in any order. Raises as ``export_block`` does; filling
        raises RuntimeError after ``release``."""
        return _core.BlockPack(self._store, self._cut, table, block)

    def num_changed(self, since: Cut) -> int:
        """An upper bound of the rows that changed, in all blocks, between ``since`` and this cut; cheap. Any thread."""
        return self._cut.num_changed(since._cut)

    def roll_back(self, step: int) -> None:
        """See ``RowStore.rollback``, which calls this."""
        self._cut.roll_back(step)

    def release(self) -> None:
        """Let go of the saved versions; waits for an export of this cut in another thread."""
        self._cut.release()

    def __enter__(self) -> Cut:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
