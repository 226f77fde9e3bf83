"""Where a rank's batches come from: the slice of global batch s that belongs to it (PROTOCOLS D; promise 3).

``LocalFeed`` reads the files in this process; ``RayFeed`` takes blocks from the Feeder actor. Both yield the same
batches, prepared ahead by a thread. A step's batch depends on (order, step, rank, world size, shares) only, so a feed
can be moved to any step and any slice at any time.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shoal.actors.dataset import Dataset
from shoal.actors.prefetch import Prefetcher
from shoal.actors.windows import POSITION, DataOrder, WindowLike, WindowReader
from shoal.kernels.arrow import ArrowTable, BatchConverter, TablePart
from shoal.kernels.errors import ClusterError, ExchangeTimeoutError, RowError, ShoalError

if TYPE_CHECKING:
    import pyarrow as pa

    from shoal.kernels.batch import Batch
    from shoal.kernels.schema import Schema

logger = logging.getLogger(__name__)

#: Fetches arranged tables that hold the given lanes of a window and have no position in common.
FetchWindow = Callable[[WindowLike, tuple[int, ...]], "Sequence[pa.Table]"]

#: An arranged table as the slicer keeps it: int64 positions, ascending, and the columns in native hands.
_Arranged = tuple[np.ndarray, ArrowTable]


#: A window is read in the worker's own process when the feeder has not answered for this long (it answers once a second
#: that it is still at work), or its blocks have not come for this long. Seconds.
PATIENCE_S = 5.0
#: The same after a loss: Ray goes on asking a lost node for blocks until it notices. Seconds.
WARY_PATIENCE_S = 0.3
#: How long after a loss that is to be expected: Ray 2.60 takes 14 s to notice a lost node. Seconds.
WARY_S = 20.0


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Which slice of every global batch a rank takes."""

    rank: int = 0
    world_size: int = 1
    #: Relative amounts of work per rank; None: equal.
    shares: tuple[float, ...] | None = None


class BatchSource(Protocol):
    """A rank's batches by step. ``next_batch`` of consecutive steps is fast; any other step is a seek."""

    def is_ready(self, step: int, timeout_s: float) -> bool:
        """Whether ``next_batch(step)`` returns, or raises, at once; waits for that at most ``timeout_s``."""
        ...

    def next_batch(self, step: int) -> Batch: ...

    def reassign(self, assignment: Assignment, step: int) -> None:
        """Take another slice of every batch from ``step`` on, or the same one again: a view change, a rewind."""
        ...

    def keep_from(self, step: int) -> None:
        """What is needed to go back to ``step`` is to be kept at hand, nothing older."""
        ...

    def close(self) -> None: ...


