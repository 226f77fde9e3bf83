"""Replicas, changes between cuts, checksums and roll-back: what elastic protection is made of (guarantees 4, 6, 7)."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from row_stores import HUGE_IDS, contents, make_store, make_table, rows_as_dict, train

from shoal.kernels.cut import BlockChanges, BlockRows, rows_checksum
from shoal.kernels.errors import BadIdError, CheckpointError
from shoal.kernels.hashing import row_blocks, rows_checksum_reference
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import DataType, OptimizerKind

NO_IDS = torch.empty(0, dtype=torch.int64)


def ids_of_block(block: int, count: int, num_blocks: int = 4) -> torch.Tensor:
    candidates = np.arange(count * num_blocks * 2 + 64)
    return torch.from_numpy(candidates[row_blocks(candidates, num_blocks) == block][:count])


def block_contents(source, block: int, table: int = 0) -> dict:
    return rows_as_dict(source.export_block(table, block), make_table(), table, block)


def trained(num_ids: int = 60, **options) -> RowStore:
    store = make_store(undo_steps=0, **options)
    train(store, range(num_ids), 1)
    return store


def test_a_replica_is_held_but_not_owned():
    source, store = trained(), RowStore([make_table()])
    store.add_block(0, 1)
    store.add_block(0, 2, is_replica=True)
    store.import_block(0, 2, source.export_block(0, 2))
    assert store.owned_blocks(0) == [1] and store.replica_blocks(0) == [2]
    assert [store.owns(0, b) for b in range(4)] == [False, True, False, False]
    assert [store.holds(0, b) for b in range(4)] == [False, True, True, False]
    assert store.num_rows() == store.num_rows(0, 2) == 0
    assert store.num_replica_rows() == store.num_replica_rows(0, 2) == source.num_rows(0, 2) > 0
    for call in (store.lookup, lambda t, ids: store.resolve(t, ids, reserve=True)):
        with pytest.raises(BadIdError, match="not own"):
            call(0, ids_of_block(2, 1))
    assert store.delete(0, ids_of_block(2, 5)) == 0
    assert block_contents(store, 2) == block_contents(source, 2)


def test_a_block_is_held_one_way_at_a_time():
    store = RowStore([make_table()])
    store.add_block(0, 0)
    store.add_block(0, 0)
    store.add_block(0, 1, is_replica=True)
    store.add_block(0, 1, is_replica=True)
    with pytest.raises(ValueError, match=r"'t': block 0 is owned already"):
        store.add_block(0, 0, is_replica=True)
    with pytest.raises(ValueError, match=r"'t': block 1 is a replica already"):
        store.add_block(0, 1)
    with pytest.raises(ValueError, match=r"'t': block 3 is not held"):
        store.set_replica(0, 3, True)
    store.set_replica(0, 0, False)
    store.set_replica(0, 1, True)
    assert store.owns(0, 0) and store.is_replica(0, 1)


def test_promoted_rows_train_on_as_if_they_had_never_moved():
    source, still, target = trained(), trained(), RowStore([make_table()], undo_steps=0)
    for block in range(4):
        target.add_block(0, block, is_replica=True)
        target.import_block(0, block, source.export_block(0, block))
        target.set_replica(0, block, False)
    target.begin_step(1)
    train(target, range(30, 90), 2)
    train(still, range(30, 90), 2)
    assert contents(target, target.tables) == contents(still, still.tables)


def test_only_a_boundary_promotes_demotes_and_drops():
    store = make_store(undo_steps=2)
    store.add_block(0, 0)
    train(store, range(10), 1)
    for call in (lambda: store.set_replica(0, 0, True), lambda: store.drop_block(0, 0)):
        with pytest.raises(RuntimeError, match="step boundary"):
            call()
    store.commit(1)
    store.set_replica(0, 0, True)
    train(store, ids_of_block(1, 5), 2)
    with pytest.raises(RuntimeError, match="step boundary"):
        store.set_replica(0, 0, False)
    store.drop_block(0, 0)  # A replica is no part of the step.
    assert not store.holds(0, 0)


def test_cuts_show_blocks_that_were_owned_at_the_cut():
    store = trained()
    frozen = block_contents(store, 0)
    with store.cut() as owned_cut:
        store.set_replica(0, 0, True)
        with store.cut() as cut:
            with pytest.raises(ValueError, match="not owned"):
                cut.export_block(0, 0)
            store.set_replica(0, 0, False)
            with pytest.raises(ValueError, match="not owned"):
                cut.export_block(0, 0)
            with store.cut() as later:
                assert block_contents(later, 0) == frozen
        assert block_contents(owned_cut, 0) == frozen


@pytest.mark.parametrize("replace", [False, True])
def test_a_demoted_block_reads_through_older_cuts_as_it_was(replace):
    store, other = trained(), trained(90)
    train(other, range(90), 2, seed=7)
    frozen = block_contents(store, 0)
    cut = store.cut()
    store.set_replica(0, 0, True)
    store.import_block(0, 0, other.export_block(0, 0), replace=replace)
    assert block_contents(cut, 0) == frozen
    gone = BlockChanges(BlockRows.empty(store.tables[0]), ids_of_block(0, 8), 0)
    store.apply_changes(0, 0, gone)
    assert block_contents(cut, 0) == frozen
    store.drop_block(0, 0)
    assert block_contents(cut, 0) == frozen
    store.add_block(0, 0)
    train(store, ids_of_block(0, 30), 2)
    assert block_contents(cut, 0) == frozen


def test_a_replica_that_no_cut_shows_saves_nothing():
    store, other = RowStore([make_table()], undo_steps=0), trained(200)
    store.add_block(0, 1, is_replica=True)
    store.import_block(0, 1, other.export_block(0, 1))
    with store.cut():
        store.import_block(0, 1, other.export_block(0, 1), replace=False)
        store.apply_changes(0, 1, BlockChanges(BlockRows.empty(other.tables[0]), ids_of_block(1, 9), 0))
        assert store.version_bytes() == 0


def test_slots_that_an_import_saved_for_an_older_cut_wait_for_the_younger_ones():
    """A demoted block saves for the cut that shows it, into the newest layer; that layer's cut must not meet the slot."""
    tables = [make_table(num_blocks=1), make_table("u", num_blocks=1)]
    store = make_store(*tables, undo_steps=0)
    train(store, range(30), 1, 1)
    older = store.cut()
    store.set_replica(1, 0, True)
    younger = store.cut()
    rows = older.export_block(1, 0)
    store.apply_changes(1, 0, BlockChanges(rows, NO_IDS, 0))
    older.release()
    store.commit(1)
    store.apply_changes(1, 0, BlockChanges(BlockRows.empty(tables[1]), rows.ids, 0))
    train(store, range(30), 2)
    assert len(younger.export_block(0, 0)) == 0
    with store.cut() as cut:
        assert cut.export_changes(younger, 0, 0).rows.ids.tolist() == list(range(30))


