"""Windows of the data order as Arrow tables: reading, arranging and cutting them (PROTOCOLS D1, D3).

An *arranged* table holds rows of one epoch in ascending position, and each row's position in the column ``POSITION``;
rows lost to a policy are gaps. Whatever brought the rows here, position decides where they go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from shoal.actors.dataset import BadFile, Dataset
from shoal.kernels.errors import DataError
from shoal.kernels.schema import DataFile

if TYPE_CHECKING:
    from collections.abc import Callable

#: The column that carries each row's position in the epoch.
POSITION = "__shoal_position"


class RowGroupLike(Protocol):
    """A row group: number of its file, its number in the file, its rows."""

    @property
    def file(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def num_rows(self) -> int: ...


class WindowLike(Protocol):
    """Positions [start, stop) of an epoch and the row groups that hold them."""

    @property
    def epoch(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def row_groups(self) -> Sequence[RowGroupLike]: ...


class BatchRangeLike(Protocol):
    """A global batch: positions [start, stop) of an epoch."""

    @property
    def epoch(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


class DataOrder(Protocol):
    """What the feed needs of ``shoal.platform.order.VirtualOrder``, which alone implements it (arrows point down)."""

    files: tuple[DataFile, ...]

    def locate(self, step: int) -> BatchRangeLike: ...
    def rank_range(
        self, step: int, rank: int, world_size: int, shares: Sequence[float] | None = None
    ) -> tuple[int, int]: ...
    def windows_of(self, epoch: int, start: int, stop: int) -> Sequence[WindowLike]: ...
    def next_window(self, window: WindowLike) -> WindowLike: ...
    def permutation(self, window: WindowLike) -> np.ndarray: ...
    def origin(self, epoch: int, position: int) -> tuple[str, int, int]: ...
    def lanes_of(
        self, window: WindowLike, rank: int, world_size: int, shares: Sequence[float] | None = None
    ) -> tuple[int, ...]: ...
    def lane_rows(self, window: WindowLike) -> list[np.ndarray]: ...


class WindowReader:
    """Reads the row groups of windows in this process, within the budget of bad files. One thread at a time."""

    def __init__(self, dataset: Dataset, order: DataOrder) -> None:
        self._dataset = dataset
        self._order = order
        self.bad_files: dict[str, BadFile] = {file.path: file for file in dataset.bad_files}

    def read(self, window: WindowLike) -> pa.Table:
        """The arranged table of a window. Raises DataError naming the file once ``max_bad_files`` is used up."""
        tables = {number: self._read_row_group(group) for number, group in enumerate(window.row_groups)}
        return arrange_window(self._order, window, tables, self._dataset.arrow_schema)

    def _read_row_group(self, group: RowGroupLike) -> pa.Table | None:
        path = self._order.files[group.file].path
        return read_within_budget(
            lambda: self._dataset.read_row_group(path, group.index, num_rows=group.num_rows),
            path,
            self.bad_files,
            self._dataset.max_bad_files,
        )


def read_within_budget(
    read: Callable[[], pa.Table], path: str, bad_files: dict[str, BadFile], max_bad_files: int
) -> pa.Table | None:
    """``read()``, or None if it fails and ``path`` may join ``bad_files`` without exceeding ``max_bad_files``."""
    try:
        return read()
    except DataError as error:
        bad_files.setdefault(path, BadFile(path, str(error)))
        if len(bad_files) > max_bad_files:
            raise
        return None


def arrange_window(
    order: DataOrder, window: WindowLike, tables: Mapping[int, pa.Table | None], arrow_schema: pa.Schema
) -> pa.Table:
    """The arranged table of a window from its row groups, by their number in the window; None where one is lost."""
    starts = np.cumsum([0, *(group.num_rows for group in window.row_groups)])
    present: list[pa.Table] = []
    is_lost = np.zeros(window.num_rows, dtype=bool)
    for number, group in enumerate(window.row_groups):
        table = tables[number]
        if table is None:
            is_lost[starts[number] : starts[number + 1]] = True
            continue
        assert table.num_rows == group.num_rows
        present.append(table)
    rows = order.permutation(window)
    positions = np.arange(window.start, window.stop, dtype=np.int64)
    if is_lost.any():
        kept = ~is_lost[rows]
        positions = positions[kept]
        rows = (np.cumsum(~is_lost) - 1)[rows[kept]]
    whole = pa.concat_tables(present) if present else arrow_schema.empty_table()
    return permute(whole, rows).append_column(POSITION, pa.array(positions))


def permute(table: pa.Table, rows: np.ndarray) -> pa.Table:
    """The given rows of a table, as one chunk."""
    if rows.size == table.num_rows and np.array_equal(rows, np.arange(rows.size)):
        return table.combine_chunks()
    return table.combine_chunks().take(pa.array(rows))


def cut_lanes(order: DataOrder, window: WindowLike, arranged: pa.Table) -> list[pa.Table]:
    """One arranged table per lane: the blocks of a window (D3)."""
    positions = arranged.column(POSITION).to_numpy()
    lanes = []
    for offsets in order.lane_rows(window):
        wanted = offsets + window.start
        at = np.searchsorted(positions, wanted)
        if positions.size != window.num_rows:  # Rows are missing: keep those that are there.
            is_there = at < positions.size
            is_there[is_there] = positions[at[is_there]] == wanted[is_there]
            at = at[is_there]
        lanes.append(arranged.take(pa.array(at)).combine_chunks())
    return lanes
