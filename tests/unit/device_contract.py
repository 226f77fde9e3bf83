"""What every holder of rows must do, on whatever device: the cases shared by the native store and the device arena.

Legend: N ids, D width, S floats of optimizer state.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import DataType, OptimizerKind, OptimizerSpec, TableSpec, WeightDecayMode

HUGE_IDS = [0, 1, -1, 1 << 62, -(1 << 63), (1 << 63) - 1, 12345678901234567]


class Rows(Protocol):
    """Rows of one table, found by id; created at their first update."""

    def apply(self, ids: torch.Tensor, grads: torch.Tensor, *, step: int, lr: float) -> None: ...

    def read(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights in the row type [N, D] and state float32 [N, S] of rows that exist."""
        ...

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows that exist, as float32 [N, D]."""
        ...


class NativeRows:
    """The native CPU store."""

    def __init__(self, table: TableSpec) -> None:
        self._store = RowStore([table])
        self._store.add_all_blocks()

    def apply(self, ids: torch.Tensor, grads: torch.Tensor, *, step: int, lr: float) -> None:
        self._store.begin_step(step)
        self._store.apply(0, ids, grads, step=step, lr=lr)
        self._store.commit(step)

    def read(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._store.export_block(0, 0)
        place = {int(row_id): i for i, row_id in enumerate(rows.ids)}
        order = [place[int(row_id)] for row_id in ids]
        return rows.weights[order], rows.slots[order]

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return self._store.lookup(0, ids)


class DeviceRows:
    """A device arena behind a host id map."""

    def __init__(self, table: TableSpec, device: torch.device, log2_chunk_rows: int = 2) -> None:
        from shoal.kernels.device import ops
        from shoal.kernels.device.arena import DeviceArena

        self._ops, self._table, self._device = ops, table, device
        self.arena = DeviceArena(table, device, log2_chunk_rows=log2_chunk_rows)
        self._slots: dict[int, int] = {}

    def slots(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self._slots.get(i, -1) for i in ids.tolist()], dtype=torch.int32, device=self._device)

    def apply(self, ids: torch.Tensor, grads: torch.Tensor, *, step: int, lr: float) -> None:
        new = [i for i in ids.tolist() if i not in self._slots]
        self._slots |= {i: len(self._slots) + k for k, i in enumerate(new)}
        self.arena.reserve(len(self._slots))
        new_ids = torch.tensor(new, dtype=torch.int64)
        self._ops.create(self.arena, self._table, self.slots(new_ids), new_ids.to(self._device))
        self._ops.update(
            self.arena,
            self._table,
            self.slots(ids),
            ids.to(self._device),
            grads.to(self._device),
            step=step,
            lr=lr,
        )

    def read(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, state = self.arena.read(self.slots(ids))
        return weights.cpu(), state.cpu()

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return self._ops.gather(self.arena, self.slots(ids)).cpu()


def make_table(kind: OptimizerKind, data_type: DataType, dim: int, decay: WeightDecayMode) -> TableSpec:
    optimizer = OptimizerSpec(
        kind=kind,
        initial_accumulator=0.125,
        weight_decay=0.01 if decay != WeightDecayMode.NONE else 0.0,
        weight_decay_mode=decay,
    )
    return TableSpec(
        name="t",
        num_embeddings=0,
        embedding_dim=dim,
        data_type=data_type,
        optimizer=optimizer,
        init_min=-0.3,
        init_max=0.2,
        seed=0x9E3779B97F4A7C15 >> 1,
    )


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes, for comparison of bits (NaN equals itself, -0 differs from 0)."""
    return tensor.contiguous().view(torch.uint8).numpy()


def check_training(rows: Rows, table: TableSpec, oracle: Rows) -> None:
    """Both apply the same updates and hold the same bits afterwards: weights, state and lookups."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.tensor(HUGE_IDS)
    for step, lr in ((1, 0.05), (2, 0.1), (7, 0.02)):
        picked = ids[torch.randperm(len(ids), generator=generator)[: 7 if step > 1 else 4]]
        grads = torch.randn((len(picked), table.embedding_dim), generator=generator)
        grads[0] = 0
        for holder in (rows, oracle):
            holder.apply(picked, grads, step=step, lr=lr)
    for left, right in zip(rows.read(ids), oracle.read(ids)):
        assert left.dtype == right.dtype and left.shape == right.shape
        np.testing.assert_array_equal(bits(left), bits(right))
    np.testing.assert_array_equal(bits(rows.lookup(ids)), bits(oracle.lookup(ids)))
