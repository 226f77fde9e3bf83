"""The Feeder over Ray Data: the same batches as the local feed, on a full cluster, after losses and errors (D3, D4)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch

from shoal.actors.dataset import Dataset, scan_dataset
from shoal.actors.feed import Assignment, LocalFeed, RayFeed
from shoal.kernels.batch import Batch
from shoal.kernels.errors import ClusterError, DataError, ExchangeTimeoutError
from shoal.kernels.schema import Schema, SparseColumn
from shoal.platform.feeder import Feeder, FeederOptions
from shoal.platform.order import OrderSpec, VirtualOrder
from shoal.platform.row_group_stream import ReadOptions

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SCHEMA = Schema(label="y", sparse=(SparseColumn(name="u"), SparseColumn(name="l")), extras=("u",))
# Small executions, so that one test runs several of them, and several row groups to a read.
OPTIONS = FeederOptions(read=ReadOptions(tasks_per_execution=3, rows_per_read=150), read_here_when_cold=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, VirtualOrder]:
    path = tmp_path_factory.mktemp("feeder")
    for i in range(3):
        n = np.arange(i * 300, i * 300 + 300)
        lists = pa.array([list(range(v % 4)) for v in n.tolist()], pa.list_(pa.int64()))
        pq.write_table(pa.table({"y": n % 2, "u": n, "l": lists}), path / f"{i}.parquet", row_group_size=70)
    dataset = scan_dataset(str(path), SCHEMA)
    return dataset, VirtualOrder(dataset.files, OrderSpec(batch_size=64, window_rows=200, num_lanes=4, seed=9))


@pytest.fixture(scope="module")
def full_cluster(local_ray: None) -> Iterator[None]:
    """An actor that holds every CPU, as a run's workers may."""
    hog = ray.remote(num_cpus=8)(dict).remote()
    yield
    ray.kill(hog)


def start(dataset: Dataset, order: VirtualOrder, **kwargs: Any) -> Any:
    actor = ray.remote(num_cpus=0, max_concurrency=16)(Feeder)
    return actor.remote(dataset, order, kwargs.pop("options", OPTIONS), **kwargs)


def stop(feeder: Any, *feeds: RayFeed) -> None:
    for feed in feeds:
        feed.close()
    ray.get(feeder.close.remote(), timeout=30)
    ray.kill(feeder)


def same(parts: list[Batch], whole: Batch) -> bool:
    lists = [part.sparse_features["l"] for part in parts]
    expected = whole.sparse_features["l"]
    return (
        torch.equal(torch.cat([part.extras["u"] for part in parts]), whole.extras["u"])
        and torch.equal(torch.cat([values.values() for values in lists]), expected.values())
        and torch.equal(torch.cat([values.lengths() for values in lists]), expected.lengths())
    )


def local(dataset: Dataset, order: VirtualOrder, steps: int) -> list[Batch]:
    feed = LocalFeed(dataset, order, SCHEMA, stop_step=steps)
    batches = [feed.next_batch(step) for step in range(steps)]
    feed.close()
    return batches


def test_ranks_get_the_local_feeds_batches_on_a_full_cluster(
    full_cluster: None, data: tuple[Dataset, VirtualOrder]
) -> None:
    dataset, order = data
    steps = order.steps(2)
    whole = local(dataset, order, steps)
    feeder = start(dataset, order, stop_step=steps)
    feeds = [
        RayFeed(feeder, dataset, order, SCHEMA, assignment=Assignment(rank, 3), stop_step=steps) for rank in range(3)
    ]
    for step in range(steps):
        assert same([feed.next_batch(step) for feed in feeds], whole[step]), step
    status = ray.get(feeder.status.remote())
    assert status["made"] == len(order.windows(0)) + len(order.windows(1)) and status["read_here"] == 0
    # What every rank has left behind was freed; a rewind reads it again, a resize only re-assigns.
    assert (0, 0) not in status["windows"]
    for step in (2, 3, 20):
        assert same([feed.next_batch(step) for feed in feeds], whole[step])
    for rank, feed in enumerate(feeds[:2]):
        feed.reassign(Assignment(rank, 2), 4)
    assert same([feed.next_batch(4) for feed in feeds[:2]], whole[4])
    assert ray.get(feeder.status.remote())["read_here"] > 0
    stop(feeder, *feeds)


