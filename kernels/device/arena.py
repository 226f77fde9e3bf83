"""Rows on a device: fixed chunks of records and a table of their base addresses. Growth copies nothing.

The device half of the row store: ids, id maps, steps and access counts stay on the host, which hands the device slot
numbers. A record is the optimizer state (float32), padded to 16 bytes, then the weights in the table's row type.

Legend: N slots, D width, S floats of optimizer state.
"""

from __future__ import annotations

import torch

from shoal.kernels.errors import CapacityError, ConfigError
from shoal.kernels.spec import ROW_DTYPE_BYTES, DataType, TableSpec

_ROW_DTYPES = {DataType.FP32: torch.float32, DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}
_ALIGNMENT_BYTES = 16

#: The slot of an id that has no row.
NO_SLOT = -1


class DeviceArena:
    """Records of one (width, row type, optimizer) on one device.

    Args:
        table: gives width, row type and optimizer; several tables with the same ones may share an arena.
        device: a CUDA device, or the CPU when kernels run in Triton's interpreter.
        log2_chunk_rows: records per chunk, as a power of two.
        num_slots_max: limit; reserving beyond it raises CapacityError.

    Raises ConfigError for a column block of a wider table.
    """

    def __init__(
        self, table: TableSpec, device: torch.device, *, log2_chunk_rows: int = 16, num_slots_max: int = 1 << 31
    ) -> None:
        if table.columns is not None:
            raise ConfigError(f"table {table.name!r}: column blocks are kept on the CPU only")
        self.dim = table.embedding_dim
        self.slot_width = table.optimizer.slot_width(self.dim)
        self.data_type = table.data_type
        self.dtype = _ROW_DTYPES[table.data_type]
        self.device = device
        self.log2_chunk_rows = log2_chunk_rows
        self.num_slots_max = num_slots_max
        self.weights_offset = _aligned(4 * self.slot_width)
        self.stride = _aligned(self.weights_offset + self.dim * ROW_DTYPE_BYTES[table.data_type])
        self.num_slots = 0
        self._chunks: list[torch.Tensor] = []
        #: int64 [chunks] on the device: address of each chunk.
        self.addresses = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return len(self._chunks) * (self.stride << self.log2_chunk_rows)

    def reserve(self, num_slots: int) -> None:
        """Make slots 0 .. num_slots-1 addressable. Existing records stay where they are; new ones are undefined."""
        if num_slots > self.num_slots_max:
            raise CapacityError(
                f"device arena of width {self.dim}: {num_slots} rows do not fit num_slots_max={self.num_slots_max}"
            )
        num_chunks = -(-num_slots >> self.log2_chunk_rows)
        grown = len(self._chunks) < num_chunks
        while len(self._chunks) < num_chunks:
            chunk_bytes = self.stride << self.log2_chunk_rows
            self._chunks.append(torch.empty(chunk_bytes, dtype=torch.uint8, device=self.device))
        if grown:
            self.addresses = torch.tensor([chunk.data_ptr() for chunk in self._chunks], dtype=torch.int64).to(
                self.device
            )
        self.num_slots = max(self.num_slots, num_slots)

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [N, D] in the row type and state float32 [N, S] of existing slots; plain torch, for tests."""
        records = torch.stack([self._record(slot) for slot in slots.tolist()]) if len(slots) else self._no_records()
        state = records[:, : 4 * self.slot_width].contiguous().view(torch.float32)
        return records[:, self.weights_offset : self._end()].contiguous().view(self.dtype), state

    def write(self, slots: torch.Tensor, weights: torch.Tensor, state: torch.Tensor) -> None:
        """Overwrite whole records; plain torch, for tests."""
        for position, slot in enumerate(slots.tolist()):
            record = self._record(slot)
            record[: 4 * self.slot_width] = state[position].contiguous().view(torch.uint8)
            record[self.weights_offset : self._end()] = weights[position].contiguous().view(torch.uint8)

    def _end(self) -> int:
        return self.weights_offset + self.dim * ROW_DTYPE_BYTES[self.data_type]

    def _record(self, slot: int) -> torch.Tensor:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} is outside the arena's {self.num_slots} slots")
        start = (slot & ((1 << self.log2_chunk_rows) - 1)) * self.stride
        return self._chunks[slot >> self.log2_chunk_rows][start : start + self.stride]

    def _no_records(self) -> torch.Tensor:
        return torch.empty((0, self.stride), dtype=torch.uint8, device=self.device)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