def test_memory_of_dropped_blocks_is_used_again_once_their_cuts_are_released():
    store = trained(2000)
    used = store.nbytes()["rows"]
    cut = store.cut()
    for block in range(4):
        store.drop_block(0, block)
        store.add_block(0, block)
    cut.release()
    train(store, range(5000, 7000), 2)
    assert store.nbytes()["rows"] == used


def test_undo_and_rollback_leave_replicas_alone():
    store, other = make_store(undo_steps=2), trained(90)
    store.set_replica(0, 0, True)
    owned = torch.cat([ids_of_block(b, 9) for b in (1, 2, 3)])
    train(store, owned, 1)
    cut = store.cut()
    store.import_block(0, 0, other.export_block(0, 0))
    copied = block_contents(store, 0)
    train(store, owned, 2)
    store.undo(2)
    assert block_contents(store, 0) == copied
    train(store, owned, 2)
    store.rollback(cut, 1)
    assert block_contents(store, 0) == copied
    cut.release()


# Changes and checksums.


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
            changes = cut.export_changes(since, 0, block)
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
    assert sum(len(cut.export_changes(since, 0, b)) for b in range(4)) == 1
    assert cut.num_changed(since) == 40


def test_changes_need_an_older_open_cut_and_one_life_of_the_block():
    store = trained()
    first = store.cut()
    store.set_replica(0, 1, True)
    second = store.cut()
    for since, cut in ((first, first), (second, first), (trained().cut(), second)):
        with pytest.raises(ValueError, match="older cut"):
            cut.export_changes(since, 0, 0)
    with pytest.raises(ValueError, match="block 1 is not owned"):
        second.export_changes(first, 0, 1)
    store.set_replica(0, 1, False)
    store.drop_block(0, 2)
    store.add_block(0, 2)
    third = store.cut()
    with pytest.raises(ValueError, match="block 1 was not owned at the older cut"):
        third.export_changes(second, 0, 1)
    assert len(third.export_changes(first, 0, 1)) == 0
    with pytest.raises(ValueError, match="block 2 was not owned at the older cut"):
        third.export_changes(first, 0, 2)
    first.release()
    with pytest.raises(RuntimeError, match="released"):
        third.export_changes(first, 0, 0)


