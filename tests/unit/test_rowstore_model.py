"""A dictionary of rows under random training, undo, cuts, roll-back, replicas and changes, against the row store."""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

sys.path.insert(0, str(Path(__file__).parent))

from row_stores import contents, make_store, make_table, rows_as_dict, train

from shoal.kernels.cut import BlockChanges, BlockRows, rows_checksum
from shoal.kernels.hashing import row_blocks
from shoal.kernels.optim import apply_reference, initial_rows_reference, initial_state
from shoal.kernels.packed import export_changes
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import DataType, OptimizerKind

#: Two tables of one arena and one of another.
TABLES = (
    make_table("a", 3, num_blocks=2),
    make_table("b", 3, num_blocks=1, seed=9),
    make_table("c", 2, DataType.BF16, OptimizerKind.ADAM),
)
BLOCKS = [(t, b) for t, table in enumerate(TABLES) for b in range(table.num_blocks)]

some_ids = st.lists(st.integers(-12, 12), min_size=1, max_size=12, unique=True)
some_table = st.integers(0, 2)
some_block = st.sampled_from(BLOCKS)


def block_of(key) -> tuple[int, int]:
    table, row_id = key
    return table, int(row_blocks(np.array([row_id]), TABLES[table].num_blocks)[0])


def random_rows(block: tuple[int, int], ids, seed: int) -> BlockRows:
    """Rows with arbitrary state for those of `ids` that belong to the block."""
    ids = sorted((i for i in ids if block_of((block[0], i)) == block), key=lambda i: i % 2**64)
    rows, generator = BlockRows.empty(TABLES[block[0]], len(ids)), torch.Generator().manual_seed(seed)
    rows.ids.copy_(torch.tensor(ids, dtype=torch.int64))
    rows.weights.copy_(torch.randn(rows.weights.shape, generator=generator))
    rows.slots.copy_(torch.rand(rows.slots.shape, generator=generator))
    rows.last_step.fill_(seed % 50)
    rows.count.fill_(seed)
    return rows


class Frozen:
    """A cut with what the model was when it was opened."""

    def __init__(self, machine: StoreAgainstModel) -> None:
        self.cut = machine.store.cut()
        self.rows = copy.copy(machine.model)
        self.lives = {block: machine.lives[block] for block in machine.owned}
        self.step = machine.step


