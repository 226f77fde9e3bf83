"""Row groups from Ray Data: the order and size of what it returns never matter (D3)."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.actors.dataset import Dataset, scan_dataset
from shoal.kernels.errors import DataError
from shoal.kernels.schema import Schema, SparseColumn
from shoal.platform.order import OrderSpec, VirtualOrder
from shoal.platform.row_group_stream import ReadOptions, ReadTask, _Pieces, _reader, plan_reads

OPTIONS = ReadOptions(rows_per_read=50, tasks_per_execution=4)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, VirtualOrder]:
    folder = tmp_path_factory.mktemp("stream")
    for i in range(2):
        n = np.arange(i * 100, i * 100 + 100)
        pq.write_table(pa.table({"y": n % 2, "u": n}), folder / f"{i}.parquet", row_group_size=30)
    dataset = scan_dataset(str(folder), Schema(label="y", sparse=(SparseColumn(name="u"),)))
    return dataset, VirtualOrder(dataset.files, OrderSpec(batch_size=16, window_rows=80))


def blocks_of(dataset: Dataset, order: VirtualOrder, tasks: list[ReadTask]) -> list[pa.Table]:
    """What the read tasks return, run here."""
    read = _reader(dataset, order, tasks)
    return [block for number in range(len(tasks)) for block in read(pa.table({"item": [number]}))]


def test_executions_cover_all_windows_in_whole_ones(source: tuple[Dataset, VirtualOrder]) -> None:
    _, order = source
    window, seen = order.windows(0)[0], []
    while window.epoch < 2:
        tasks = plan_reads(order, window, order.windows(2)[0], OPTIONS)
        for task in tasks:
            groups = task.window.row_groups[task.first_group : task.first_group + len(task.row_groups)]
            assert groups == task.row_groups
            seen += [(task.window.epoch, group.file, group.index) for group in groups]
        window = order.next_window(tasks[-1].window)
    expected = [(w.epoch, g.file, g.index) for epoch in (0, 1) for w in order.windows(epoch) for g in w.row_groups]
    assert seen == expected
    assert plan_reads(order, order.windows(2)[0], order.windows(2)[0], OPTIONS) == []


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_row_groups_are_complete_whatever_order_and_pieces_arrive_in(
    source: tuple[Dataset, VirtualOrder], seed: int
) -> None:
    dataset, order = source
    tasks = plan_reads(order, order.windows(0)[0], None, OPTIONS)
    rng = random.Random(seed)
    cut: list[pa.Table] = []
    for block in blocks_of(dataset, order, tasks):
        middle = rng.randint(0, block.num_rows)
        cut += [block.slice(0, middle), block.slice(middle)]
    rng.shuffle(cut)
    joined = []
    while cut:  # Ray Data may also return several pieces as one block.
        take = rng.randint(1, 3)
        joined.append(pa.concat_tables(cut[:take]))
        cut = cut[take:]
    pieces = _Pieces(tasks, dataset.arrow_schema)
    found = {}
    for block in joined:
        for result in pieces.add(block):
            found[result.window.epoch, result.window.index, result.group] = result.table
    pieces.check_complete()
    for task in tasks:
        for i, group in enumerate(task.row_groups):
            table = found.pop((task.window.epoch, task.window.index, task.first_group + i))
            direct = dataset.read_row_group(order.files[group.file].path, group.index, num_rows=group.num_rows)
            assert table.equals(direct)
    assert not found


def test_an_unreadable_row_group_is_a_result_with_its_reason(tmp_path: Path) -> None:
    pq.write_table(pa.table({"y": [0, 1], "u": [1, 2]}), tmp_path / "a.parquet")
    dataset = scan_dataset(str(tmp_path), Schema(label="y", sparse=(SparseColumn(name="u"),)))
    order = VirtualOrder(dataset.files, OrderSpec(batch_size=1))
    tasks = plan_reads(order, order.windows(0)[0], order.windows(1)[0], OPTIONS)
    (tmp_path / "a.parquet").write_bytes(b"x")
    (block,) = blocks_of(dataset, order, tasks)
    (result,) = _Pieces(tasks, dataset.arrow_schema).add(block)
    assert result.table is None and "a.parquet, row group 0: cannot be read" in (result.error or "")


def test_a_pipeline_that_ends_early_is_an_error(source: tuple[Dataset, VirtualOrder]) -> None:
    dataset, order = source
    tasks = plan_reads(order, order.windows(0)[0], None, OPTIONS)
    pieces = _Pieces(tasks, dataset.arrow_schema)
    for block in blocks_of(dataset, order, tasks)[:-1]:
        list(pieces.add(block))
    with pytest.raises(DataError, match="1 row groups incomplete"):
        pieces.check_complete()
