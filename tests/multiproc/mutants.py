"""Wrong code, put into the workers of a run: what the checks of an elastic run must notice. One function a mutant."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from shoal.actors.copies import CopyHolder
from shoal.actors.shelf import Shelf
from shoal.actors.trainer import Trainer, TrainerSnapshot
from shoal.kernels.cut import rows_checksum
from shoal.kernels.packed import record_type, unpack
from shoal.kernels.rowstore import RowStore


def versions_released_early() -> None:
    """Undo depth 1: a snapshot lets the one before it go, although it is not complete on all ranks yet (C2, F3)."""
    opened = Shelf.open

    def open_(self: Shelf, step: int, *args: Any) -> Any:
        self.retire(below=step)
        return opened(self, step, *args)

    Shelf.open = open_  # type: ignore[method-assign]


def versions_not_transferred() -> None:
    """A row that moves leaves its optimizer state, last step and count behind (C1, V2)."""
    imported = RowStore.import_packed

    def import_packed(self: RowStore, table: int, block: int, address: int, num_rows: int, **options: Any) -> int:
        spec = self.tables[table]
        form = record_type(spec)
        received = np.frombuffer((ctypes.c_uint8 * (num_rows * form.itemsize)).from_address(address), np.uint8)
        bare = received.copy().view(form)
        bare["slots"], bare["count"] = 0, 0
        imported(self, table, block, bare.ctypes.data, num_rows, **options)
        return rows_checksum(unpack(received, num_rows, 0, spec)[0])

    RowStore.import_packed = import_packed  # type: ignore[method-assign]


def staging_dropped_early() -> None:
    """A holder forgets staged changes when they should become part of its copy (F3)."""

    def fold_batch(self: CopyHolder, batch: Any) -> None:
        with self._changed:
            for _, copy, staged in batch:
                copy.staged.pop(0)
                copy.base = staged.step

    CopyHolder._fold_batch = fold_batch  # type: ignore[method-assign]


def cursor_off_by_one() -> None:
    """After a roll-back training goes on with the step after the next one (D2)."""
    rolled_back = Trainer.roll_back

    def roll_back(self: Trainer, snapshot: TrainerSnapshot) -> None:
        rolled_back(self, snapshot)
        self.step += 1

    Trainer.roll_back = roll_back  # type: ignore[method-assign]
