"""The row store: reservations (guarantee 2), undo (3), export and import."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from row_stores import HUGE_IDS, contents, make_store, make_table, train

from shoal.kernels.cut import BlockRows
from shoal.kernels.errors import BadIdError, CheckpointError
from shoal.kernels.hashing import row_blocks
from shoal.kernels.optim import initial_rows_reference
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import DataType, OptimizerKind


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16, DataType.BF16])
def test_evaluation_reads_initial_values_and_creates_nothing(data_type):
    table = make_table(data_type=data_type)
    store = make_store(table)
    ids = torch.tensor([*HUGE_IDS, 5, 5])
    assert torch.equal(store.lookup(0, ids), initial_rows_reference(table, ids).float())
    assert store.resolve(0, ids, reserve=False).tolist() == [0xFFFFFFFF - 2**32] * 8
    assert store.num_rows() == 0 and store.nbytes()["rows"] == 0
    assert store.lookup(0, torch.empty(0, dtype=torch.int64)).shape == (0, 5)


def test_reserved_rows_exist_only_once_applied():
    store = make_store()
    ids = torch.tensor(HUGE_IDS)
    slots = store.resolve(0, ids, reserve=True)
    assert len(set(slots.tolist())) == len(HUGE_IDS)
    assert torch.equal(store.resolve(0, ids, reserve=True), slots), "a second lookup finds the same slots"
    assert store.num_rows() == 0 and not contents(store, store.tables)
    before = store.lookup(0, ids)
    train(store, ids[:2], 1)
    assert store.num_rows() == 2 and set(contents(store, store.tables)) == {(0, 0), (0, 1)}
    store.discard_reservations()
    assert (store.resolve(0, ids, reserve=False) < 0).tolist() == [False] * 2 + [True] * 4
    assert torch.equal(store.lookup(0, ids[2:]), before[2:])


def test_repeated_missing_ids_of_one_call_share_a_slot():
    store = make_store()
    slots = store.resolve(0, torch.tensor([7, 8, 7, 7, 8, 9]), reserve=True).tolist()
    assert slots[0] == slots[2] == slots[3] and slots[1] == slots[4] and len(set(slots)) == 3


def test_growth_keeps_every_row_and_misses_stay_misses():
    store = make_store(make_table(num_blocks=2), undo_steps=0)
    generator = np.random.default_rng(0)
    ids = torch.from_numpy(generator.integers(-(2**63), 2**63 - 1, 200_000, dtype=np.int64))
    slots = torch.cat([store.resolve(0, part, reserve=True) for part in ids.split(7_001)])
    assert len(torch.unique(slots)) == len(ids)
    assert torch.equal(store.resolve(0, ids.flip(0), reserve=False), slots.flip(0))
    others = torch.from_numpy(generator.integers(-(2**63), 2**63 - 1, 100_000, dtype=np.int64))
    assert (store.resolve(0, others, reserve=False) < 0).all()
    overhead = sum(store.nbytes().values()) / len(ids) - store.tables[0].row_bytes
    assert overhead <= 32, "bytes per row beyond weights and optimizer state"


def test_erase_finds_entries_behind_overflowed_buckets():
    store = make_store(make_table(num_blocks=1))
    ids = torch.arange(20_000)
    train(store, ids, 1)
    store.commit(1)
    assert store.delete(0, ids[::3]) == len(ids[::3])
    assert store.delete(0, ids[::3]) == 0
    assert store.num_rows() == 20_000 - len(ids[::3])
    gone = store.resolve(0, ids, reserve=False) < 0
    assert gone[::3].all() and int(gone.sum()) == len(ids[::3])


def test_steps_count_from_one_and_undo_reaches_only_uncommitted_ones():
    store = make_store(undo_steps=2)
    with pytest.raises(RuntimeError, match="count from 1"):
        store.begin_step(0)
    train(store, [1], 1)
    train(store, [2], 2)
    with pytest.raises(RuntimeError, match="neither committed nor undone"):
        store.begin_step(3)
    with pytest.raises(RuntimeError, match="not the last"):
        store.undo(1)
    store.commit(1)
    train(store, [3], 3)
    store.undo(3)
    store.undo(2)
    assert set(contents(store, store.tables)) == {(0, 1)}
    with pytest.raises(RuntimeError, match="cannot be undone"):
        store.undo(1)
    without = make_store(undo_steps=0)
    train(without, [1], 1)
    assert without.version_bytes() == 0
    with pytest.raises(RuntimeError, match="no undo log"):
        without.undo(1)


def test_redo_after_undo_gives_the_same_bits():
    tables = [make_table(data_type=DataType.BF16, kind=OptimizerKind.ADAM)]
    store, never_undone = make_store(*tables), make_store(*tables)
    for step in range(1, 6):
        ids = range(step, step + 20)
        train(never_undone, ids, step)
        before = contents(store, tables)
        train(store, ids, step, seed=99)
        store.undo(step)
        assert contents(store, tables) == before
        train(store, ids, step)
        store.commit(step)
        never_undone.commit(step)
    assert contents(store, tables) == contents(never_undone, tables)


def test_rows_move_between_stores_and_train_on_unchanged():
    tables = [make_table(kind=OptimizerKind.ADAM), make_table("u", 3, DataType.FP16)]
    source, still, target = make_store(*tables), make_store(*tables), make_store(*tables)
    for step in (1, 2):
        for table in (0, 1):
            for store in (source, still):
                train(store, [*HUGE_IDS, step, 50], step, table)
        source.commit(step)
        still.commit(step)
    for table in (0, 1):
        for block in range(4):
            target.import_block(table, block, source.export_block(table, block))
    train(target, [*HUGE_IDS, 3], 3)
    train(still, [*HUGE_IDS, 3], 3)
    assert contents(target, tables) == contents(still, tables)


def test_import_without_replace_adds_and_overwrites():
    store, other = make_store(), make_store()
    train(store, range(20), 1)
    train(other, range(10, 30), 1, seed=5)
    store.commit(1)
    kept, taken = contents(store, store.tables), contents(other, store.tables)
    for block in range(4):
        store.import_block(0, block, other.export_block(0, block), replace=False)
    assert contents(store, store.tables) == kept | taken
    assert store.num_rows() == 30


def test_import_refuses_rows_that_do_not_fit_naming_table_expected_and_found():
    store = make_store(make_table("clicks"))
    rows = BlockRows.empty(make_table("clicks", dim=6, data_type=DataType.FP16, kind=OptimizerKind.ADAGRAD), 0)
    with pytest.raises(CheckpointError, match=r"clicks.*weights: expected torch.float32 \[0, 5\], found torch.float16"):
        store.import_block(0, 0, rows)
    wrong = BlockRows.empty(store.tables[0], 1)
    wrong.ids[0] = next(i for i in range(100) if row_blocks(np.array([i]), 4)[0] == 2)
    train(store, [1], 1)
    store.commit(1)
    before = contents(store, store.tables)
    with pytest.raises(ValueError, match=r"clicks.*belongs to block 2, not to block 1"):
        store.import_block(0, 1, wrong)
    assert contents(store, store.tables) == before
    train(store, [1], 2)
    with pytest.raises(RuntimeError, match="step boundary"):
        store.import_block(0, 2, wrong)


def test_unowned_blocks_and_ids_outside_a_static_table_are_refused():
    table = make_table("ages", num_embeddings=100)
    store = RowStore([table])
    block = int(row_blocks(np.array([7]), 4)[0])
    with pytest.raises(BadIdError, match=r"ages.*id 7 .*not own"):
        store.lookup(0, torch.tensor([7]))
    store.add_block(0, block)
    assert store.owns(0, block) and store.owned_blocks(0) == [block]
    store.lookup(0, torch.tensor([7]))
    for bad in (100, -1, 2**40):
        with pytest.raises(BadIdError, match=f"ages.*id {bad} is outside"):
            store.lookup(0, torch.tensor([bad]))
    store.drop_block(0, block)
    assert not store.owns(0, block)
    with pytest.raises(ValueError, match=r"ages.*not owned"):
        store.export_block(0, block)
