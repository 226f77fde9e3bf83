"""The Feeder where Ray Data stands still: what is asked for is read in its own process (D3). Without Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.actors.dataset import scan_dataset
from shoal.kernels.schema import Schema, SparseColumn
from shoal.platform import feeder as module
from shoal.platform.feeder import Feeder, FeederOptions
from shoal.platform.order import OrderSpec, VirtualOrder
from shoal.platform.row_group_stream import ReadResult


class Stalled:
    """An execution that delivers its first ``num_ready`` windows and nothing more, as if its node were lost."""

    num_ready = 0
    made: ClassVar[list[Stalled]] = []

    def __init__(self, dataset, order, tasks, options) -> None:
        self.tasks, self._dataset, self._order = tasks, dataset, order
        self.is_closed = threading.Event()
        Stalled.made.append(self)

    def __iter__(self) -> Iterator[ReadResult]:
        for task in self.tasks[: Stalled.num_ready]:
            for i, group in enumerate(task.row_groups):
                path = self._order.files[group.file].path
                table = self._dataset.read_row_group(path, group.index, num_rows=group.num_rows)
                yield ReadResult(task.window, task.first_group + i, table)
        self.is_closed.wait(30)

    def close(self) -> None:
        self.is_closed.set()


@pytest.fixture
def feeder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    n = np.arange(2000)
    pq.write_table(pa.table({"y": n % 2, "u": n}), tmp_path / "0.parquet", row_group_size=50)
    dataset = scan_dataset(str(tmp_path), Schema(label="y", sparse=(SparseColumn(name="u"),)))
    order = VirtualOrder(dataset.files, OrderSpec(batch_size=50, window_rows=100, num_lanes=2, seed=1))
    monkeypatch.setattr(module, "Execution", Stalled)
    monkeypatch.setattr(Feeder, "_put", lambda self, window, table: module._Blocks([table, table], 1))
    monkeypatch.setattr(Stalled, "made", [])
    monkeypatch.setattr(Stalled, "num_ready", 2)
    feeder = Feeder(dataset, order, FeederOptions(overdue_s=0.2))
    yield feeder
    for execution in Stalled.made:
        execution.close()
    feeder.close()


def ask(feeder: Feeder, window: int) -> float:
    """Seconds until the blocks of a window were there."""
    began = time.monotonic()
    found = feeder.get_blocks(0, window, [0, 1], rank=0, world_size=1, keep_from_step=0, wait_s=10.0)
    assert found is not None and len(found) == 2
    return time.monotonic() - began


def test_a_window_that_ray_data_does_not_deliver_is_read_here_and_those_after_it_at_once_d3(feeder):
    deadline = time.monotonic() + 20
    while feeder.status()["cursor"] < (0, 2) and time.monotonic() < deadline:
        ask(feeder, 1)
    before = feeder.status()["read_here"]
    assert 0.2 <= ask(feeder, 2) < 5.0
    for window in range(3, 6):
        assert ask(feeder, window) < 5.0
    assert feeder.status()["read_here"] == before + 4


def test_ranks_far_ahead_of_a_stalled_execution_begin_no_new_one_for_each_window_d3(feeder, monkeypatch):
    for window in range(1, 20):
        ask(feeder, window)
    assert len(Stalled.made) == 1
    monkeypatch.setattr(module, "RESTART_PAUSE_S", 0.0)
    feeder.get_blocks(1, 10, [0], rank=0, world_size=1, keep_from_step=0, wait_s=10.0)
    assert Stalled.made[0].is_closed.is_set(), "who reads for nobody any more is told"
