"""The rows of one worker: the Python face of the native store (``csrc/core/store``).

Guarantees:

1. A row's initial value is a pure function of (table seed, id, column), the column counted in the logical table;
   evaluation never creates a row.
2. A row exists from the first update that reaches it. Reservations (``resolve`` for training) are invisible to
   ``num_rows``, exports and cuts, and vanish with ``discard_reservations``.
3. ``undo`` restores weights, optimizer state, steps, counts and existence bit for bit (PROTOCOLS C2).
4. A cut reads as the store was when it was opened (C1), from any thread.
5. No result depends on slots, block layout or thread count.
6. ``rollback`` makes owned blocks read as they did at a cut, whatever happened since.
7. A replica block (a copy of another worker's) is not owned: no look-up, update, count, cut, undo or rollback sees it.

Threads: one training thread calls everything, except that any thread may export from a cut and ask what is held, and
one other thread (the importer) may create replica blocks, import into them, apply changes to them, export, check and
drop them while the training thread trains. ``set_replica`` is the training thread's, with no import of that block under
way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shoal.kernels import _core
from shoal.kernels.cut import TORCH_DTYPES, BlockChanges, BlockRows, Cut, export_rows
from shoal.kernels.deletions import DeletionLog
from shoal.kernels.errors import BadIdError, CapacityError, CheckpointError
from shoal.kernels.packed import pack
from shoal.kernels.spec import DataType, TableSpec

_ROW_TYPES = {DataType.FP32: 0, DataType.FP16: 1, DataType.BF16: 2}
_MASK64 = (1 << 64) - 1


def table_descriptor(table: TableSpec) -> _core.TableDesc:
    """The native form of a table's description. Raises ConfigError where the spec is not valid."""
    table.validate()
    optimizer = table.optimizer
    return _core.TableDesc(
        name=table.name,
        num_embeddings=table.num_embeddings,
        dim=table.embedding_dim,
        type=_ROW_TYPES[table.data_type],
        optimizer=int(optimizer.kind),
        decay_mode=int(optimizer.weight_decay_mode),
        eps=optimizer.eps,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        weight_decay=optimizer.weight_decay,
        initial_accumulator=optimizer.initial_accumulator,
        seed=table.seed & _MASK64,
        init_min=table.init_min,
        init_max=table.init_max,
        log2_blocks=table.num_blocks.bit_length() - 1,
        first_column=table.first_column,
        logical_dim=table.logical_dim,
    )


def initial_rows(table: TableSpec, ids: torch.Tensor) -> torch.Tensor:
    """What rows that do not exist read as: int64[n] -> float32[n, D]. Equals ``hashing`` bit for bit."""
    ids = _as_ids(ids)
    rows = torch.empty(ids.numel(), table.embedding_dim)
    _core.initial_rows(table_descriptor(table), ids.data_ptr(), ids.numel(), rows.data_ptr())
    return rows


def _as_ids(ids: torch.Tensor) -> torch.Tensor:
    if ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 1:
        raise ValueError(f"ids must be a vector of int64 or int32, not {ids.dtype} of shape {tuple(ids.shape)}")
    return ids.to(device="cpu", dtype=torch.int64).contiguous()


