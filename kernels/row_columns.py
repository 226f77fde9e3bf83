"""Columns of rows: cut some out, or put the column blocks of a logical table together. Values are copied, bit for bit.

State of one value per row (row-wise Adagrad) belongs to all columns: a cut keeps it, and blocks that are put together
must agree on it, as on everything else that is a row's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.kernels.cut import BlockRows
from shoal.kernels.spec import OptimizerSpec, TableSpec


def slice_columns(rows: BlockRows, optimizer: OptimizerSpec, start: int, end: int) -> BlockRows:
    """Columns [start, end) of ``rows``; everything else as it is."""
    dim = rows.weights.shape[1]
    if (start, end) == (0, dim):
        return rows
    slots = rows.slots
    if not optimizer.has_row_state:
        parts = [rows.slots[:, at + start : at + end] for at in range(0, rows.slots.shape[1], dim)]
        slots = torch.cat(parts, dim=1) if parts else rows.slots
    return BlockRows(rows.ids, rows.weights[:, start:end].contiguous(), slots, rows.last_step, rows.count)


def join_columns(pieces: Sequence[BlockRows], optimizer: OptimizerSpec) -> BlockRows:
    """The rows whose columns ``pieces`` are, in column order. Raises ValueError where they are not of the same rows."""
    first = pieces[0]
    for number, piece in enumerate(pieces[1:], 1):
        shared = [("ids", first.ids, piece.ids), ("last_step", first.last_step, piece.last_step)]
        shared.append(("count", first.count, piece.count))
        if optimizer.has_row_state:
            # Compared as bits: a NaN equals itself.
            shared.append(("optimizer state", first.slots.view(torch.int32), piece.slots.view(torch.int32)))
        for name, ours, theirs in shared:
            if not torch.equal(ours, theirs):
                raise ValueError(f"column blocks 0 and {number} differ in {name}")
    if len(pieces) == 1:
        return first
    weights = torch.cat([piece.weights for piece in pieces], dim=1)
    slots = first.slots
    if not optimizer.has_row_state:
        dims = [piece.weights.shape[1] for piece in pieces]
        num_slots = first.slots.shape[1] // dims[0]
        parts = [piece.slots[:, s * dim : (s + 1) * dim] for s in range(num_slots) for piece, dim in zip(pieces, dims)]
        slots = torch.cat(parts, dim=1) if parts else first.slots
    return BlockRows(first.ids, weights, slots, first.last_step, first.count)


def move_columns(rows: BlockRows, stored: TableSpec, wanted: TableSpec) -> BlockRows:
    """The columns of ``wanted`` out of rows of ``stored``, blocks of one logical table: all of them are there."""
    start = wanted.first_column - stored.first_column
    return slice_columns(rows, wanted.optimizer, start, start + wanted.embedding_dim)
