"""Replica blocks: held, not owned, kept current while the store trains (guarantees 4 and 7)."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from row_stores import block_contents, contents, ids_of_block, make_store, make_table, train, trained

from shoal.kernels.cut import BlockChanges, BlockRows
from shoal.kernels.errors import BadIdError
from shoal.kernels.packed import export_changes
from shoal.kernels.rowstore import RowStore

NO_IDS = torch.empty(0, dtype=torch.int64)


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
    """A demoted block saves for the cut that shows it, into the newest layer; its own cut must not meet them."""
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
        assert export_changes(cut, younger, 0, 0).rows.ids.tolist() == list(range(30))


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
                changes = export_changes(cut, base, 1, block)
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