class StoreAgainstModel(RuleBasedStateMachine):
    """`model` holds the rows of owned blocks, `copies` those of replicas; a block's life ends when it is dropped."""

    @initialize(undo_steps=st.sampled_from([0, 2]))
    def start(self, undo_steps):
        self.undo_steps = undo_steps
        self.store = make_store(*TABLES, undo_steps=undo_steps)
        self.model: dict = {}
        self.copies: dict = {}
        self.owned, self.replicas = set(BLOCKS), set()
        self.life = itertools.count()
        self.lives = {block: next(self.life) for block in BLOCKS}
        self.before_step: list = []
        self.cuts: list[Frozen] = []
        self.step = self.seed = 0

    def commit_all(self):
        self.store.commit(self.step)
        self.before_step.clear()

    def owned_ids(self, table, ids):
        return [i for i in ids if block_of((table, i)) in self.owned]

    # Training.

    @rule(table=some_table, ids=some_ids, repeat=st.booleans())
    def apply(self, table, ids, repeat):
        if self.undo_steps:
            if len(self.before_step) == self.undo_steps:
                self.store.commit(self.step - 1)
                del self.before_step[0]
            self.before_step.append(copy.copy(self.model))
        self.step += 1
        self.store.begin_step(self.step)
        for index in (table, (table + 1) % 3) if repeat else (table,):
            self.seed += 1
            owned = self.owned_ids(index, ids)
            gradients = train(self.store, owned, self.step, index, seed=self.seed)
            self.apply_to_model(index, owned, gradients)

    def apply_to_model(self, index, ids, gradients):
        if not ids:
            return
        spec, ids = TABLES[index], torch.tensor(ids)
        weights = initial_rows_reference(spec, ids)
        slots = initial_state(spec.optimizer, len(ids), spec.embedding_dim)
        for i, key in enumerate((index, int(row_id)) for row_id in ids):
            if key in self.model:
                weights[i] = torch.frombuffer(bytearray(self.model[key][0]), dtype=weights.dtype)
                slots[i] = torch.frombuffer(bytearray(self.model[key][1]), dtype=torch.float32)
        weights, slots = apply_reference(spec, ids, weights, slots, gradients, step=self.step, lr=0.1)
        for i, key in enumerate((index, int(row_id)) for row_id in ids):
            count = self.model[key][3] if key in self.model else 0
            state = (weights[i].view(torch.uint8).numpy().tobytes(), slots[i].numpy().tobytes())
            self.model[key] = (*state, self.step, count + 1)

    @rule()
    def commit(self):
        self.commit_all()

    @precondition(lambda self: self.before_step)
    @rule()
    def undo(self):
        self.store.undo(self.step)
        self.step -= 1
        self.model = self.before_step.pop()

    @rule(table=some_table, ids=some_ids)
    def reserve(self, table, ids):
        ids = self.owned_ids(table, ids)
        self.store.resolve(table, torch.tensor(ids, dtype=torch.int64), reserve=True)

    @rule()
    def discard(self):
        self.store.discard_reservations()

    @rule(table=some_table, ids=some_ids)
    def delete(self, table, ids):
        expected = sum((table, i) in self.model for i in ids)
        assert self.store.delete(table, torch.tensor(ids)) == expected
        for i in ids:
            self.model.pop((table, i), None)

    # Blocks that move: owned, replica, gone.

    def pop_rows(self, rows: dict, block) -> dict:
        return {key: rows.pop(key) for key in [k for k in rows if block_of(k) == block]}

    @rule(block=some_block)
    def add_or_demote_or_promote(self, block):
        self.commit_all()
        if block in self.owned:
            self.store.set_replica(*block, True)
            self.owned.remove(block)
            self.replicas.add(block)
            self.copies |= self.pop_rows(self.model, block)
        elif block in self.replicas:
            self.store.set_replica(*block, False)
            self.replicas.remove(block)
            self.owned.add(block)
            self.model |= self.pop_rows(self.copies, block)
        else:
            self.store.add_block(*block)
            self.owned.add(block)
            self.lives[block] = next(self.life)

    @rule(block=some_block)
    def drop(self, block):
        self.commit_all()
        self.store.drop_block(*block)
        self.pop_rows(self.model, block)
        self.pop_rows(self.copies, block)
        self.owned.discard(block)
        self.replicas.discard(block)

    @rule(block=some_block, ids=some_ids, replace=st.booleans())
    def import_block(self, block, ids, replace):
        rows = random_rows(block, ids, self.step + 7)
        if block in self.owned:
            self.commit_all()
            target = self.model
        else:
            if block not in self.replicas or replace:  # Whatever was there is gone: a new life.
                self.lives[block] = next(self.life)
            self.store.add_block(*block, is_replica=True)
            self.replicas.add(block)
            target = self.copies
        self.store.import_block(*block, rows, replace=replace)
        if replace:
            self.pop_rows(target, block)
        target |= rows_as_dict(rows, TABLES[block[0]], *block)

    @rule(block=some_block, ids=some_ids, deleted=some_ids)
    def apply_changes(self, block, ids, deleted):
        if block not in self.owned | self.replicas:
            return
        if block in self.owned:
            self.commit_all()
        rows = random_rows(block, [i for i in ids if i not in deleted], self.step + 3)
        gone = torch.tensor([i for i in deleted if block_of((block[0], i)) == block], dtype=torch.int64)
        before = self.store.block_checksum(*block)
        delta = self.store.apply_changes(*block, BlockChanges(rows, gone, 0))
        after = self.store.block_checksum(*block)
        assert (after[1] - before[1] - delta) % 2**64 == 0
        target = self.model if block in self.owned else self.copies
        for row_id in gone.tolist():
            target.pop((block[0], row_id), None)
        target |= rows_as_dict(rows, TABLES[block[0]], *block)

    # Cuts.

    @precondition(lambda self: len(self.cuts) < 4)
    @rule()
    def open_cut(self):
        self.cuts.append(Frozen(self))

    @precondition(lambda self: self.cuts)
    @rule(which=st.integers(0, 3))
    def release_cut(self, which):
        self.cuts.pop(which % len(self.cuts)).cut.release()

    @precondition(lambda self: self.cuts)
    @rule(which=st.integers(0, 3))
    def roll_back(self, which):
        which %= len(self.cuts)
        to = self.cuts[which]
        if which + 1 < len(self.cuts):
            with pytest.raises(RuntimeError, match="younger"):
                self.store.rollback(to.cut, to.step)
        while len(self.cuts) > which + 1:
            self.cuts.pop().cut.release()
        self.store.rollback(to.cut, to.step)
        for block in self.owned:
            if to.lives.get(block) == self.lives[block]:
                self.pop_rows(self.model, block)
                self.model |= {key: row for key, row in to.rows.items() if block_of(key) == block}
        self.step = to.step
        self.before_step.clear()

    @precondition(lambda self: len(self.cuts) > 1)
    @rule(pair=st.tuples(st.integers(0, 3), st.integers(0, 3)))
    def copy_through_changes(self, pair):
        old, new = sorted({p % len(self.cuts) for p in pair} | {0, 1})[:2]
        since, cut = self.cuts[old], self.cuts[new]
        num_changed = 0
        for block in BLOCKS:
            if cut.lives.get(block, -1) != since.lives.get(block, -2):
                with pytest.raises(ValueError, match="owned"):
                    export_changes(cut.cut, since.cut, *block)
                continue
            changes = export_changes(cut.cut, since.cut, *block)
            self.check_changes(changes, since, cut, block)
            num_changed += len(changes)
        assert num_changed <= cut.cut.num_changed(since.cut)

    def check_changes(self, changes, since, cut, block):
        copied = RowStore(TABLES)
        copied.add_block(*block, is_replica=True)
        copied.import_block(*block, since.cut.export_block(*block))
        before = copied.block_checksum(*block)[1]
        assert copied.apply_changes(*block, changes) == changes.checksum_delta
        expected, spec = cut.cut.export_block(*block), TABLES[block[0]]
        copy_of = rows_as_dict(copied.export_block(*block), spec, *block)
        assert copy_of == rows_as_dict(expected, spec, *block)
        total = (before + changes.checksum_delta) % 2**64
        assert copied.block_checksum(*block) == (len(expected), total) == (len(expected), rows_checksum(expected))
        for row_id in changes.deleted.tolist():
            assert (block[0], row_id) in since.rows and (block[0], row_id) not in cut.rows
        changed = rows_as_dict(changes.rows, spec, *block)
        assert all(cut.rows[key] == row for key, row in changed.items())
        differing = {key for key, row in cut.rows.items() if block_of(key) == block and since.rows.get(key) != row}
        assert differing <= set(changed)

    @invariant()
    def store_equals_model(self):
        assert contents(self.store, TABLES, self.owned) == self.model
        assert contents(self.store, TABLES, self.replicas) == self.copies
        assert self.store.num_rows() == len(self.model)
        assert self.store.num_replica_rows() == len(self.copies)
        assert {(t, b) for t in range(3) for b in self.store.owned_blocks(t)} == self.owned
        assert {(t, b) for t in range(3) for b in self.store.replica_blocks(t)} == self.replicas

    @invariant()
    def cuts_equal_the_model_of_their_time(self):
        for frozen in self.cuts:
            assert contents(frozen.cut, TABLES, frozen.lives) == frozen.rows

    def teardown(self):
        for frozen in self.cuts:
            frozen.cut.release()
        self.commit_all()
        assert self.store.version_bytes() == 0


TestStoreAgainstModel = StoreAgainstModel.TestCase
TestStoreAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
