"""The local feed: promise 3 (a batch does not depend on the world), D4, bad files (faults 40, 41, 43, 45, 47, 48)."""

from __future__ import annotations

import threading
import traceback
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shoal.actors.dataset import Dataset, common_type, list_files, scan_dataset
from shoal.actors.feed import Assignment, LocalFeed
from shoal.actors.prefetch import Prefetcher
from shoal.actors.windows import POSITION, arrange_window, cut_lanes
from shoal.kernels.batch import Batch
from shoal.kernels.errors import DataError, ExchangeTimeoutError, SchemaError
from shoal.kernels.schema import Schema, SparseColumn
from shoal.platform.order import OrderSpec, VirtualOrder

SCHEMA = Schema(
    label="y",
    dense=("d",),
    sparse=(SparseColumn(name="u"), SparseColumn(name="l", weights_column="lw"), SparseColumn(name="s")),
    extras=("row",),
)


def rows(start: int, stop: int) -> pa.Table:
    """Rows numbered from ``start``, whose every value follows from the number."""
    numbers = np.arange(start, stop)
    lists = [list(range(n % 4)) if n % 7 else None for n in numbers.tolist()]
    return pa.table(
        {
            "row": numbers,
            "y": (numbers % 3 == 0).astype(np.int8),
            "d": numbers * 0.5,
            "u": numbers * 10,
            "l": pa.array(lists, pa.list_(pa.int32())),
            "lw": pa.array([None if v is None else [0.5] * len(v) for v in lists], pa.list_(pa.float32())),
            "s": [f"text {n % 5}" for n in numbers.tolist()],
            "unused": ["x"] * len(numbers),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files with ragged row groups, 661 rows."""
    path = tmp_path_factory.mktemp("data")
    for i, (start, stop) in enumerate([(0, 250), (250, 257), (257, 661)]):
        pq.write_table(rows(start, stop), path / f"part-{i}.parquet", row_group_size=97)
    (path / "_SUCCESS").write_text("")
    (path / ".hidden.parquet").write_text("no")
    return path


def make(folder: Path, **spec: object) -> tuple[Dataset, VirtualOrder]:
    dataset = scan_dataset(str(folder), SCHEMA)
    fields = {"batch_size": 64, "window_rows": 150, "num_lanes": 4, "seed": 3, **spec}
    return dataset, VirtualOrder(dataset.files, OrderSpec(**fields))


def read_all(dataset: Dataset, order: VirtualOrder, steps: int, assignment: Assignment | None = None) -> list[Batch]:
    feed = LocalFeed(dataset, order, SCHEMA, assignment=assignment, stop_step=steps, timeout_s=30)
    try:
        return [feed.next_batch(step) for step in range(steps)]
    finally:
        feed.close()


def join(parts: list[Batch]) -> dict[str, object]:
    """All values of some batches' rows, in row order."""
    bags = []
    for part in parts:
        by_key = part.sparse_features.to_dict()
        dense = {key: (by_key[key].to_dense(), by_key[key].to_dense_weights()) for key in SCHEMA.keys}
        bags += [[(dense[k][0][i].tolist(), dense[k][1][i].tolist()) for k in SCHEMA.keys] for i in range(len(part))]
    return {
        "bags": bags,
        "dense": torch.cat([part.dense_features for part in parts]).tolist(),
        "labels": torch.cat([part.labels for part in parts]).tolist(),
        "row": torch.cat([part.extras["row"] for part in parts]).tolist(),
    }


def test_an_epoch_holds_every_row_once_with_its_own_values(folder: Path) -> None:
    dataset, order = make(folder)
    batches = read_all(dataset, order, order.steps(1))
    assert len(batches) == 11  # k batches give k steps
    everything = join(batches)
    assert sorted(everything["row"]) == list(range(661)) and everything["row"] != list(range(661))
    expected = rows(0, 661)
    for i, row in enumerate(everything["row"]):
        (u, _), (ids, weights), _ = everything["bags"][i]
        assert u == [row * 10]
        assert ids == (expected["l"][row].as_py() or []) and weights == [0.5] * len(ids)
        assert everything["dense"][i] == [row * 0.5] and everything["labels"][i] == (row % 3 == 0)


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("shares", [None, "uneven"])
def test_promise_3_ranks_together_read_the_same_global_batch(folder: Path, world: int, shares: str | None) -> None:
    dataset, order = make(folder)
    steps = order.steps(2)
    whole = read_all(dataset, order, steps)
    given = None if shares is None else tuple(range(world))  # rank 0 has no share at all
    parts = [read_all(dataset, order, steps, Assignment(rank, world, given)) for rank in range(world)]
    for step in range(steps):
        assert join([part[step] for part in parts]) == join([whole[step]])
        if given is not None:
            assert len(parts[0][step]) == 0


def test_evaluation_order_is_file_order(folder: Path) -> None:
    dataset, order = make(folder, shuffle=False)
    assert join(read_all(dataset, order, order.steps(1)))["row"] == list(range(661))


def test_any_step_may_be_the_first_and_the_next(folder: Path) -> None:
    dataset, order = make(folder)
    steps = order.steps(2)
    whole = read_all(dataset, order, steps)
    feed = LocalFeed(dataset, order, SCHEMA, start_step=7, stop_step=steps, timeout_s=30)
    try:
        for step in (7, 8, 9, 2, 3, 20, 21, 0, 0, 5):
            assert torch.equal(feed.next_batch(step).extras["row"], whole[step].extras["row"])
        feed.reassign(Assignment(1, 3), 6)
        assert torch.equal(feed.next_batch(6).extras["row"], whole[6].extras["row"][21:42])
    finally:
        feed.close()


def test_a_step_asked_for_while_the_one_before_is_loading_does_not_wait_for_ever() -> None:
    # Step 4 is being loaded when step 5 is wanted: the batch of 4, never taken, must not fill the bound.
    import threading

    from shoal.actors.prefetch import Prefetcher

    may_finish, has_started = threading.Event(), threading.Event()

    def load(step: int):  # type: ignore[no-untyped-def]
        if step == 4:
            has_started.set()
            may_finish.wait(20)
        return step

    prefetcher = Prefetcher(load, start_step=4, stop_step=None, depth=1, timeout_s=10, describe=str)
    try:
        has_started.wait(20)
        threading.Timer(0.2, may_finish.set).start()
        assert prefetcher.get(5) == 5
        assert [prefetcher.get(step) for step in (6, 7, 2, 3)] == [6, 7, 2, 3]
    finally:
        prefetcher.close()


def test_one_row_and_three_workers_gives_empty_batches_of_the_right_types(tmp_path: Path) -> None:
    pq.write_table(rows(0, 1), tmp_path / "one.parquet")
    dataset, order = make(tmp_path)
    parts = [read_all(dataset, order, 2, Assignment(rank, 3)) for rank in range(3)]
    assert [[len(batch) for batch in part] for part in parts] == [[0, 0], [0, 0], [1, 1]]
    for empty, full in ((parts[0][0], parts[2][0]), (parts[1][1], parts[2][1])):
        for get in (
            lambda b: b.dense_features,
            lambda b: b.labels,
            lambda b: b.sparse_features.values(),
            lambda b: b.sparse_features.offsets(),
            lambda b: b.sparse_features.weights(),
            lambda b: b.extras["row"],
        ):
            assert get(empty).dtype == get(full).dtype
        assert empty.sparse_features.stride() == 0 and empty.sparse_features.keys() == SCHEMA.keys


def test_lanes_partition_a_window_and_lost_rows_leave_gaps(folder: Path) -> None:
    dataset, order = make(folder)
    window = order.windows(0)[1]
    tables = {
        n: dataset.read_row_group(order.files[g.file].path, g.index, num_rows=g.num_rows)
        for n, g in enumerate(window.row_groups)
    }
    arranged = arrange_window(order, window, tables, dataset.arrow_schema)
    lanes = cut_lanes(order, window, arranged)
    positions = sorted(p for lane in lanes for p in lane.column(POSITION).to_pylist())
    assert positions == list(range(window.start, window.stop))
    # A lost row group leaves a gap: positions stay, rows do not move up.
    lost = {**tables, 0: None}
    short = arrange_window(order, window, lost, dataset.arrow_schema)
    assert short.num_rows == window.num_rows - window.row_groups[0].num_rows
    keep = dict(zip(arranged.column(POSITION).to_pylist(), arranged.column("row").to_pylist()))
    assert all(keep[p] == r for p, r in zip(short.column(POSITION).to_pylist(), short.column("row").to_pylist()))
    assert sum(lane.num_rows for lane in cut_lanes(order, window, short)) == short.num_rows


def test_a_bad_label_names_file_row_group_and_row(tmp_path: Path) -> None:
    table = rows(0, 200)
    labels = table["y"].to_numpy().copy()
    labels[123] = 7
    table = table.set_column(table.column_names.index("y"), "y", pa.array(labels))
    pq.write_table(table, tmp_path / "bad.parquet", row_group_size=50)
    dataset, order = make(tmp_path)
    with pytest.raises(DataError, match=r"bad.parquet, row group 2, row 23, column 'y': the label is 7"):
        read_all(dataset, order, order.steps(1))


def test_an_exception_in_the_feed_reaches_the_trainer_with_its_traceback(folder: Path) -> None:
    dataset, order = make(folder)
    feed = LocalFeed(dataset, order, SCHEMA, timeout_s=30)
    feed.next_batch(0)

    def explode(path: str, index: int, *, num_rows: int) -> pa.Table:
        raise ZeroDivisionError(path)

    object.__setattr__(dataset, "read_row_group", explode)
    try:
        with pytest.raises(ZeroDivisionError) as caught:
            for step in range(1, 100):
                feed.next_batch(step)
        assert "explode" in "".join(traceback.format_exception(caught.value))
    finally:
        feed.close()


def test_a_stuck_load_meets_its_deadline_and_says_what_is_missing() -> None:
    release = threading.Event()
    prefetcher = Prefetcher(
        lambda step: release.wait(20),  # type: ignore[arg-type,return-value]
        start_step=0,
        stop_step=None,
        depth=2,
        timeout_s=0.05,
        describe=lambda: "waiting for window 3",
    )
    with pytest.raises(ExchangeTimeoutError, match=r"step 0 within 0.05 s: waiting for window 3"):
        prefetcher.get(0)
    release.set()
    prefetcher.close()


def test_prefetch_depth_bounds_what_is_loaded() -> None:
    loaded: list[int] = []
    reached = threading.Event()

    def load(step: int) -> int:
        loaded.append(step)
        if step == 3:
            reached.set()
        return step

    prefetcher = Prefetcher(
        load,  # type: ignore[arg-type]
        start_step=0,
        stop_step=100,
        depth=3,
        timeout_s=5,
        describe=str,
    )
    assert prefetcher.get(0) == 0
    assert reached.wait(5)
    assert prefetcher.get(1) == 1
    assert max(loaded) <= 5
    prefetcher.close()


def test_an_empty_data_set_fails_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no Parquet files"):
        scan_dataset(str(tmp_path), SCHEMA)
    pq.write_table(rows(0, 0), tmp_path / "none.parquet")
    with pytest.raises(DataError, match="is empty"):
        scan_dataset(str(tmp_path), SCHEMA)
    with pytest.raises(DataError, match="does not exist"):
        scan_dataset(str(tmp_path / "nowhere"), SCHEMA)


def test_truncated_and_zero_byte_files_stop_or_use_the_budget(tmp_path: Path) -> None:
    pq.write_table(rows(0, 100), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "c.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"2 of 3 files cannot be read, max_bad_files is 1: .*b\.parquet.*c\.parquet"):
        scan_dataset(str(tmp_path), SCHEMA, max_bad_files=1)
    dataset = scan_dataset(str(tmp_path), SCHEMA, max_bad_files=2)
    assert [Path(f.path).name for f in dataset.bad_files] == ["b.parquet", "c.parquet"] and dataset.num_rows == 100


def test_a_file_that_goes_bad_later_leaves_short_batches_within_the_budget(tmp_path: Path) -> None:
    for i in range(3):
        pq.write_table(rows(100 * i, 100 * (i + 1)), tmp_path / f"{i}.parquet")
    dataset = scan_dataset(str(tmp_path), SCHEMA, max_bad_files=1)
    order = VirtualOrder(dataset.files, OrderSpec(batch_size=64, window_rows=150))
    (tmp_path / "1.parquet").write_bytes(b"gone")
    batches = read_all(dataset, order, order.steps(1))
    assert sorted(join(batches)["row"]) == [*range(100), *range(200, 300)]
    assert sum(len(batch) < 64 for batch in batches) >= 2  # left short, not back-filled (D4)
    assert sum(batch.counters.get("rows lost with unreadable files", 0) for batch in batches) == 100
    strict = scan_dataset(str(tmp_path), SCHEMA, max_bad_files=1)
    (tmp_path / "2.parquet").write_bytes(b"gone")
    with pytest.raises(DataError, match=r"2\.parquet, row group 0: cannot be read"):
        read_all(strict, VirtualOrder(strict.files, OrderSpec(batch_size=64)), 1)


def test_a_rewritten_file_is_noticed(tmp_path: Path) -> None:
    pq.write_table(rows(0, 100), tmp_path / "a.parquet")
    dataset, order = make(tmp_path)
    pq.write_table(rows(0, 90), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="holds 90 rows; it held 100"):
        read_all(dataset, order, 1)


def test_integer_widths_that_drift_are_unified_up_front(tmp_path: Path) -> None:
    first, second = rows(0, 100), rows(100, 200)
    at = first.column_names.index("u")
    first = first.set_column(at, "u", first["u"].cast(pa.int32()))
    pq.write_table(first, tmp_path / "a.parquet")
    pq.write_table(second, tmp_path / "b.parquet")
    dataset, order = make(tmp_path)
    assert dataset.arrow_schema.field("u").type == pa.int64()
    assert sorted(join(read_all(dataset, order, order.steps(1)))["row"]) == list(range(200))


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("u", pa.array(["a"] * 10), r"'u' is int64 in .*a\.parquet but string in .*b\.parquet"),
        ("u", pa.array([2**63] * 10, pa.uint64()), r"int64 in .*a\.parquet but uint64 in .*b\.parquet"),
        ("u", pa.array([[1]] * 10), r"int64 in .*a\.parquet but list"),
        ("u", pa.array([1.5] * 10), r"b\.parquet: column 'u' \(type double\).*in .*a\.parquet it is int64"),
        ("s", None, r"b\.parquet: column 's': the data has no such column; in .*a\.parquet it is string"),
    ],
)
def test_drift_without_a_common_type_names_both_files(
    tmp_path: Path, column: str, values: pa.Array | None, message: str
) -> None:
    pq.write_table(rows(0, 10), tmp_path / "a.parquet")
    other = rows(10, 20)
    at = other.column_names.index(column)
    other = other.remove_column(at) if values is None else other.set_column(at, column, values)
    pq.write_table(other, tmp_path / "b.parquet")
    with pytest.raises(SchemaError, match=message):
        scan_dataset(str(tmp_path), SCHEMA)


def test_common_types() -> None:
    assert common_type(pa.int8(), pa.uint32()) == pa.int64()
    assert common_type(pa.uint8(), pa.uint64()) == pa.uint64()
    assert common_type(pa.null(), pa.string()) == pa.string()
    assert common_type(pa.string(), pa.binary()) == pa.large_binary()
    assert common_type(pa.list_(pa.int8()), pa.large_list(pa.int64())) == pa.large_list(pa.int64())
    assert common_type(pa.dictionary(pa.int8(), pa.string()), pa.string()) == pa.string()
    assert common_type(pa.int32(), pa.float32()) == pa.float64()
    assert common_type(pa.int32(), pa.string()) is None


def test_strings_that_drift_to_binary_keep_their_ids(tmp_path: Path) -> None:
    first, second = rows(0, 50), rows(0, 50)
    at = first.column_names.index("s")
    pq.write_table(first, tmp_path / "a.parquet")
    pq.write_table(second.set_column(at, "s", second["s"].cast(pa.binary())), tmp_path / "b.parquet")
    dataset, order = make(tmp_path, shuffle=False)
    ids = [bag[2][0] for bag in join(read_all(dataset, order, order.steps(1)))["bags"]]
    assert ids[:50] == ids[50:] and len({i[0] for i in ids}) == 5


def test_paths_may_be_files_folders_globs_and_uris(folder: Path) -> None:
    names = [f"part-{i}.parquet" for i in range(3)]
    for paths, expected in (
        (str(folder), names),
        ([str(folder / n) for n in names[:2]], names[:2]),
        (str(folder / "part-[01].parquet"), names[:2]),
        (f"file://{folder}", names),
        ([f"file://{folder}/part-0*.parquet", str(folder / names[2])], [names[0], names[2]]),
    ):
        _, files = list_files(paths)
        assert [Path(path).name for path, _ in files] == expected
    with pytest.raises(DataError, match="different file systems"):
        list_files([str(folder), "s3://bucket/data?region=us-east-1&endpoint_override=127.0.0.1:1"])
