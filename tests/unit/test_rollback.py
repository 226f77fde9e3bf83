"""Rolling a store back to a cut (guarantee 6)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from row_stores import HUGE_IDS, block_contents, contents, ids_of_block, make_store, make_table, train, trained

from shoal.kernels.spec import DataType, OptimizerKind


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
