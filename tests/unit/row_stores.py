"""Small stores for tests, and all of a store's rows as a dictionary."""

from __future__ import annotations

import numpy as np
import torch

from shoal.kernels.cut import BlockRows, Cut
from shoal.kernels.hashing import row_blocks
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import DataType, OptimizerKind, OptimizerSpec, TableSpec

HUGE_IDS = [0, 1, -1, 2**63 - 1, -(2**63), 2**62 + 7]


def make_table(name="t", dim=5, data_type=DataType.FP32, kind=OptimizerKind.ROWWISE_ADAGRAD, **options) -> TableSpec:
    options = {"num_embeddings": 0, "num_blocks": 4, "seed": 3, "init_min": -0.2, "init_max": 0.2} | options
    return TableSpec(
        name=name, embedding_dim=dim, data_type=data_type, optimizer=OptimizerSpec(kind=kind), **options
    )  # fmt: skip


def make_store(*tables: TableSpec, **options) -> RowStore:
    store = RowStore(tables or (make_table(),), **options)
    store.add_all_blocks()
    return store


def train(store: RowStore, ids, step: int, table: int = 0, seed: int = 0) -> torch.Tensor:
    ids = torch.as_tensor(ids, dtype=torch.int64)
    gradients = torch.randn(
        len(ids), store.tables[table].embedding_dim, generator=torch.Generator().manual_seed(seed + step)
    )
    store.apply(table, ids, gradients, step=step, lr=0.1)
    return gradients


def rows_as_dict(rows: BlockRows, table: TableSpec, index: int, block: int) -> dict:
    """Rows as {(table, id): (weights, slots, last_step, count)} in bytes, checking their order and block."""
    ids = rows.ids.numpy()
    assert (np.diff(ids.view(np.uint64).astype(object)) > 0).all(), "sorted by id as uint64, without repeats"
    assert (row_blocks(ids, table.num_blocks) == block).all()
    weights, slots = rows.weights.view(torch.uint8).numpy(), rows.slots.view(torch.uint8).numpy()
    return {
        (index, row_id): (weights[i].tobytes(), slots[i].tobytes(), int(rows.last_step[i]), int(rows.count[i]))
        for i, row_id in enumerate(ids.tolist())
    }


def contents(store: RowStore | Cut, tables, owned=None) -> dict:
    """All rows of the blocks `owned` (None: of all blocks), as `rows_as_dict`."""
    found = {}
    for index, table in enumerate(tables):
        for block in range(table.num_blocks):
            if owned is None or (index, block) in owned:
                found |= rows_as_dict(store.export_block(index, block), table, index, block)
    return found


def ids_of_block(block: int, count: int, num_blocks: int = 4) -> torch.Tensor:
    candidates = np.arange(count * num_blocks * 2 + 64)
    return torch.from_numpy(candidates[row_blocks(candidates, num_blocks) == block][:count])


def block_contents(source, block: int, table: int = 0) -> dict:
    return rows_as_dict(source.export_block(table, block), make_table(), table, block)


def trained(num_ids: int = 60, **options) -> RowStore:
    store = make_store(undo_steps=0, **options)
    train(store, range(num_ids), 1)
    return store
