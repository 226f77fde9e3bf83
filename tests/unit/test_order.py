"""The virtual order, by its numbered invariants (platform/order.py) and PROTOCOLS D1, D2."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kernels.errors import ConfigError, DataError
from shoal.kernels.schema import DataFile
from shoal.platform.order import OrderSpec, VirtualOrder, lane_of, slice_bounds

PINNED_GROUPS = [(1, 0), (0, 1), (0, 0)]
PINNED_ROWS = [14, 8, 13, 10, 4, 12, 0, 7, 11, 6, 5, 3, 1, 2, 9, 15]

specs = st.builds(
    OrderSpec,
    batch_size=st.integers(1, 50),
    seed=st.integers(0, 2**63 - 1),
    shuffle=st.booleans(),
    window_rows=st.integers(1, 80),
    num_lanes=st.integers(1, 9),
)
row_groups = st.lists(st.lists(st.integers(0, 30), max_size=4), min_size=1, max_size=5)


def order_of(sizes: list[list[int]], spec: OrderSpec) -> VirtualOrder | None:
    files = [DataFile(f"/data/part-{i}.parquet", 1000 + i, tuple(groups)) for i, groups in enumerate(sizes)]
    return VirtualOrder(files, spec) if sum(map(sum, sizes)) else None


def epoch_rows(order: VirtualOrder, epoch: int) -> list[tuple[int, int, int]]:
    """(file, row group, row) at each position, built from windows and permutations."""
    rows: list[tuple[int, int, int]] = []
    for window in order.windows(epoch):
        assert window.start == len(rows)
        whole = [(g.file, g.index, row) for g in window.row_groups for row in range(g.num_rows)]
        rows += [whole[i] for i in order.permutation(window).tolist()]
        assert window.stop == len(rows)
    return rows


@settings(max_examples=60, deadline=None)
@given(row_groups, specs, st.integers(0, 5))
def test_1_an_epoch_is_a_permutation_of_all_rows(sizes: list[list[int]], spec: OrderSpec, epoch: int) -> None:
    order = order_of(sizes, spec)
    if order is None:
        return
    rows = epoch_rows(order, epoch)
    everything = [(f, g, r) for f, groups in enumerate(sizes) for g, n in enumerate(groups) for r in range(n)]
    assert sorted(rows) == everything
    if not spec.shuffle:
        assert rows == everything
    position = len(rows) // 2
    path, group, row = order.origin(epoch, position)
    assert (order.files.index(next(f for f in order.files if f.path == path)), group, row) == rows[position]


def test_2_content_depends_on_seed_and_epoch_only() -> None:
    sizes = [[40, 30, 20], [10, 60]]
    spec = OrderSpec(batch_size=16, seed=5, window_rows=50)
    order = order_of(sizes, spec)
    again = pickle.loads(pickle.dumps(order))
    assert epoch_rows(order, 3) == epoch_rows(again, 3)
    assert epoch_rows(order, 0) != epoch_rows(order, 1)
    other = order_of(sizes, OrderSpec(batch_size=16, seed=6, window_rows=50))
    assert epoch_rows(order, 0) != epoch_rows(other, 0)
    # The listing order of the files does not matter.
    reverse = VirtualOrder(list(reversed(order.files)), spec)
    assert epoch_rows(reverse, 3) == epoch_rows(order, 3)


def test_2_the_permutation_is_pinned() -> None:
    # A change of these numbers would change the data order of every stored run.
    order = order_of([[8, 8], [8]], OrderSpec(batch_size=4, seed=7, window_rows=16))
    assert [(g.file, g.index) for w in order.windows(1) for g in w.row_groups] == PINNED_GROUPS
    assert order.permutation(order.windows(1)[0]).tolist() == PINNED_ROWS


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 500), st.integers(1, 40), st.data())
def test_3_rank_slices_are_contiguous_disjoint_and_complete(rows: int, world: int, data: st.DataObject) -> None:
    shares = data.draw(st.none() | st.lists(st.floats(0, 10), min_size=world, max_size=world))
    if shares is not None and sum(shares) <= 0:
        return
    bounds = [slice_bounds(rows, rank, world, shares) for rank in range(world)]
    assert bounds[0][0] == 0 and bounds[-1][1] == rows
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    if shares is None or len(set(shares)) == 1:
        sizes = [stop - start for start, stop in bounds]
        assert max(sizes) - min(sizes) <= 1
        assert bounds == [slice_bounds(rows, rank, world) for rank in range(world)]


@settings(max_examples=60, deadline=None)
@given(row_groups, specs, st.integers(1, 6))
def test_3_lanes_cover_each_batch_and_each_rank_finds_its_rows(
    sizes: list[list[int]], spec: OrderSpec, world: int
) -> None:
    order = order_of(sizes, spec)
    if order is None:
        return
    for window in order.windows(1):
        lanes = [(offsets + window.start).tolist() for offsets in order.lane_rows(window)]
        assert sorted(p for lane in lanes for p in lane) == list(range(window.start, window.stop))
        assert all(lane == sorted(lane) for lane in lanes)
        for rank in range(world):
            mine: set[int] = set()
            for batch in order.batches_of(window):
                start, stop = slice_bounds(batch.num_rows, rank, world)
                mine |= set(range(batch.start + start, batch.start + stop)) & set(range(window.start, window.stop))
            needed = {lane for lane, positions in enumerate(lanes) if mine & set(positions)}
            assert set(order.lanes_of(window, rank, world)) == needed


def test_3_lane_of_inverts_the_lane_bounds() -> None:
    for n, lanes in itertools.product(range(1, 30), range(1, 12)):
        for lane in range(lanes):
            for row in range(lane * n // lanes, (lane + 1) * n // lanes):
                assert lane_of(row, n, lanes) == lane


@settings(max_examples=60, deadline=None)
@given(row_groups, specs)
def test_4_steps_run_on_across_epochs_and_only_the_last_batch_is_short(sizes: list[list[int]], spec: OrderSpec) -> None:
    order = order_of(sizes, spec)
    if order is None:
        return
    n = order.batches_per_epoch
    assert order.steps(2) == 2 * n
    positions = []
    for step in range(2 * n):
        batch = order.locate(step)
        assert (batch.epoch, batch.batch) == divmod(step, n)
        assert batch.num_rows == spec.batch_size or batch.batch == n - 1
        positions += [(batch.epoch, p) for p in range(batch.start, batch.stop)]
        windows = order.windows_of(batch.epoch, batch.start, batch.stop)
        assert windows[0].start <= batch.start and windows[-1].stop >= batch.stop
    assert positions == [(epoch, p) for epoch in (0, 1) for p in range(order.num_rows)]


def test_windows_follow_each_other_across_epochs() -> None:
    order = order_of([[10, 10, 10]], OrderSpec(batch_size=4, window_rows=10))
    window, seen = order.windows(0)[0], []
    for _ in range(7):
        seen.append((window.epoch, window.index))
        window = order.next_window(window)
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_more_ranks_than_rows_leaves_ranks_empty() -> None:
    order = order_of([[1]], OrderSpec(batch_size=8))
    assert [order.rank_range(0, rank, 3) for rank in range(3)] == [(0, 0), (0, 0), (0, 1)]


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        VirtualOrder([DataFile("/a", 100, (0, 0))], OrderSpec(batch_size=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 8}, "batch_size was 4, is 8"),
        ({"num_lanes": 2}, "num_lanes was 16, is 2"),
        ({"window_rows": 9}, "window_rows was 131072, is 9"),
        ({"seed": 1}, "seed was 0, is 1"),
    ],
)
def test_d2_other_options_are_refused_by_name(change: dict, message: str) -> None:
    files = [DataFile("/a/x.parquet", 100, (5,))]
    stored = VirtualOrder(files, OrderSpec(batch_size=4)).fingerprint()
    with pytest.raises(ConfigError, match=message):
        VirtualOrder(files, OrderSpec(**{"batch_size": 4, **change})).check_fingerprint(stored)


def test_d2_other_files_are_refused_by_name_and_moved_ones_accepted() -> None:
    spec = OrderSpec(batch_size=4)
    stored = VirtualOrder([DataFile("/a/x.parquet", 100, (5,))], spec).fingerprint()
    VirtualOrder([DataFile("/b/x.parquet", 100, (5,))], spec).check_fingerprint(stored)
    for file, message in (
        (DataFile("/a/x.parquet", 101, (5,)), "x.parquet: its size in bytes was 100, is 101"),
        (DataFile("/a/x.parquet", 100, (6,)), r"rows per row group was \[5\], is \[6\]"),
        (DataFile("/a/z.parquet", 100, (5,)), "x.parquet: its name was x.parquet, is z.parquet"),
    ):
        with pytest.raises(ConfigError, match=message):
            VirtualOrder([file], spec).check_fingerprint(stored)
    two = [DataFile("/a/x.parquet", 100, (5,)), DataFile("/a/y.parquet", 1, (1,))]
    with pytest.raises(ConfigError, match=r"1 files, there are 2 .*y.parquet"):
        VirtualOrder(two, spec).check_fingerprint(stored)


def test_shares_follow_their_proportion() -> None:
    assert [slice_bounds(100, r, 3, (1, 2, 1)) for r in range(3)] == [(0, 25), (25, 75), (75, 100)]
    with pytest.raises(ConfigError, match="shares"):
        slice_bounds(10, 0, 2, (0, 0))
    with pytest.raises(ConfigError, match="3 shares were given for 2 ranks"):
        slice_bounds(10, 0, 2, (1, 1, 1))


def test_the_module_imports_neither_numpy_nor_torch_nor_ray() -> None:
    code = "import sys, shoal.platform.order; print([m for m in ('numpy', 'torch', 'ray') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


def test_permutations_look_random() -> None:
    order = order_of([[1000]], OrderSpec(batch_size=10, seed=1))
    first = [int(order.permutation(order.windows(epoch)[0])[0]) for epoch in range(200)]
    assert len(set(first)) > 150
    assert abs(np.mean(first) - 500) < 100
