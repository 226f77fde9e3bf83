"""Rows of column blocks in the store: their bits are those of the same columns of the uncut table."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from row_stores import HUGE_IDS, make_table

from shoal.kernels.column_blocks import cut_columns
from shoal.kernels.optim import apply_reference, initial_rows_reference, initial_state
from shoal.kernels.rowstore import RowStore, initial_rows
from shoal.kernels.spec import DataType, OptimizerKind, TableSpec

WIDTHS = (8, 5, 1, 19)
IDS = torch.tensor([*HUGE_IDS, *range(3, 40)])
TYPES = [DataType.FP32, DataType.FP16, DataType.BF16]


def wide_table(**fields) -> TableSpec:
    return dataclasses.replace(make_table(**fields), embedding_dim=sum(WIDTHS))


@pytest.mark.parametrize("data_type", TYPES)
def test_initial_values_are_those_of_the_uncut_table(data_type):
    table = wide_table(data_type=data_type)
    whole = initial_rows(table, IDS)
    blocks = cut_columns(table, WIDTHS)
    assert torch.equal(torch.cat([initial_rows(block, IDS) for block in blocks], dim=1), whole)
    for block, expected in zip(blocks, whole.split(WIDTHS, dim=1)):
        assert torch.equal(initial_rows_reference(block, IDS).float(), expected)


@pytest.mark.parametrize("data_type", TYPES)
@pytest.mark.parametrize("kind", [OptimizerKind.SGD, OptimizerKind.ADAGRAD, OptimizerKind.ADAM])
def test_training_of_column_blocks_gives_the_bits_of_the_uncut_table(kind, data_type):
    table = wide_table(kind=kind, data_type=data_type)
    blocks = cut_columns(table, WIDTHS)
    store = RowStore([table, *blocks])
    store.add_all_blocks()
    for step in range(1, 6):
        gradients = torch.randn(len(IDS), table.embedding_dim, generator=torch.Generator().manual_seed(step))
        store.apply(0, IDS, gradients, step=step, lr=0.1)
        for number, part in enumerate(gradients.split(WIDTHS, dim=1), 1):
            store.apply(number, IDS, part, step=step, lr=0.1)
        store.commit(step)
    assert torch.equal(torch.cat([store.lookup(n, IDS) for n in range(1, 5)], dim=1), store.lookup(0, IDS))


def test_one_update_of_a_block_equals_its_reference():
    block = cut_columns(wide_table(kind=OptimizerKind.ADAM, data_type=DataType.BF16), WIDTHS)[3]
    store = RowStore([block])
    store.add_all_blocks()
    gradients = torch.randn(len(IDS), block.embedding_dim, generator=torch.Generator().manual_seed(0))
    store.apply(0, IDS, gradients, step=1, lr=0.1)
    state = initial_state(block.optimizer, len(IDS), block.embedding_dim)
    weights, _ = apply_reference(block, IDS, initial_rows_reference(block, IDS), state, gradients, step=1, lr=0.1)
    assert torch.equal(store.lookup(0, IDS), weights.float())
