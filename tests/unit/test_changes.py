"""Changes between cuts and the checksums that confirm them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from row_stores import HUGE_IDS, contents, ids_of_block, make_store, make_table, rows_as_dict, train, trained

from shoal.kernels.cut import BlockChanges, BlockRows, rows_checksum
from shoal.kernels.errors import CheckpointError
from shoal.kernels.hashing import rows_checksum_reference
from shoal.kernels.packed import export_changes
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import DataType, OptimizerKind

NO_IDS = torch.empty(0, dtype=torch.int64)


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16, DataType.BF16])
@pytest.mark.parametrize("kind", list(OptimizerKind))
@pytest.mark.parametrize("dim", [1, 3, 8, 65])
def test_native_checksums_equal_numpy(dim, data_type, kind):
    store = make_store(make_table(dim=dim, data_type=data_type, kind=kind))
    train(store, [*range(-50, 50), *HUGE_IDS[3:]], 1)
    store.commit(1)
    train(store, range(-20, 50), 2)
    for block in range(4):
        rows = store.export_block(0, block)
        weights = rows.weights.view(torch.int32 if data_type == DataType.FP32 else torch.int16).numpy()
        columns = [c.numpy() for c in (rows.ids, rows.last_step, rows.count, rows.slots)]
        expected = rows_checksum_reference(*columns, weights)
        assert rows_checksum(rows) == expected
        assert store.block_checksum(0, block) == (len(rows), expected)


def test_a_checksum_sees_every_column_and_is_fixed():
    rows = BlockRows.empty(make_table(dim=3, kind=OptimizerKind.ADAGRAD), 2)
    rows.ids.copy_(torch.tensor([1, -2]))
    for i, column in enumerate((rows.weights, rows.slots, rows.last_step, rows.count)):
        column.fill_(i + 1)
    first = rows_checksum(rows)
    assert first == 0x5B5D0E60AA499867, "pinned: workers of one run may be of two builds"
    for column in (rows.ids, rows.weights, rows.slots, rows.last_step, rows.count):
        flat = column.view(-1)
        for place in range(flat.numel()):
            kept = flat[place].item()
            flat[place] += 1
            assert rows_checksum(rows) != first
            flat[place] = kept
    assert rows_checksum(rows.head(0)) == 0
    assert (rows_checksum(rows.head(1)) + rows_checksum(BlockRows(*(c[1:] for c in rows.columns())))) % 2**64 == first


def test_changes_are_exact_and_carry_a_copy_from_cut_to_cut():
    store, copied = trained(), RowStore([make_table()], undo_steps=0)
    cut = store.cut()
    for block in range(4):
        copied.add_block(0, block, is_replica=True)
        copied.import_block(0, block, cut.export_block(0, block))
    for step in range(2, 7):
        since = cut
        before = contents(since, store.tables)
        train(store, range(step * 7, step * 7 + 40), step)
        store.delete(0, torch.arange(step * 5, step * 5 + 3))
        train(store, [step * 5], step)  # Deleted and made again: another slot.
        cut = store.cut()
        after = contents(cut, store.tables)
        num_changed = 0
        for block in range(4):
            changes = export_changes(cut, since, 0, block)
            changed = rows_as_dict(changes.rows, store.tables[0], 0, block)
            assert changed == {k: v for k, v in after.items() if before.get(k) != v and k[1] in changes.rows.ids}
            assert copied.apply_changes(0, block, changes) == changes.checksum_delta
            assert copied.block_checksum(0, block) == store.block_checksum(0, block)
            assert changes.nbytes == changes.rows.nbytes + 8 * len(changes.deleted)
            num_changed += len(changes)
        assert num_changed == len(after.keys() | before.keys()) - sum(before.get(k) == v for k, v in after.items())
        assert num_changed <= cut.num_changed(since)
        since.release()
        assert contents(copied, store.tables) == after


def test_rows_written_but_equal_again_are_no_change():
    store = trained()
    since = store.cut()
    train(store, range(40), 2)
    store.rollback(since, 1)
    train(store, [3], 2)
    cut = store.cut()
    assert sum(len(export_changes(cut, since, 0, b)) for b in range(4)) == 1
    assert cut.num_changed(since) == 40


def test_changes_need_an_older_open_cut_and_one_life_of_the_block():
    store = trained()
    first = store.cut()
    store.set_replica(0, 1, True)
    second = store.cut()
    for since, cut in ((first, first), (second, first), (trained().cut(), second)):
        with pytest.raises(ValueError, match="older cut"):
            export_changes(cut, since, 0, 0)
    with pytest.raises(ValueError, match="block 1 is not owned"):
        export_changes(second, first, 0, 1)
    store.set_replica(0, 1, False)
    store.drop_block(0, 2)
    store.add_block(0, 2)
    third = store.cut()
    with pytest.raises(ValueError, match="block 1 was not owned at the older cut"):
        export_changes(third, second, 0, 1)
    assert len(export_changes(third, first, 0, 1)) == 0
    with pytest.raises(ValueError, match="block 2 was not owned at the older cut"):
        export_changes(third, first, 0, 2)
    first.release()
    with pytest.raises(RuntimeError, match="released"):
        export_changes(third, first, 0, 0)


def test_changes_survive_the_release_of_a_cut_between():
    store = trained()
    since = store.cut()
    train(store, range(0, 40), 2)
    between = store.cut()
    train(store, range(20, 80), 3)
    cut = store.cut()
    expected = [rows_checksum(export_changes(cut, since, 0, b).rows) for b in range(4)]
    between.release()
    train(store, range(5), 4)  # Folds the released layer.
    assert [rows_checksum(export_changes(cut, since, 0, b).rows) for b in range(4)] == expected
    later = store.cut()
    assert sum(len(export_changes(later, since, 0, b)) for b in range(4)) == 80


def test_changes_that_do_not_fit_change_nothing():
    store = trained()
    before = contents(store, store.tables)
    rows = BlockRows.empty(make_table(dim=6), 0)
    with pytest.raises(CheckpointError, match="rows do not fit table 't'"):
        store.apply_changes(0, 0, BlockChanges(rows, NO_IDS, 0))
    with pytest.raises(ValueError, match="belongs to block 1, not to block 0"):
        store.apply_changes(0, 0, BlockChanges(BlockRows.empty(store.tables[0]), ids_of_block(1, 1), 0))
    with pytest.raises(ValueError, match="blocks 0 to 3"):
        store.apply_changes(0, 4, BlockChanges(BlockRows.empty(store.tables[0]), NO_IDS, 0))
    assert contents(store, store.tables) == before
    store.drop_block(0, 0)
    with pytest.raises(ValueError, match="block 0 is not held"):
        store.apply_changes(0, 0, BlockChanges(BlockRows.empty(store.tables[0]), NO_IDS, 0))
