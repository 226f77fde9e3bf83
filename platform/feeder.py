"""The Feeder: one per run, it turns the data set into blocks (window, lane) in Ray's object store (PROTOCOLS D3, D4).

A plain class that the launcher makes an actor; its methods may be called from several threads (the actor needs
``max_concurrency`` of a few more than 1). One producer thread drives Ray Data and places blocks; a rank asks for its
lanes of a window, once a window and never a step. Nothing here is state that cannot be rebuilt: a window that was
freed, lost with a node, or never made by this incarnation is read again from (seed, epoch, window).
"""

from __future__ import annotations

import dataclasses
import threading
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from shoal.actors.dataset import BadFile, Dataset
from shoal.actors.windows import WindowReader, arrange_window, cut_lanes
from shoal.kernels import faults
from shoal.kernels.errors import DataError, ShoalError
from shoal.platform.order import VirtualOrder, Window
from shoal.platform.row_group_stream import Execution, ReadOptions, ReadResult, plan_reads

if TYPE_CHECKING:
    import ray

#: (epoch, index) of a window: ordered as windows are.
Key = tuple[int, int]

#: Between two executions begun anew because the ranks are far ahead: Ray Data takes seconds to the first block of each.
RESTART_PAUSE_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeederOptions:
    """Bounds of the feeder."""

    read: ReadOptions = dataclasses.field(default_factory=ReadOptions)
    #: Windows made ahead of the newest one that was asked for, >= 1.
    prefetch_windows: int = 2
    #: Blocks kept in the object store, bytes; a window somebody waits for is made all the same.
    bytes_max: int = 2 * 2**30
    #: Until Ray Data delivers its first window, read the windows that are asked for in the feeder's own process; and
    #: again once somebody has waited ``overdue_s`` for one, until it delivers the next.
    read_here_when_cold: bool = True
    #: Less than what one call of ``get_blocks`` waits. Seconds.
    overdue_s: float = 0.5


@dataclasses.dataclass
class _Blocks:
    """The blocks of a window, by lane."""

    refs: list[ray.ObjectRef]
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class _Report:
    """What a rank last said about itself."""

    world_size: int
    keep_from: Key
    asked: Key


