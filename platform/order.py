"""The virtual order of a data set: which rows make up global batch s (PROTOCOLS D1, D2; promise 3).

Pure: no I/O, no clock; numpy is imported only where a permutation is drawn. Invariants, asserted by number in its test:

1. An epoch is a permutation of all rows: nothing is dropped, nothing repeated.
2. The content of global batch s is a function of (files, seed, epoch, s) alone; ranks and shares only cut it.
3. The slices of the ranks of a batch are contiguous, disjoint and cover it, for any world size and shares; at equal
   shares they differ by at most one row.
4. Steps run on across epochs: step s is batch s % n of epoch s // n, n batches an epoch; only an epoch's last is short.

*Position* p of an epoch is the p-th row of its order. Random numbers are raw 64-bit words of Philox4x64-10 (Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by (seed, purpose) with (epoch, window) in the
counter's upper words; a permutation is the stable argsort of such words, so it depends on no library's shuffle.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from shoal.kernels.errors import ConfigError, DataError
from shoal.kernels.schema import DataFile

if TYPE_CHECKING:
    import numpy as np

# What a stream of random words is for: the second half of the Philox key.
_ROW_GROUPS = 1
_ROWS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderSpec:
    """What, besides the files, the order depends on. All of it is stored with the run (D2)."""

    #: Rows of a global batch, >= 1.
    batch_size: int
    seed: int = 0
    #: Whether rows are permuted; evaluation reads them in file order.
    shuffle: bool = True
    #: Rows are permuted within windows of at least this many rows (whole row groups), >= 1.
    window_rows: int = 131_072
    #: Slices of a global batch that are transported as units, in [1, 65536].
    num_lanes: int = 16

    def validate(self) -> None:
        """Raise ConfigError naming the field, its value and the allowed range."""
        checks = (
            ("batch_size", self.batch_size, self.batch_size >= 1, ">= 1"),
            ("seed", self.seed, 0 <= self.seed < 2**63, "in [0, 2**63)"),
            ("window_rows", self.window_rows, self.window_rows >= 1, ">= 1"),
            ("num_lanes", self.num_lanes, 1 <= self.num_lanes <= 65536, "in [1, 65536]"),
        )
        for name, value, ok, allowed in checks:
            if not ok:
                raise ConfigError(f"data order: {name} is {value}; it must be {allowed}")


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """One row group: the file's number in the order's list of files, its number in the file, and its rows."""

    file: int
    index: int
    num_rows: int


@dataclasses.dataclass(frozen=True)
class Window:
    """Row groups that are read and permuted together: positions [start, stop) of an epoch."""

    epoch: int
    index: int
    start: int
    stop: int
    row_groups: tuple[RowGroup, ...]

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class BatchRange:
    """Global batch ``batch`` of ``epoch``: positions [start, stop)."""

    epoch: int
    batch: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


def slice_bounds(num_rows: int, rank: int, world_size: int, shares: Sequence[float] | None = None) -> tuple[int, int]:
    """Rows [start, stop) of a batch of ``num_rows`` that belong to ``rank``: floor(n c_r) to floor(n c_(r+1)) (D1).

    ``shares`` are relative amounts of work, one per rank, >= 0 with a positive sum (None: equal). Exact rational
    arithmetic, so every rank computes every other rank's slice alike.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not in [0, {world_size})")
    if shares is None:
        return num_rows * rank // world_size, num_rows * (rank + 1) // world_size
    if len(shares) != world_size:
        raise ConfigError(f"{len(shares)} shares were given for {world_size} ranks")
    cumulative = _cumulative_shares(tuple(shares))
    return int(num_rows * cumulative[rank]), int(num_rows * cumulative[rank + 1])


@functools.lru_cache(maxsize=64)
def _cumulative_shares(shares: tuple[float, ...]) -> tuple[Fraction, ...]:
    exact = [Fraction(share) for share in shares]
    total = sum(exact, Fraction(0))
    if min(exact) < 0 or total <= 0:
        raise ConfigError(f"shares are {list(shares)}; they must be >= 0 and not all zero")
    return tuple(c / total for c in accumulate(exact, initial=Fraction(0)))