def test_changes_survive_the_release_of_a_cut_between():
    store = trained()
    since = store.cut()
    train(store, range(0, 40), 2)
    between = store.cut()
    train(store, range(20, 80), 3)
    cut = store.cut()
    expected = [rows_checksum(cut.export_changes(since, 0, b).rows) for b in range(4)]
    between.release()
    train(store, range(5), 4)  # Folds the released layer.
    assert [rows_checksum(cut.export_changes(since, 0, b).rows) for b in range(4)] == expected
    later = store.cut()
    assert sum(len(later.export_changes(since, 0, b)) for b in range(4)) == 80


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


# Roll-back.


@pytest.mark.parametrize("undo_steps", [0, 2])
def test_rollback_restores_weights_state_existence_and_deletions(undo_steps):
    tables = [make_table(kind=OptimizerKind.ADAM), make_table("u", 3, DataType.BF16, OptimizerKind.ADAM)]
    store, never = make_store(*tables, undo_steps=undo_steps), make_store(*tables, undo_steps=undo_steps)
    for target in (store, never):
        for table in (0, 1):
            train(target, [*HUGE_IDS, *range(50)], 1, table)
        target.delete(0, torch.arange(5))
        target.commit(1)
    frozen = contents(store, tables)
    with store.cut() as cut:
        for _ in range(3):
            for step in (2, 3):
                train(store, range(30, 90), step, 0, seed=step * 31)
                store.delete(0, torch.arange(20, 60))
                train(store, [25, 26, 2], step, 0)  # Deleted before or after the cut, and made again.
                store.delete(1, torch.arange(10))
            store.resolve(1, torch.arange(500, 520), reserve=True)
            store.rollback(cut, 1)
            assert contents(store, tables) == contents(cut, tables) == frozen
            assert store.num_rows() == len(frozen) and store.native.step == 1
        store.begin_step(2)
        for target in (store, never):
            train(target, range(40), 2)
            target.commit(2)
        assert contents(store, tables) == contents(never, tables)
        assert contents(cut, tables) == frozen
    store.commit(2)
    store.cut().release()
    store.commit(2)
    assert store.version_bytes() == 0


def test_rollback_refuses_to_pass_a_younger_open_cut_and_a_released_one():
    store = trained()
    old = store.cut()
    train(store, range(10), 2)
    young = store.cut()
    with pytest.raises(RuntimeError, match="younger cut"):
        store.rollback(old, 1)
    young.release()
    store.rollback(old, 1)
    old.release()
    with pytest.raises(RuntimeError, match="released"):
        store.rollback(old, 1)


