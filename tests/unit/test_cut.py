"""Cuts: frozen while training goes on (C1), older value wins (C2), bounded (C3); read by other threads meanwhile."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from shoal.kernels.errors import CapacityError
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import DataType, OptimizerKind, OptimizerSpec, TableSpec


def make_store(num_blocks=2, dim=8, kind=OptimizerKind.ADAGRAD, **options) -> RowStore:
    tables = [
        TableSpec(
            name=name, num_embeddings=0, embedding_dim=dim, num_blocks=num_blocks, seed=seed, init_min=-1, init_max=1,
            data_type=DataType.FP32, optimizer=OptimizerSpec(kind=kind),
        )
        for seed, name in enumerate("ab")
    ]  # fmt: skip
    store = RowStore(tables, **options)
    store.add_all_blocks()
    return store


def train(store: RowStore, ids, step: int, table: int = 0) -> None:
    ids = torch.as_tensor(ids, dtype=torch.int64)
    store.apply(table, ids, torch.full((len(ids), store.tables[0].embedding_dim), float(step)), step=step, lr=0.1)
    store.commit(step)


def rows_of(source) -> list[bytes]:
    """All columns of all blocks, as bytes."""
    found = []
    for table in (0, 1):
        for block in (0, 1):
            rows = source.export_block(table, block)
            for column in (rows.ids, rows.weights, rows.slots, rows.last_step, rows.count):
                found.append(column.numpy().tobytes())
    return found


def test_a_cut_reads_as_of_its_opening_across_updates_creations_deletions_and_drops():
    store = make_store()
    train(store, range(100), 1)
    train(store, range(50), 1, table=1)
    frozen = rows_of(store)
    with store.cut() as cut:
        assert store.version_bytes() == 0, "an open cut costs nothing until rows change"
        train(store, range(50, 150), 2)
        assert rows_of(cut) == frozen
        store.delete(0, torch.arange(0, 100, 7))
        store.delete(1, torch.arange(0, 100, 7))
        train(store, [*range(0, 100, 7), *range(1000, 1100)], 3, table=1)  # Reuses the slots of table a's rows.
        assert rows_of(cut) == frozen
        store.drop_block(0, 1)
        assert rows_of(cut) == frozen
        store.add_block(0, 1)
        train(store, range(100), 4)
        assert rows_of(cut) == frozen
    store.commit(4)
    assert store.version_bytes() == 0
    with pytest.raises(RuntimeError, match="released"):
        cut.export_block(0, 0)


def test_release_in_any_order_keeps_the_other_cuts():
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]):
        store, cuts, frozen = make_store(), [], []
        for step in range(1, 5):
            train(store, range(step * 5, step * 5 + 20), step)
            store.delete(0, torch.tensor([step * 5]))
            if step < 4:
                frozen.append(rows_of(store))
                cuts.append(store.cut())
        for which in order:
            cuts[which].release()
            cuts[which] = None
            store.commit(4)  # A step boundary folds the released layer.
            for cut, expected in zip(cuts, frozen):
                assert cut is None or rows_of(cut) == expected
            train(store, range(40), store.native.step + 1)
        store.commit(store.native.step)
        assert store.version_bytes() == 0


def test_a_cut_opened_on_an_uncommitted_step_survives_its_undo():
    store = make_store()
    train(store, range(20), 1)
    store.apply(0, torch.arange(10, 30), torch.ones(20, 8), step=2, lr=0.1)
    frozen = rows_of(store)
    cut = store.cut()
    store.undo(2)
    assert rows_of(cut) == frozen
    store.discard_reservations()
    train(store, range(100, 150), 2, table=1)
    assert rows_of(cut) == frozen


def test_growth_of_the_id_map_beside_an_open_cut():
    store = make_store()
    train(store, range(30), 1)
    frozen = rows_of(store)
    cut = store.cut()
    train(store, range(30, 50_000), 2)
    train(store, range(0, 1000), 3)
    assert rows_of(cut) == frozen


def test_versions_are_bounded_with_a_clear_signal():
    """C3, with uniform ids: the versions approach the table."""
    store = make_store(undo_steps=0, version_bytes_max=200_000)
    train(store, range(2000), 1)
    cut = store.cut()
    assert not store.is_version_full()
    train(store, range(2000), 2)
    size = store.version_bytes()
    assert store.is_version_full() and size >= store.nbytes()["rows"]
    with pytest.raises(CapacityError, match=r"row versions use .* version_bytes_max is 200000"):
        store.cut()
    train(store, range(2000), 3)
    assert store.version_bytes() == size, "a row is saved once per interval"
    cut.release()
    store.commit(3)
    assert not store.is_version_full()
    store.cut().release()


def test_reserving_is_not_a_change():
    store = make_store(undo_steps=0)
    train(store, range(10), 1)
    with store.cut():
        store.resolve(0, torch.arange(1000), reserve=True)
        assert store.version_bytes() == 0


@pytest.mark.parametrize("undo_steps", [0, 2])
def test_a_hammering_reader_sees_only_whole_rows_of_its_cut(undo_steps):
    """C1: rows carry the step in every column, so a torn or late copy cannot hide."""
    store = make_store(dim=64, kind=OptimizerKind.SGD, undo_steps=undo_steps)
    num_ids, generator = 4000, np.random.default_rng(0)
    train(store, range(num_ids), 1)
    step, failures, reads = 1, [], [0]
    for _ in range(6):
        expected = rows_of(store)
        cut = store.cut()
        stop = threading.Event()

        def read(cut=cut, expected=expected, stop=stop):
            while not stop.is_set():
                try:
                    if rows_of(cut) != expected:
                        failures.append("a read differs from the cut")
                except Exception as error:
                    failures.append(repr(error))
                reads[0] += 1

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        target = reads[0] + 12
        while reads[0] < target and not failures:
            step += 1
            ids = generator.permutation(num_ids + step * 10)[:1500]
            train(store, ids, step)
            train(store, ids[:700], step, table=1)
            store.delete(0, torch.from_numpy(ids[:50]))
            if step % 3 == 0:
                store.cut().release()
            if undo_steps and step % 4 == 0:
                step += 1
                store.apply(0, torch.from_numpy(ids[100:900]), torch.ones(800, 64), step=step, lr=0.1)
                store.undo(step)
        stop.set()
        for reader in readers:
            reader.join()
        cut.release()
        assert not failures, failures[:3]