class VirtualOrder:
    """The order of every epoch of a data set. Immutable; small enough to send to every worker.

    ``files`` are sorted by path here, so the order in which a store lists them does not matter. Raises DataError when
    they hold no rows (fault 47).
    """

    def __init__(self, files: Sequence[DataFile], spec: OrderSpec) -> None:
        spec.validate()
        self.spec = spec
        self.files: tuple[DataFile, ...] = tuple(sorted(files, key=lambda file: file.path))
        for first, second in zip(self.files, self.files[1:]):
            if first.path == second.path:
                raise DataError(f"the data set lists {first.path} twice")
        self._row_groups = tuple(
            RowGroup(number, index, rows)
            for number, file in enumerate(self.files)
            for index, rows in enumerate(file.row_groups)
            if rows > 0
        )
        self.num_rows = sum(group.num_rows for group in self._row_groups)
        if self.num_rows == 0:
            raise DataError(f"the data set is empty: {len(self.files)} files, 0 rows; check data.paths and any filter")
        # A cache, not state: threads of a feed share the order.
        self._lock = threading.Lock()
        self._cached_windows: dict[int, tuple[Window, ...]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return VirtualOrder, (self.files, self.spec)

    # -- steps and batches ---------------------------------------------------------------------------------------

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.num_rows // self.spec.batch_size)

    def steps(self, epochs: float) -> int:
        """Number of steps of ``epochs`` epochs; a fraction is rounded up to a whole batch."""
        return -int(-Fraction(epochs) * self.batches_per_epoch // 1)

    def locate(self, step: int) -> BatchRange:
        """The epoch, batch and positions of a step (from 0, counted across epochs)."""
        if step < 0:
            raise ConfigError(f"step {step} is negative")
        epoch, batch = divmod(step, self.batches_per_epoch)
        start = batch * self.spec.batch_size
        return BatchRange(epoch, batch, start, min(start + self.spec.batch_size, self.num_rows))

    def rank_range(
        self, step: int, rank: int, world_size: int, shares: Sequence[float] | None = None
    ) -> tuple[int, int]:
        """Positions [start, stop) of the step's epoch that ``rank`` processes; empty where start == stop."""
        batch = self.locate(step)
        start, stop = slice_bounds(batch.num_rows, rank, world_size, shares)
        return batch.start + start, batch.start + stop

    # -- windows -------------------------------------------------------------------------------------------------

    def windows(self, epoch: int) -> tuple[Window, ...]:
        """The windows of an epoch, in order: they partition its positions."""
        with self._lock:
            cached = self._cached_windows.get(epoch)
            if cached is None:
                if len(self._cached_windows) >= 4:
                    self._cached_windows.pop(min(self._cached_windows))
                cached = self._cached_windows[epoch] = tuple(self._cut_windows(epoch))
            return cached

    def _cut_windows(self, epoch: int) -> list[Window]:
        groups: Sequence[RowGroup] = self._row_groups
        if self.spec.shuffle:
            permutation = _permutation(self.spec.seed, _ROW_GROUPS, epoch, 0, len(groups))
            groups = [groups[i] for i in permutation.tolist()]
        windows: list[Window] = []
        members: list[RowGroup] = []
        start = stop = 0
        for group in groups:
            members.append(group)
            stop += group.num_rows
            if stop - start >= self.spec.window_rows:
                windows.append(Window(epoch, len(windows), start, stop, tuple(members)))
                members, start = [], stop
        if members:
            windows.append(Window(epoch, len(windows), start, stop, tuple(members)))
        return windows

    def windows_of(self, epoch: int, start: int, stop: int) -> tuple[Window, ...]:
        """The windows that hold positions [start, stop) of an epoch; none where the range is empty."""
        if start >= stop:
            return ()
        windows = self.windows(epoch)
        first = self._window_at(windows, start)
        last = self._window_at(windows, stop - 1)
        return windows[first : last + 1]

    def next_window(self, window: Window) -> Window:
        """The window that follows, in the next epoch after an epoch's last."""
        windows = self.windows(window.epoch)
        if window.index + 1 < len(windows):
            return windows[window.index + 1]
        return self.windows(window.epoch + 1)[0]

    def permutation(self, window: Window) -> np.ndarray:
        """int64 [rows]: which row of the window's concatenated row groups stands at each of its positions."""
        if self.spec.shuffle:
            return _permutation(self.spec.seed, _ROWS, window.epoch, window.index, window.num_rows)
        import numpy as np

        return np.arange(window.num_rows, dtype=np.int64)

    def origin(self, epoch: int, position: int) -> tuple[str, int, int]:
        """(file, row group, row within the row group) of a position of an epoch, for error messages."""
        windows = self.windows(epoch)
        window = windows[self._window_at(windows, position)]
        row = int(self.permutation(window)[position - window.start])
        for group in window.row_groups:
            if row < group.num_rows:
                return self.files[group.file].path, group.index, row
            row -= group.num_rows
        raise AssertionError("a window's row groups hold fewer rows than it counts")

    @staticmethod
    def _window_at(windows: Sequence[Window], position: int) -> int:
        return bisect_right(windows, position, key=lambda window: window.start) - 1

    # -- lanes ---------------------------------------------------------------------------------------------------

    def lanes_of(
        self, window: Window, rank: int, world_size: int, shares: Sequence[float] | None = None
    ) -> tuple[int, ...]:
        """The lanes of a window that hold rows of ``rank``, over all batches that touch the window."""
        lanes = self.spec.num_lanes
        needed: set[int] = set()
        for batch in self.batches_of(window):
            start, stop = slice_bounds(batch.num_rows, rank, world_size, shares)
            start = max(start, window.start - batch.start)
            stop = min(stop, window.stop - batch.start)
            if start < stop:
                first, last = (lane_of(row, batch.num_rows, lanes) for row in (start, stop - 1))
                # A batch shorter than the number of lanes leaves lanes empty between those that hold its rows.
                is_short = batch.num_rows < lanes
                rows = (lane_of(row, batch.num_rows, lanes) for row in range(start, stop))
                needed.update(rows if is_short else range(first, last + 1))
            if len(needed) == lanes:
                break
        return tuple(sorted(needed))

    def batches_of(self, window: Window) -> list[BatchRange]:
        """The global batches that hold a row of the window."""
        size = self.spec.batch_size
        first = window.epoch * self.batches_per_epoch
        return [self.locate(first + b) for b in range(window.start // size, (window.stop - 1) // size + 1)]

    def lane_rows(self, window: Window) -> list[np.ndarray]:
        """Per lane, its positions in the window, ascending, as int64 offsets from ``window.start``."""
        import numpy as np

        pieces: list[list[np.ndarray]] = [[] for _ in range(self.spec.num_lanes)]
        for batch in self.batches_of(window):
            for lane in range(self.spec.num_lanes):
                start = batch.start + lane * batch.num_rows // self.spec.num_lanes
                stop = batch.start + (lane + 1) * batch.num_rows // self.spec.num_lanes
                start, stop = max(start, window.start), min(stop, window.stop)
                if start < stop:
                    pieces[lane].append(np.arange(start - window.start, stop - window.start, dtype=np.int64))
        return [np.concatenate(piece) if piece else np.empty(0, np.int64) for piece in pieces]

    # -- identity ------------------------------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
        """Plain data that identifies the order (D2): its spec, and per file its name, size and rows per row group.

        The folder is left out, so a data set may move; ``digest`` covers all of it.
        """
        files = [[_file_name(file.path), file.size_bytes, list(file.row_groups)] for file in self.files]
        spec = dataclasses.asdict(self.spec)
        digest = hashlib.sha256(repr((sorted(spec.items()), files)).encode()).hexdigest()
        return {"digest": digest, "spec": spec, "files": files}

    def check_fingerprint(self, stored: Mapping[str, Any]) -> None:
        """Raise ConfigError naming the first difference from a stored fingerprint; return if there is none."""
        current = self.fingerprint()
        if current["digest"] == stored.get("digest"):
            return
        difference = _first_difference(stored, current)
        raise ConfigError(
            f"the data order differs from the one this run was started with: {difference}. "
            "Batches would repeat or skip rows; restore the data and the option, or start a new run"
        )


def lane_of(row: int, num_rows: int, num_lanes: int) -> int:
    """The lane of row ``row`` of a batch of ``num_rows``: lane j holds rows [floor(jn/L), floor((j+1)n/L))."""
    return ((row + 1) * num_lanes - 1) // num_rows


def _permutation(seed: int, purpose: int, epoch: int, window: int, size: int) -> np.ndarray:
    import numpy as np

    counter = np.array([0, 0, epoch, window], dtype=np.uint64)
    words = np.random.Philox(counter=counter, key=np.array([seed, purpose], dtype=np.uint64)).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def _file_name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def _first_difference(stored: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    for name, value in current["spec"].items():
        before = stored.get("spec", {}).get(name)
        if before != value:
            return f"data option {name} was {before}, is {value}"
    before_files, files = stored.get("files", []), current["files"]
    if len(before_files) != len(files):
        names, before_names = [f[0] for f in files], [f[0] for f in before_files]
        odd = next((n for n in [*before_names, *names] if before_names.count(n) != names.count(n)), "?")
        return f"there were {len(before_files)} files, there are {len(files)} (for example {odd})"
    for before, file in zip(before_files, files):
        if list(before) != list(file):
            what = ("name", "size in bytes", "rows per row group")
            which = next(i for i in range(3) if before[i] != file[i])
            return f"file {before[0]}: its {what[which]} was {before[which]}, is {file[which]}"
    return "its digest"
