"""Packed rows: what a row is between workers, one record after the other (csrc/core/store/packed.h, in numpy).

The native code packs and applies them; here is what they look like, for what needs columns.

Legend: N rows, M deleted ids, D embedding_dim, S float32 values of optimizer state per row.
"""

from __future__ import annotations

import numpy as np
import torch

from shoal.kernels import _core
from shoal.kernels.cut import BlockChanges, BlockRows, Cut
from shoal.kernels.spec import DataType, TableSpec

BlockPack = _core.BlockPack

#: Of a section: table, block, rows, deleted ids, origin, total, checksum, whether it is the block's last (int64 each).
SECTION_BYTES = 64
_COUNT_MAX = 2**30 - 1


def record_type(table: TableSpec) -> np.dtype:
    """A packed record: id, step of the last update, count, optimizer state, weights; padded to 4 bytes. Half precision
    weights are the bits."""
    slot_width = table.optimizer.slot_width(table.embedding_dim)
    weight = np.dtype("<f4" if table.data_type is DataType.FP32 else "<i2")
    weights_at = 16 + 4 * slot_width
    return np.dtype(
        {
            "names": ["id", "last_step", "count", "slots", "weights"],
            "formats": ["<i8", "<i4", "<u4", ("<f4", (slot_width,)), (weight, (table.embedding_dim,))],
            "offsets": [0, 8, 12, 16, weights_at],
            "itemsize": -(-(weights_at + weight.itemsize * table.embedding_dim) // 4) * 4,
        }
    )


def pack(rows: BlockRows, deleted: torch.Tensor, table: TableSpec) -> np.ndarray:
    """uint8: N packed records, then M ids."""
    records = np.zeros(len(rows), record_type(table))
    records["id"], records["last_step"] = rows.ids.numpy(), rows.last_step.numpy()
    records["count"] = np.minimum(rows.count.numpy(), _COUNT_MAX)
    records["slots"] = rows.slots.numpy()
    weights = rows.weights if table.data_type is DataType.FP32 else rows.weights.view(torch.int16)
    records["weights"] = weights.numpy()
    return np.concatenate([records.view(np.uint8).reshape(-1), deleted.numpy().view(np.uint8)])


def unpack(data: np.ndarray, num_rows: int, num_deleted: int, table: TableSpec) -> tuple[BlockRows, torch.Tensor]:
    """Inverse of ``pack``; rows and ids sorted by id as uint64."""
    form = record_type(table)
    end = num_rows * form.itemsize
    records = data[:end].view(form)
    records = records[np.argsort(records["id"].view(np.uint64))]
    deleted = np.sort(data[end : end + 8 * num_deleted].copy().view(np.uint64)).view(np.int64)
    rows = BlockRows.empty(table, num_rows)
    weights = rows.weights if table.data_type is DataType.FP32 else rows.weights.view(torch.int16)
    columns = {
        "id": rows.ids,
        "last_step": rows.last_step,
        "count": rows.count,
        "slots": rows.slots,
        "weights": weights,
    }
    for name, column in columns.items():
        column.numpy()[...] = records[name]
    return rows, torch.from_numpy(deleted)


def export_changes(cut: Cut, since: Cut, table: int, block: int) -> BlockChanges:
    """What changed in one block between two cuts, as columns. Raises as ``Cut.pack_changes`` does."""
    changes = cut.pack_changes(since, [(table, block)])
    buffer = np.empty(-(-changes.bytes_max // 8) * 8, np.uint8)
    changes.fill(buffer.ctypes.data, buffer.size)
    num_rows, num_deleted = buffer[:SECTION_BYTES].view(np.int64)[2:4].tolist() if changes.num_sections else (0, 0)
    rows, deleted = unpack(buffer[SECTION_BYTES:], num_rows, num_deleted, cut.tables[table])
    return BlockChanges(rows, deleted, changes.checksum_deltas[0])


def crc32c(data: np.ndarray, crc: int = 0) -> int:
    """CRC-32C of contiguous bytes, continued from ``crc``."""
    return _core.crc32c(crc, data.ctypes.data, data.size)


def crc32c_quarters(data: np.ndarray) -> int:
    """A 32-bit check of a large buffer of uint8, at memory speed: the CRC-32C of those of its quarters and rest."""
    return _core.crc32c_quarters(data.ctypes.data, data.size)