def test_rollback_keeps_older_cuts_and_spares_blocks_that_came_or_went():
    store, other = trained(), trained(120)
    oldest, at_first = store.cut(), contents(store, store.tables)
    train(store, range(30), 2)
    store.drop_block(0, 3)
    cut, frozen = store.cut(), {b: block_contents(store, b) for b in (0, 1, 2)}
    store.set_replica(0, 0, True)  # Demoted since: stays.
    store.import_block(0, 0, other.export_block(0, 0))
    store.add_block(0, 3, is_replica=True)
    store.import_block(0, 3, other.export_block(0, 3))
    store.set_replica(0, 3, False)  # Promoted since: stays.
    train(store, torch.cat([ids_of_block(b, 12) for b in (1, 2, 3)]), 3)
    promoted = block_contents(store, 3)
    store.rollback(cut, 2)
    assert block_contents(store, 1) == frozen[1] and block_contents(store, 2) == frozen[2]
    assert block_contents(store, 0) == block_contents(other, 0)
    assert block_contents(store, 3) == promoted
    assert contents(oldest, store.tables) == at_first
    assert {b: block_contents(cut, b) for b in (0, 1, 2)} == frozen


def test_slots_of_rolled_back_rows_are_not_handed_out_while_they_live():
    """A deleted row's slot waits in the layer; a roll-back takes it out again, or two rows would share it."""
    store = make_store(undo_steps=0)
    train(store, range(40), 1)
    cut = store.cut()
    store.delete(0, torch.arange(40))
    store.rollback(cut, 1)
    cut.release()
    train(store, range(100, 180), 2)
    assert store.num_rows() == 120
    slots = store.resolve(0, torch.cat([torch.arange(40), torch.arange(100, 180)]), reserve=False)
    assert len(torch.unique(slots)) == 120


# Threads.


class Importer(threading.Thread):
    """Keeps copies of table 1's blocks in `store` while it trains on table 0, checking every checksum."""

    def __init__(self, store: RowStore, source: RowStore) -> None:
        super().__init__()
        self.store, self.source = store, source
        self.stop, self.error, self.rounds = threading.Event(), None, 0

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self.round()
                self.rounds += 1
        except BaseException as error:
            self.error = error

    def round(self) -> None:
        base = self.source.cut()
        for block in range(4):
            self.store.add_block(1, block, is_replica=True)
            self.store.import_block(1, block, base.export_block(1, block))
        for _ in range(3):
            step = self.source.native.step + 1
            train(self.source, torch.randperm(6000)[:1500], step, 1)
            self.source.delete(1, torch.randperm(6000)[:100])
            cut = self.source.cut()
            for block in range(4):
                changes = cut.export_changes(base, 1, block)
                assert self.store.apply_changes(1, block, changes) == changes.checksum_delta
                assert self.store.block_checksum(1, block) == self.source.block_checksum(1, block)
            base.release()
            base = cut
        base.release()
        self.store.drop_block(1, self.rounds % 4)


@pytest.mark.parametrize("undo_steps", [0, 2])
def test_replicas_are_kept_while_the_store_trains_cuts_and_rolls_back(undo_steps):
    """One arena for both tables: slots pass from owned rows to copies and back all the time."""
    tables = [make_table("owned", 8), make_table("copied", 8, seed=5)]
    store, twin = RowStore(tables, undo_steps=undo_steps), RowStore(tables, undo_steps=undo_steps)
    source = make_store(*tables, undo_steps=0)
    train(source, range(4000), 1, 1)
    for block in range(4):
        store.add_block(0, block)
        twin.add_block(0, block)
    importer = Importer(store, source)
    importer.start()
    generator, step, rounds = np.random.default_rng(3), 0, 0
    while (importer.rounds < 6 or rounds < 6) and importer.error is None:
        cut, at_cut = store.cut(), step
        frozen = contents(cut, tables[:1])
        for attempt in (0, 1):
            for _ in range(4):
                step += 1
                ids = torch.from_numpy(generator.permutation(5000)[:800])
                targets = (store, twin) if attempt else (store,)
                for target in targets:
                    train(target, ids, step)
                    target.delete(0, ids[:60])
                    target.commit(step)
                store.resolve(0, ids + 10_000, reserve=True)
            assert contents(cut, tables[:1]) == frozen
            if attempt == 0:
                store.rollback(cut, at_cut)
                step = at_cut
                assert contents(store, tables[:1]) == frozen
        store.discard_reservations()
        cut.release()
        rounds += 1
    importer.stop.set()
    importer.join()
    assert importer.error is None, importer.error
    assert contents(store, tables[:1]) == contents(twin, tables[:1])
