"""The row store: reservations (guarantee 2), undo (3), export and import, and a dict model under random operations."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.kernels.cut import BlockRows, Cut
from shoal.kernels.errors import BadIdError, CheckpointError
from shoal.kernels.hashing import row_blocks
from shoal.kernels.optim import apply_reference, initial_rows_reference, initial_state
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


def contents(store: RowStore | Cut, tables, owned=None) -> dict:
    """All rows as {(table, id): (weights, slots, last_step, count)} in bytes, checking order and blocks."""
    found = {}
    for index, table in enumerate(tables):
        for block in range(table.num_blocks):
            if owned is not None and (index, block) not in owned:
                continue
            rows = store.export_block(index, block)
            ids = rows.ids.numpy()
            assert (np.diff(ids.view(np.uint64).astype(object)) > 0).all(), "sorted by id as uint64, without repeats"
            assert (row_blocks(ids, table.num_blocks) == block).all()
            weights, slots = rows.weights.view(torch.uint8).numpy(), rows.slots.view(torch.uint8).numpy()
            for i, row_id in enumerate(ids.tolist()):
                state = (weights[i].tobytes(), slots[i].tobytes(), int(rows.last_step[i]), int(rows.count[i]))
                found[index, row_id] = state
    return found


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


class StoreAgainstModel(RuleBasedStateMachine):
    """Two tables of one arena and one of another, against a dictionary of rows."""

    tables = (
        make_table("a", 3, num_blocks=2),
        make_table("b", 3, num_blocks=1, seed=9),
        make_table("c", 2, DataType.BF16, OptimizerKind.ADAM),
    )
    ids = st.lists(st.integers(-12, 12), min_size=1, max_size=12, unique=True)
    some_table = st.integers(0, 2)

    def __init__(self):
        super().__init__()
        self.store = make_store(*self.tables, undo_steps=2)
        self.model: dict = {}
        self.before_step: list = []
        self.cuts: list = []
        self.step = 0
        self.seed = 0

    def commit_all(self):
        self.store.commit(self.step)
        self.before_step.clear()

    @rule(table=some_table, ids=ids, repeat=st.booleans())
    def apply(self, table, ids, repeat):
        if len(self.before_step) == 2:
            self.store.commit(self.step - 1)
            del self.before_step[0]
        self.before_step.append(copy.copy(self.model))
        self.step += 1
        for index in (table, (table + 1) % 3) if repeat else (table,):
            self.seed += 1
            gradients = train(self.store, ids, self.step, index, seed=self.seed)
            self.apply_to_model(index, ids, gradients)

    def apply_to_model(self, index, ids, gradients):
        spec, ids = self.tables[index], torch.tensor(ids)
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

    @rule(table=some_table, ids=ids)
    def reserve(self, table, ids):
        self.store.resolve(table, torch.tensor(ids), reserve=True)

    @rule()
    def discard(self):
        self.store.discard_reservations()

    @rule(table=some_table, ids=ids)
    def delete(self, table, ids):
        expected = sum((table, i) in self.model for i in ids)
        assert self.store.delete(table, torch.tensor(ids)) == expected
        for i in ids:
            self.model.pop((table, i), None)

    @precondition(lambda self: len(self.cuts) < 4)
    @rule()
    def open_cut(self):
        self.cuts.append((self.store.cut(), copy.copy(self.model)))

    @precondition(lambda self: self.cuts)
    @rule(which=st.integers(0, 3))
    def release_cut(self, which):
        cut, _ = self.cuts.pop(which % len(self.cuts))
        cut.release()

    @rule(table=some_table, drop=st.booleans())
    def move_block_out_and_in(self, table, drop):
        self.commit_all()
        rows = self.store.export_block(table, 0)
        if drop:
            self.store.drop_block(table, 0)
            self.store.add_block(table, 0)
        self.store.import_block(table, 0, rows)

    @rule(table=some_table)
    def clear_block(self, table):
        self.commit_all()
        self.store.import_block(table, 0, BlockRows.empty(self.tables[table]))
        num_blocks = self.tables[table].num_blocks
        for key in [k for k in self.model if k[0] == table]:
            if row_blocks(np.array([key[1]]), num_blocks)[0] == 0:
                del self.model[key]

    @invariant()
    def store_equals_model(self):
        assert contents(self.store, self.tables) == self.model
        assert self.store.num_rows() == len(self.model)

    @invariant()
    def cuts_equal_the_model_of_their_time(self):
        for cut, model in self.cuts:
            assert contents(cut, self.tables) == model

    def teardown(self):
        for cut, _ in self.cuts:
            cut.release()
        self.commit_all()
        assert self.store.version_bytes() == 0


TestStoreAgainstModel = StoreAgainstModel.TestCase
TestStoreAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