class Slicer:
    """Makes the batch of a step from windows fetched ahead. ``load`` runs in one thread; ``assign`` may in any."""

    def __init__(
        self,
        order: DataOrder,
        schema: Schema,
        arrow_schema: pa.Schema,
        fetch: FetchWindow,
        *,
        by_lane: bool,
        assignment: Assignment,
        stop_step: int | None,
    ) -> None:
        self._order = order
        self._converter = BatchConverter(schema)
        self._columns = arrow_schema.names
        self._empty = [TablePart(ArrowTable(arrow_schema.empty_table()), 0, 0)]
        self._fetch = fetch
        self._by_lane = by_lane
        self._stop_step = stop_step
        # Two fetches at a time, and two that wait for what nobody wants any more after a rewind.
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="shoal-window")
        self._windows: dict[tuple[Any, ...], Future[list[_Arranged]]] = {}
        self.assignment = assignment
        self.waiting_for = "nothing yet"

    def load(self, step: int) -> Batch:
        """The batch of a step. Raises DataError naming file, row group and row of a value that is not allowed."""
        mine = self.assignment
        whole = self._order.locate(step)
        start, stop = self._order.rank_range(step, mine.rank, mine.world_size, mine.shares)
        fetched = self._fetch_ahead(mine, self._order.windows_of(whole.epoch, whole.start, whole.stop))
        pieces: list[tuple[np.ndarray, TablePart]] = []
        for window, arranged in fetched:
            self.waiting_for = f"waiting for window {window.index} of epoch {window.epoch}"
            for positions, table in self._result(arranged, mine):
                first, last = np.searchsorted(positions, [start, stop]).tolist()
                if first < last:
                    pieces.append((positions[first:last], TablePart(table, first, last)))
        self.waiting_for = f"converting the batch of step {step}"
        pieces.sort(key=lambda piece: piece[0][0])
        try:
            batch = self._converter.convert([part for _, part in pieces] or self._empty, position=start)
            if len(batch) < stop - start:
                batch.counters["rows lost with unreadable files"] = stop - start - len(batch)
            return batch
        except RowError as error:
            position = int(np.concatenate([positions for positions, _ in pieces])[error.row])
            raise error.located(*self._order.origin(whole.epoch, position)) from None

    def _result(self, arranged: Future[list[_Arranged]], mine: Assignment) -> list[_Arranged]:
        """A fetched window. Given up once the slice is another, or the same anew: nobody wants this batch then."""
        while not wait([arranged], timeout=0.05).done:
            if self.assignment is not mine:  # the prefetcher has moved on, or does so next: it drops this
                raise ClusterError("the feed was moved while it waited")
        return arranged.result()

    def close(self) -> None:
        """Drop the windows and stop fetching."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._windows = {}

    def _fetch_ahead(
        self, mine: Assignment, windows: Sequence[WindowLike]
    ) -> list[tuple[WindowLike, Future[list[_Arranged]]]]:
        """The step's windows, being fetched, and in the background the one after them; others are forgotten.

        Raises at once what a fetch raised, also where the window is not needed yet (D4).
        """
        wanted = [*windows]
        follower = self._order.next_window(wanted[-1])
        if self._is_needed(follower):
            wanted.append(follower)
        kept = {}
        for window in wanted:
            lanes = self._lanes(window, mine)
            key = (window.epoch, window.index, lanes)
            future = self._windows.pop(key, None)
            if future is not None and future.done() and future.exception() is not None:
                future.result()
            kept[key] = future or self._pool.submit(self._fetch_window, window, lanes)
        for future in self._windows.values():
            future.cancel()
        self._windows = kept
        return list(zip(windows, kept.values()))

    def _lanes(self, window: WindowLike, mine: Assignment) -> tuple[int, ...]:
        if not self._by_lane:
            return ()
        return self._order.lanes_of(window, mine.rank, mine.world_size, mine.shares)

    def _is_needed(self, window: WindowLike) -> bool:
        if self._stop_step is None:
            return True
        last = self._order.locate(max(self._stop_step - 1, 0))
        return (window.epoch, window.start) < (last.epoch, last.stop)

    def _fetch_window(self, window: WindowLike, lanes: tuple[int, ...]) -> list[_Arranged]:
        return [
            (table.column(POSITION).to_numpy(), ArrowTable(table.select(self._columns)))
            for table in self._fetch(window, lanes)
            if table.num_rows > 0
        ]


class _PrefetchingFeed:
    """What both feeds share: a slicer behind a prefetcher."""

    def __init__(
        self,
        slicer: Slicer,
        *,
        start_step: int,
        stop_step: int | None,
        prefetch_batches: int,
        timeout_s: float,
        source: str,
    ) -> None:
        # The prefetcher's thread uses the rest from its first moment on.
        self._slicer = slicer
        self._next_step = start_step
        self._prefetcher = Prefetcher(
            slicer.load,
            start_step=start_step,
            stop_step=stop_step,
            depth=prefetch_batches,
            timeout_s=timeout_s,
            describe=lambda: f"{slicer.waiting_for} ({source})",
        )

    def next_batch(self, step: int) -> Batch:
        """This rank's slice of global batch ``step``, with 0 rows where the batch is shorter than the world.

        Raises DataError or SchemaError for bad data and what a reader raised, at the latest one step after it happened;
        ExchangeTimeoutError naming what is missing when the deadline passes.
        """
        batch = self._prefetcher.get(step)
        self._next_step = step + 1
        return batch

    def is_ready(self, step: int, timeout_s: float) -> bool:
        """Whether ``next_batch(step)`` returns, or raises, at once; waits for that at most ``timeout_s``."""
        return self._prefetcher.is_ready(step, timeout_s)

    def reassign(self, assignment: Assignment, step: int) -> None:
        """Take another slice from ``step`` on (a view change), or go back to it (a recovery)."""
        self._slicer.assignment = assignment
        self._next_step = step
        self._prefetcher.restart(step)

    def keep_from(self, step: int) -> None:
        """Nothing is kept: a rewind reads the files again."""

    def close(self) -> None:
        """Stop the threads. Not reusable afterwards."""
        self._prefetcher.close()
        self._slicer.close()


class LocalFeed(_PrefetchingFeed):
    """Batches read from the files in this process: for ``num_workers=0``, evaluation and tests."""

    def __init__(
        self,
        dataset: Dataset,
        order: DataOrder,
        schema: Schema,
        *,
        assignment: Assignment | None = None,
        start_step: int = 0,
        stop_step: int | None = None,
        prefetch_batches: int = 4,
        timeout_s: float = 120.0,
    ) -> None:
        """``stop_step``: the first step that is not wanted, nothing beyond it is read; None: epochs without end."""
        reader = WindowReader(dataset, order)
        slicer = Slicer(
            order,
            schema,
            dataset.arrow_schema,
            lambda window, lanes: [reader.read(window)],
            by_lane=False,
            assignment=assignment or Assignment(),
            stop_step=stop_step,
        )
        super().__init__(
            slicer,
            start_step=start_step,
            stop_step=stop_step,
            prefetch_batches=prefetch_batches,
            timeout_s=timeout_s,
            source=f"reading {len(order.files)} files in this process",
        )


class RayFeed(_PrefetchingFeed):
    """Batches from the blocks of the Feeder actor: one call a window, none a step.

    A window is a pure function of its number, so where the feeder or a block is out of reach it is read here: with a
    node, Ray loses blocks, and the way to others, for as long as it takes to notice (measured: 7-14 s a window).
    """

    def __init__(
        self,
        feeder: Any,
        dataset: Dataset,
        order: DataOrder,
        schema: Schema,
        *,
        assignment: Assignment | None = None,
        start_step: int = 0,
        stop_step: int | None = None,
        prefetch_batches: int = 4,
        timeout_s: float = 120.0,
    ) -> None:
        """``feeder``: the actor handle of a ``shoal.platform.feeder.Feeder`` of the same data set and order."""
        self._feeder = feeder
        self._timeout_s = timeout_s
        self._reader = WindowReader(dataset, order)
        self._reader_lock = threading.Lock()
        #: Monotonic time until which blocks may be out of reach. A joiner may replace a lost worker.
        self._wary_until = time.monotonic() + WARY_S if start_step > 0 else float("-inf")
        #: Windows read in this process.
        self.num_read_here = 0
        #: The oldest step this rank may have to go back to; None: the one it takes next. Blocks before it are freed.
        self._keep_from_step: int | None = None
        slicer = Slicer(
            order,
            schema,
            dataset.arrow_schema,
            self._fetch,
            by_lane=True,
            assignment=assignment or Assignment(),
            stop_step=stop_step,
        )
        super().__init__(
            slicer,
            start_step=start_step,
            stop_step=stop_step,
            prefetch_batches=prefetch_batches,
            timeout_s=timeout_s,
            source="blocks from the feeder actor",
        )

    def reassign(self, assignment: Assignment, step: int) -> None:
        """As ``_PrefetchingFeed.reassign``; a rewind is the sign of a loss, after which little is waited for."""
        if step < self._next_step:
            self._wary_until = time.monotonic() + WARY_S
        super().reassign(assignment, step)

    def keep_from(self, step: int) -> None:
        """Tells the feeder, with the next request, which windows a recovery may need again (D3)."""
        self._keep_from_step = step

    def _fetch(self, window: WindowLike, lanes: tuple[int, ...]) -> Sequence[pa.Table]:
        """The blocks of a window, asked for as long as the feeder is at work on them, or else the whole window."""
        import ray
        from ray.exceptions import ActorUnavailableError, GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

        deadline = time.monotonic() + self._timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            is_wary = time.monotonic() < self._wary_until
            try:
                patience_s = WARY_PATIENCE_S if is_wary else PATIENCE_S
                blocks = ray.get(self._ask(window, lanes, is_wary), timeout=min(patience_s, left_s))
                if blocks is not None:
                    return ray.get(blocks, timeout=patience_s)
                if not is_wary:
                    continue
            except (ObjectLostError, GetTimeoutError, ActorUnavailableError) as error:
                if not is_wary:  # else a slow network would have it last for ever
                    self._wary_until = time.monotonic() + WARY_S
                logger.info("epoch=%d window=%d read=here cause=%s", window.epoch, window.index, type(error).__name__)
            except RayActorError as error:
                raise ClusterError(f"the feeder actor died: {' '.join(str(error).split())[:300]}") from error
            except RayTaskError as error:
                # Ray's text has the feeder's whole traceback in front of the file and row that our own error names.
                if isinstance(error.cause, ShoalError):
                    raise error.cause from error
                raise
            return self._read_here(window)
        raise ExchangeTimeoutError(
            f"the feeder did not deliver lanes {list(lanes)} of window {window.index}, epoch {window.epoch}, within "
            f"{self._timeout_s:g} s"
        )

    def _read_here(self, window: WindowLike) -> list[pa.Table]:
        with self._reader_lock:
            self.num_read_here += 1
            return [self._reader.read(window)]

    def _ask(self, window: WindowLike, lanes: tuple[int, ...], is_wary: bool) -> Any:
        mine = self._slicer.assignment
        return self._feeder.get_blocks.remote(
            window.epoch,
            window.index,
            lanes,
            rank=mine.rank,
            world_size=mine.world_size,
            keep_from_step=self._next_step if self._keep_from_step is None else self._keep_from_step,
            wait_s=WARY_PATIENCE_S / 2 if is_wary else 1.0,
        )