class RowStore:
    """All rows of one worker: its blocks of every table.

    ``undo_steps`` uncommitted steps can be undone; 0 keeps no undo log and costs nothing. ``version_bytes_max`` bounds
    the saved row versions (C3): above it ``is_version_full`` is true and ``cut`` refuses; updates never fail.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        *,
        num_threads: int = 1,
        undo_steps: int = 2,
        version_bytes_max: int | None = None,
    ) -> None:
        self.tables = tuple(tables)
        self.version_bytes_max = version_bytes_max
        #: The native store, for the step kernels.
        self.native = _core.RowStore([table_descriptor(t) for t in self.tables], num_threads, undo_steps)
        #: What incremental checkpoints have to say about rows that are gone.
        self.deletions = DeletionLog([table.num_blocks for table in self.tables])

    # Blocks.

    def add_block(self, table: int, block: int, *, is_replica: bool = False) -> None:
        """Hold a row block, with no rows, as its owner or as a replica; nothing happens if it is held so already.

        Raises ValueError where it is held the other way: ``set_replica`` promotes and demotes.
        """
        self._check_block(table, block)
        self.native.add_block(table, block, is_replica)

    def add_all_blocks(self) -> None:
        """Own every block of every table: a store that stands alone."""
        for index, table in enumerate(self.tables):
            for block in range(table.num_blocks):
                self.native.add_block(index, block, False)

    def set_replica(self, table: int, block: int, is_replica: bool) -> None:
        """Promote a replica to an owned block, or demote an owned block; its rows stay. O(1), at a step boundary.

        Cuts opened before a demotion still read the block as it was, whatever is imported into it later; a promoted
        block is in the cuts opened from now on. A demotion discards the block's reservations, so no look-up of its rows
        may be in flight. Raises ValueError where the block is not held, RuntimeError inside a step.
        """
        self._check_block(table, block)
        self.native.set_replica(table, block, is_replica)
        self.deletions.forget(table, block)

    def drop_block(self, table: int, block: int) -> None:
        """No longer hold a block, owned (at a step boundary only) or replica. Open cuts still read its rows."""
        self._check_block(table, block)
        self.native.drop_block(table, block)
        self.deletions.forget(table, block)

    def owns(self, table: int, block: int) -> bool:
        """Whether the block is here and not a replica."""
        self._check_block(table, block)
        return self.native.owns(table, block)

    def is_replica(self, table: int, block: int) -> bool:
        self._check_block(table, block)
        return self.native.is_replica(table, block)

    def holds(self, table: int, block: int) -> bool:
        """Whether the block is here, owned or replica."""
        return self.owns(table, block) or self.is_replica(table, block)

    def owned_blocks(self, table: int) -> list[int]:
        return [b for b in range(self.tables[table].num_blocks) if self.native.owns(table, b)]

    def replica_blocks(self, table: int) -> list[int]:
        return [b for b in range(self.tables[table].num_blocks) if self.native.is_replica(table, b)]

    def num_rows(self, table: int | None = None, block: int | None = None) -> int:
        """Rows that exist in owned blocks: of one block, of one table, or of all tables."""
        return self._num_rows(table, block, in_replicas=False)

    def num_replica_rows(self, table: int | None = None, block: int | None = None) -> int:
        """Rows of replica blocks, counted as in :meth:`num_rows`."""
        return self._num_rows(table, block, in_replicas=True)

    def _num_rows(self, table: int | None, block: int | None, *, in_replicas: bool) -> int:
        if table is None:
            return sum(self.native.num_rows(t, in_replicas) for t in range(len(self.tables)))
        if block is None:
            return self.native.num_rows(table, in_replicas)
        self._check_block(table, block)
        return self.native.num_block_rows(table, block, in_replicas)

    def block_checksum(self, table: int, block: int) -> tuple[int, int]:
        """(number of rows, sum of their hashes modulo 2^64) of a held block, as ``rows_checksum`` counts it. O(rows).

        By the thread that may write to the block. Raises ValueError where it is not held.
        """
        self._check_block(table, block)
        return self.native.block_checksum(table, block)

    def nbytes(self) -> dict[str, int]:
        """Bytes in use: ``rows`` (weights, optimizer state, metadata), ``id_map``, ``versions``."""
        return {
            "rows": self.native.arena_bytes(),
            "id_map": self.native.id_map_bytes(),
            "versions": self.native.version_bytes(),
        }

    # Reading and, for tests and tools, writing. The training step goes through the step plan.

    def lookup(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Rows as float32[n, D]; rows that do not exist read as their initial value and are not created.

        ``ids`` int64[n], repeats allowed. Raises BadIdError for an id outside a static table or of a block that is not
        owned here.
        """
        ids = self._checked_ids(table, ids)
        rows = torch.empty(ids.numel(), self.tables[table].embedding_dim)
        self._raise_unowned(table, ids, self.native.lookup(table, ids.data_ptr(), ids.numel(), rows.data_ptr()))
        return rows

    def resolve(self, table: int, ids: torch.Tensor, *, reserve: bool) -> torch.Tensor:
        """Slots of ids, int64[n], -1 where there is no row; with ``reserve`` missing rows are reserved."""
        ids = self._checked_ids(table, ids)
        slots = np.empty(ids.numel(), np.uint32)
        self._raise_unowned(
            table, ids, self.native.resolve(table, ids.data_ptr(), ids.numel(), slots.ctypes.data, reserve)
        )
        return torch.from_numpy(slots.view(np.int32).astype(np.int64))

    def discard_reservations(self) -> None:
        """Forget rows that were reserved but never updated. Only while no lookup is in flight."""
        self.native.discard_reservations()

    def apply(self, table: int, ids: torch.Tensor, gradients: torch.Tensor, *, step: int, lr: float) -> None:
        """One optimizer update of each row. ``ids`` int64[n] distinct, ``gradients`` float32[n, D]; opens ``step``."""
        ids = self._checked_ids(table, ids)
        gradients = gradients.to(torch.float32).contiguous()
        expected = (ids.numel(), self.tables[table].embedding_dim)
        if tuple(gradients.shape) != expected:
            raise ValueError(
                f"gradients of table {self.tables[table].name!r}: {tuple(gradients.shape)}, not {expected}"
            )
        self.native.apply(table, ids.data_ptr(), ids.numel(), gradients.data_ptr(), step, lr)

    def delete(self, table: int, ids: torch.Tensor) -> int:
        """Delete rows; returns how many there were. Inside a step it is undone with the step."""
        ids = _as_ids(ids)
        self.deletions.record(table, ids)
        return self.native.erase(table, ids.data_ptr(), ids.numel())

    # Steps and cuts.

    def begin_step(self, step: int) -> None:
        """Open step ``step``, counted from 1 and growing (it is Adam's t); again for the same step does nothing.

        Raises RuntimeError when ``undo_steps`` earlier steps are neither committed nor undone.
        """
        self.native.begin_step(step)

    def commit(self, step: int) -> None:
        """Steps up to ``step`` can no longer be undone."""
        self.native.commit(step)

    def undo(self, step: int) -> None:
        """Restore the store to its state before ``step``, which must be the last step begun (C2)."""
        self.native.undo(step)

    def cut(self) -> Cut:
        """Freeze a view of the store at a step boundary; O(number of blocks).

        Raises CapacityError while the versions exceed ``version_bytes_max``: release a cut, or wait for one.
        """
        if self.is_version_full():
            raise CapacityError(
                f"row versions use {self.version_bytes()} bytes, version_bytes_max is {self.version_bytes_max}; "
                "release an older cut first or raise the limit"
            )
        return Cut(self.native, self.tables)

    def rollback(self, cut: Cut, step: int) -> None:
        """Make owned blocks read exactly as they did at ``cut``; training goes on with ``begin_step(step + 1)``.

        Weights, optimizer state, steps, counts, existence and deletions, whatever has been applied since: uncommitted
        steps are forgotten, a partly applied one too, and so are reservations, so no look-up may be in flight. The cut
        stays open and can be rolled back to again. Touches only blocks that are owned now and were owned at the cut
        (and neither dropped nor, as a replica, replaced whole between); what became of others is the caller's affair.
        O(rows changed since the cut).

        Raises RuntimeError where a younger cut is not released or ``cut`` is.
        """
        cut.roll_back(step)

    def version_bytes(self) -> int:
        """Bytes of saved row versions: undo logs and open cuts."""
        return self.native.version_bytes()

    def is_version_full(self) -> bool:
        """Whether the saved versions reached ``version_bytes_max``: take an early snapshot, release cuts, or wait."""
        return self.version_bytes_max is not None and self.version_bytes() >= self.version_bytes_max

    # Moving rows.

    def export_block(self, table: int, block: int) -> BlockRows:
        """All rows of a held block as they are now, by the thread that may write to it. Raises ValueError where it is
        not held."""
        self._check_block(table, block)
        return export_rows(self.native, None, self.tables[table], table, block)

    def import_block(self, table: int, block: int, rows: BlockRows, *, replace: bool = True) -> None:
        """Put rows into a held block; at a step boundary, unless it is a replica. ``replace``: they become all its
        rows; otherwise they are added, replacing rows with the same id.

        Raises CheckpointError naming the table, what was expected and what was found where the rows do not fit it, and
        ValueError where an id belongs to another block; nothing has changed then.
        """
        self._check_block(table, block)
        self._check_rows(table, rows)
        self.native.import_rows(table, block, len(rows), *rows.addresses(), replace)
        if replace:
            self.deletions.forget(table, block)

    def import_packed(
        self, table: int, block: int, address: int, num_rows: int, *, replace: bool, expected: int = 0
    ) -> int:
        """``import_block`` for packed rows at a raw address; returns the change of the block's checksum.

        ``expected``: rows that will come, of which these are the first.
        """
        self._check_block(table, block)
        delta = self.native.import_packed(table, block, address, num_rows, replace, expected)
        if replace:
            self.deletions.forget(table, block)
        return delta

    def apply_sections(self, sections: np.ndarray) -> list[tuple[int, str]]:
        """Add or replace rows and delete ids in held blocks; deleting nothing is harmless.

        ``sections`` int64 [n, 6]: table, block, packed rows, deleted ids behind them, and their raw address; the last
        column receives the change of the block's checksum, computed from the rows before and after. At a step boundary,
        unless a block is a replica. Returns (number, reason) of those that do not fit, which changed nothing.
        """
        for table, block in sections[:, :2].tolist():
            self._check_block(table, block)
            self.deletions.forget(table, block)
        return self.native.apply_sections(sections.ctypes.data, len(sections))

    def apply_changes(self, table: int, block: int, changes: BlockChanges) -> int:
        """``apply_sections`` for the columns of one block; returns the change of its checksum: it equals
        ``changes.checksum_delta`` where the block was what the changes start from. Raises as ``import_block`` does.
        """
        self._check_block(table, block)
        self._check_rows(table, changes.rows)
        deleted = _as_ids(changes.deleted)
        data = pack(changes.rows, deleted, self.tables[table])
        section = np.array([[table, block, len(changes.rows), deleted.numel(), data.ctypes.data, 0]], np.int64)
        for _, reason in self.apply_sections(section):
            raise ValueError(reason)
        return int(section[0, 5]) & _MASK64

    def pack_block(self, table: int, block: int) -> _core.BlockPack:
        """``export_block``, to be filled into buffers as packed rows, before the next write to the block."""
        self._check_block(table, block)
        return _core.BlockPack(self.native, None, table, block)

    def _check_rows(self, table: int, rows: BlockRows) -> None:
        spec, n = self.tables[table], rows.ids.numel()
        slot_width = spec.optimizer.slot_width(spec.embedding_dim)
        expected = {
            "ids": (torch.int64, (n,)),
            "weights": (TORCH_DTYPES[spec.data_type], (n, spec.embedding_dim)),
            "slots": (torch.float32, (n, slot_width)),
            "last_step": (torch.int64, (n,)),
            "count": (torch.int64, (n,)),
        }
        wrong = []
        for name, (dtype, shape) in expected.items():
            column = getattr(rows, name)
            if column.dtype != dtype or tuple(column.shape) != shape:
                wrong.append(f"{name}: expected {dtype} {list(shape)}, found {column.dtype} {list(column.shape)}")
            elif not column.is_contiguous() or column.device.type != "cpu":
                wrong.append(f"{name}: expected a contiguous CPU tensor")
        if wrong:
            optimizer = spec.optimizer.kind.name.lower()
            raise CheckpointError(f"rows do not fit table {spec.name!r} (optimizer {optimizer}): {'; '.join(wrong)}")

    def _check_block(self, table: int, block: int) -> None:
        spec = self.tables[table]
        if not 0 <= block < spec.num_blocks:
            raise ValueError(f"table {spec.name!r} has blocks 0 to {spec.num_blocks - 1}, not {block}")

    def _checked_ids(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        ids, spec = _as_ids(ids), self.tables[table]
        if spec.is_static and ids.numel():
            bad = (ids < 0) | (ids >= spec.num_embeddings)
            if bad.any():
                value = int(ids[bad][0])
                raise BadIdError(f"table {spec.name!r}: id {value} is outside [0, {spec.num_embeddings})")
        return ids

    def _raise_unowned(self, table: int, ids: torch.Tensor, position: int) -> None:
        if position >= 0:
            name, value = self.tables[table].name, int(ids[position])
            raise BadIdError(f"table {name!r}: id {value} belongs to a row block that this worker does not own")