class Feeder:
    """Makes, keeps and hands out blocks. ``stop_step``: the first step that is not wanted; None: epochs without end."""

    def __init__(
        self,
        dataset: Dataset,
        order: VirtualOrder,
        options: FeederOptions | None = None,
        *,
        start_step: int = 0,
        stop_step: int | None = None,
    ) -> None:
        self._dataset = dataset
        self._order = order
        self._options = options or FeederOptions()
        self._stop = None if stop_step is None else self._window_after(stop_step)
        self._changed = threading.Condition()
        self._blocks: dict[Key, _Blocks] = {}
        self._reports: dict[int, _Report] = {}
        self._bad_files: dict[str, BadFile] = {file.path: file for file in dataset.bad_files}
        self._error: BaseException | None = None
        self._is_closed = False
        self._generation = 0
        self._num_made = 0
        self._num_read_here = 0
        self._is_warm = False
        self._rebuilding: set[Key] = set()
        # The first window not made yet, and those made beyond it: read tasks may finish in any order.
        self._cursor = self._window_of(start_step)
        self._made: set[Key] = set()
        # The newest window that was asked for.
        self._newest: Key = _key(self._cursor)
        self._start_producer()

    # -- called by ranks -----------------------------------------------------------------------------------------

    def get_blocks(
        self,
        epoch: int,
        window: int,
        lanes: Sequence[int],
        *,
        rank: int,
        world_size: int,
        keep_from_step: int,
        wait_s: float = 1.0,
    ) -> list[ray.ObjectRef] | None:
        """One block per lane, or None if the window is not ready within ``wait_s``: ask again.

        ``keep_from_step``: the oldest step this rank may still go back to. Raises what the producer raised.
        """
        key = (epoch, window)
        began_s = time.monotonic()
        may_read_here = self._options.read_here_when_cold
        with self._changed:
            self._report(rank, world_size, keep_from_step, key)
            faults.reach("feeder.window")
            if not lanes:
                return []
            is_past = key < _key(self._cursor)
            if key not in self._blocks and self._error is None:
                # A feeder that Ray has restarted begins at the run's first step, its ranks are far beyond it.
                is_far = not is_past and self._distance(key) > self._options.prefetch_windows + 4
                if is_far and began_s - self._started_s >= (RESTART_PAUSE_S if may_read_here else 0.0):
                    self._restart(self._order.windows(epoch)[window])
                if is_past:
                    return self._read_here(key, lanes)
            while key not in self._blocks:
                self._raise_error()
                waited_s = time.monotonic() - began_s
                # Ray Data takes seconds to its first block (measured: 2.4-3.7 s warm), and stands still until Ray knows
                # that a node with its tasks is lost (a run stood still for 31 s): meanwhile read here.
                if may_read_here and (not self._is_warm or waited_s >= self._options.overdue_s):
                    self._is_warm = False
                    return self._read_here(key, lanes)
                if waited_s >= wait_s:
                    return None
                self._changed.wait(min(wait_s, self._options.overdue_s if may_read_here else wait_s) - waited_s)
            return self._hand_out(key, lanes)

    # -- called by the controller --------------------------------------------------------------------------------

    def restart(self, step: int) -> None:
        """Clear an error and produce from the window of ``step`` on; blocks already made are kept."""
        with self._changed:
            self._restart(self._window_of(step))

    def forget_ranks(self) -> None:
        """The ranks known so far are of a view that is over: what they no longer need, others may (V1)."""
        with self._changed:
            self._reports.clear()

    def status(self) -> dict[str, Any]:
        """Windows and bytes held, where the producer stands, files left out, and the error if it stopped."""
        with self._changed:
            return {
                "windows": sorted(self._blocks),
                "bytes": sum(blocks.num_bytes for blocks in self._blocks.values()),
                "cursor": _key(self._cursor),
                "made": self._num_made,
                "read_here": self._num_read_here,
                "bad_files": sorted(self._bad_files),
                "error": None if self._error is None else repr(self._error),
            }

    def close(self) -> None:
        """Stop producing and drop all blocks."""
        with self._changed:
            self._is_closed = True
            self._generation += 1
            self._blocks.clear()
            self._changed.notify_all()
        self._thread.join(10.0)

    # -- with the lock held --------------------------------------------------------------------------------------

    def _report(self, rank: int, world_size: int, keep_from_step: int, asked: Key) -> None:
        if any(report.world_size != world_size for report in self._reports.values()):
            self._reports.clear()
        keep_from = _key(self._window_of(keep_from_step))
        self._reports[rank] = _Report(world_size, min(keep_from, asked), asked)
        if asked > self._newest:
            self._newest = asked
        for key in [key for key in self._blocks if self._is_done_with(key)]:
            del self._blocks[key]
        self._changed.notify_all()

    def _is_done_with(self, key: Key) -> bool:
        """Whether every rank of the view has said that it never goes back to this window."""
        world_size = next((report.world_size for report in self._reports.values()), -1)
        return len(self._reports) == world_size and key < min(r.keep_from for r in self._reports.values())

    def _evict(self) -> None:
        """Over the byte bound, drop what is only kept for a rewind, the oldest first; it can be rebuilt."""
        in_use = min((report.asked for report in self._reports.values()), default=self._newest)
        for key in sorted(self._blocks):
            if self._bytes() <= self._options.bytes_max or key >= in_use:
                return
            del self._blocks[key]

    def _bytes(self) -> int:
        return sum(blocks.num_bytes for blocks in self._blocks.values())

    def _hand_out(self, key: Key, lanes: Sequence[int]) -> list[ray.ObjectRef]:
        return [self._blocks[key].refs[lane] for lane in lanes]

    def _raise_error(self) -> None:
        if self._error is None:
            return
        if isinstance(self._error, ShoalError):
            raise self._error
        text = "".join(traceback.format_exception(self._error))
        raise DataError(f"the feeder failed: {self._error}\n{text}") from self._error

    def _restart(self, window: Window) -> None:
        self._generation += 1
        self._error = None
        self._cursor = window
        self._made.clear()
        self._newest = _key(window)
        self._is_warm = False
        for execution in self._executions:  # their producer may be waiting for blocks that never come
            execution.close()
        self._changed.notify_all()
        self._start_producer()

    def _start_producer(self) -> None:
        self._started_s = time.monotonic()
        self._executions: list[Execution] = []
        self._thread = threading.Thread(
            target=self._produce, args=(self._generation, self._executions), name="shoal-feeder", daemon=True
        )
        self._thread.start()

    def _distance(self, key: Key) -> int:
        """How many windows ``key`` lies beyond the producer's; counted no further than it matters."""
        window, count = self._cursor, 0
        while _key(window) < key and count <= self._options.prefetch_windows + 4:
            window, count = self._order.next_window(window), count + 1
        return count

    def _may_produce(self, window: Window) -> bool:
        """Whether the producer may work on a window: it is wanted, or within the horizon and the byte bound."""
        if _key(window) <= self._newest:
            return True
        ahead = sum(1 for key in self._blocks if key > self._newest)
        return ahead < self._options.prefetch_windows and self._bytes() < self._options.bytes_max

    # -- without the lock ----------------------------------------------------------------------------------------

    def _read_here(self, key: Key, lanes: Sequence[int]) -> list[ray.ObjectRef] | None:
        """Read a window in this process. Entered with the lock, which is released meanwhile; once for all who ask."""
        if key in self._rebuilding:
            self._changed.wait(0.5)
            return self._hand_out(key, lanes) if key in self._blocks else None
        self._rebuilding.add(key)
        self._changed.release()
        try:
            window = self._order.windows(key[0])[key[1]]
            reader = WindowReader(self._dataset, self._order)
            reader.bad_files = self._bad_files
            blocks = self._put(window, reader.read(window))
        finally:
            self._changed.acquire()
            self._rebuilding.discard(key)
        self._num_read_here += 1
        self._blocks[key] = blocks
        self._changed.notify_all()
        return self._hand_out(key, lanes)

    def _produce(self, generation: int, executions: list[Execution]) -> None:
        """The producer thread: executions one after the other, the next started when one is half done."""
        try:
            window = self._cursor
            current = self._execute(window, executions)
            while current is not None:
                after = self._order.next_window(current.tasks[-1].window)
                following: Execution | None = None
                waiting: dict[Key, dict[int, pa.Table | None]] = {}
                remaining = sum(len(task.row_groups) for task in current.tasks)
                half = remaining // 2
                for result in current:
                    remaining -= 1
                    if following is None and remaining <= half:
                        following = self._execute(after, executions)
                    if not self._collect(result, waiting, generation):
                        return
                current = following
        except BaseException as error:  # The ranks raise it.
            with self._changed:
                if generation == self._generation:
                    self._error = error
                    self._changed.notify_all()
        finally:
            for execution in executions:
                execution.close()

    def _execute(self, first: Window, executions: list[Execution]) -> Execution | None:
        tasks = plan_reads(self._order, first, self._stop, self._options.read)
        if not tasks:
            return None
        executions.append(Execution(self._dataset, self._order, tasks, self._options.read))
        return executions[-1]

    def _collect(self, result: ReadResult, waiting: dict[Key, dict[int, pa.Table | None]], generation: int) -> bool:
        """Take a row group in; publish its window if that is complete; wait for the horizon. False: stop."""
        key = _key(result.window)
        if result.error is not None:
            path = self._order.files[result.window.row_groups[result.group].file].path
            self._bad_files.setdefault(path, BadFile(path, result.error))
            if len(self._bad_files) > self._dataset.max_bad_files:
                raise DataError(result.error)
        tables = waiting.setdefault(key, {})
        tables[result.group] = result.table
        if len(tables) == len(result.window.row_groups):
            del waiting[key]
            with self._changed:
                is_unwanted = key in self._blocks or self._is_done_with(key)
            blocks = None
            if not is_unwanted:
                arranged = arrange_window(self._order, result.window, tables, self._dataset.arrow_schema)
                blocks = self._put(result.window, arranged)
            with self._changed:
                if generation != self._generation:
                    return False
                self._is_warm = True
                if blocks is not None:
                    self._num_made += 1
                    self._blocks.setdefault(key, blocks)
                self._made.add(key)
                while _key(self._cursor) in self._made:
                    self._made.discard(_key(self._cursor))
                    self._cursor = self._order.next_window(self._cursor)
                self._evict()
                self._changed.notify_all()
        with self._changed:
            while generation == self._generation and not self._may_produce(self._cursor):
                self._changed.wait(1.0)
            return generation == self._generation

    def _put(self, window: Window, arranged: pa.Table) -> _Blocks:
        import ray

        lanes = cut_lanes(self._order, window, arranged)
        return _Blocks([ray.put(lane) for lane in lanes], sum(lane.nbytes for lane in lanes))

    def _window_of(self, step: int) -> Window:
        batch = self._order.locate(step)
        return self._order.windows_of(batch.epoch, batch.start, batch.stop)[0]

    def _window_after(self, stop_step: int) -> Window:
        """The first window that no step before ``stop_step`` needs."""
        batch = self._order.locate(max(stop_step - 1, 0))
        return self._order.next_window(self._order.windows_of(batch.epoch, batch.start, batch.stop)[-1])


def _key(window: Window) -> Key:
    return window.epoch, window.index
