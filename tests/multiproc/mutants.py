"""Wrong code, put into the workers of a run: what the checks of an elastic run must notice. One function a mutant."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from shoal.actors.copies import CopyHolder
from shoal.actors.shelf import Shelf
from shoal.actors.trainer import Trainer, TrainerSnapshot
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
    imported = RowStore.import_block

    def import_block(self: RowStore, table: int, block: int, rows: Any, **options: Any) -> None:
        bare = dataclasses.replace(rows, slots=torch.zeros_like(rows.slots), count=torch.zeros_like(rows.count))
        imported(self, table, block, bare, **options)

    RowStore.import_block = import_block  # type: ignore[method-assign]


def staging_dropped_early() -> None:
    """A holder forgets staged changes when they should become part of its copy (F3)."""

    def fold_copy(self: CopyHolder, key: Any, copy: Any, step: int) -> None:
        with self._changed:
            while copy.staged and copy.staged[0].is_complete and copy.staged[0].step <= step:
                copy.base = copy.staged.pop(0).step

    CopyHolder._fold_copy = fold_copy  # type: ignore[method-assign]


def cursor_off_by_one() -> None:
    """After a roll-back training goes on with the step after the next one (D2)."""
    rolled_back = Trainer.roll_back

    def roll_back(self: Trainer, snapshot: TrainerSnapshot) -> None:
        rolled_back(self, snapshot)
        self.step += 1

    Trainer.roll_back = roll_back  # type: ignore[method-assign]