class Elsewhere:
    """Owns objects, until it is killed: what a block's owner looks like when its node is gone."""

    def put(self) -> list[ray.ObjectRef]:
        return [ray.put(np.zeros(1_000_000))]


class Lossy(Feeder):
    """A feeder whose answers are blocks that nobody can have any more."""

    def lose(self, refs: list[ray.ObjectRef]) -> None:
        self.lost_refs = refs

    def get_blocks(self, *args: Any, **kwargs: Any) -> Any:
        return None if super().get_blocks(*args, **kwargs) is None else self.lost_refs


def await_loss(refs: list[ray.ObjectRef]) -> None:
    """Return once Ray knows that the owner of ``refs`` is gone: until then they can still be read."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            ray.get(refs, timeout=5)
        except ray.exceptions.ObjectLostError:
            return
        except ray.exceptions.GetTimeoutError:
            continue
    raise AssertionError("the objects outlived their owner by a minute")


def test_windows_whose_blocks_are_lost_are_read_by_the_worker(
    full_cluster: None, data: tuple[Dataset, VirtualOrder]
) -> None:
    dataset, order = data
    whole = local(dataset, order, 3)
    feeder = ray.remote(num_cpus=0, max_concurrency=16)(Lossy).remote(dataset, order, stop_step=order.steps(1))
    owner = ray.remote(num_cpus=0)(Elsewhere).remote()
    refs = ray.get(owner.put.remote())
    ray.get(feeder.lose.remote(refs))
    ray.kill(owner)
    await_loss(refs)
    feed = RayFeed(feeder, dataset, order, SCHEMA, timeout_s=60)
    for step in range(3):
        assert same([feed.next_batch(step)], whole[step])
    assert feed.num_read_here >= 1
    stop(feeder, feed)


def test_a_producers_error_reaches_the_trainer_with_its_cause(full_cluster: None, tmp_path: Path) -> None:
    for i in range(2):
        pq.write_table(pa.table({"y": [0] * 50, "u": range(50), "l": [[1]] * 50}), tmp_path / f"{i}.parquet")
    dataset = scan_dataset(str(tmp_path), SCHEMA)
    order = VirtualOrder(dataset.files, OrderSpec(batch_size=10, window_rows=50, shuffle=False))
    (tmp_path / "1.parquet").write_bytes(b"gone")
    feeder = start(dataset, order)
    feed = RayFeed(feeder, dataset, order, SCHEMA, timeout_s=120)
    with pytest.raises(DataError, match=r"1\.parquet, row group 0: cannot be read"):
        for step in range(10):
            feed.next_batch(step)
    stop(feeder, feed)


def test_a_feeder_that_does_not_answer_meets_the_deadline(
    full_cluster: None, data: tuple[Dataset, VirtualOrder]
) -> None:
    class Silent:
        def get_blocks(self, *args: object, **kwargs: object) -> None:
            """Never ready."""

    dataset, order = data
    silent = ray.remote(num_cpus=0)(Silent).remote()
    feed = RayFeed(silent, dataset, order, SCHEMA, timeout_s=2)
    with pytest.raises(ExchangeTimeoutError, match="window 0"):
        feed.next_batch(0)
    feed.close()
    ray.kill(silent)
    orphan = RayFeed(silent, dataset, order, SCHEMA, timeout_s=60)
    with pytest.raises(ClusterError, match="the feeder actor died"):
        orphan.next_batch(0)
    orphan.close()
