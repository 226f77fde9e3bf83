"""Row groups read by Ray Data, in whatever order and pieces they arrive (PROTOCOLS D3).

An execution is one Ray Data pipeline over a bounded number of read tasks; its reads ask for no CPUs by default, because
a run's actors may hold all of them and Ray Data does not know. Rows carry their task, row group and row, so nothing
depends on the order or size of what Ray Data returns.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from shoal.actors.dataset import Dataset
from shoal.kernels.errors import DataError
from shoal.platform.order import RowGroup, VirtualOrder, Window

# Columns that say where a row belongs, beside the data's own.
_TASK, _GROUP, _ROW, _ERROR = "__shoal_task", "__shoal_group", "__shoal_row", "__shoal_error"
_KEYS = pa.schema([(_TASK, pa.int32()), (_GROUP, pa.int32()), (_ROW, pa.int32()), (_ERROR, pa.string())])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How Ray Data reads."""

    #: Read tasks at a time, >= 1.
    concurrency: int = 4
    #: CPUs a read task asks Ray for, >= 0; 0 starts even where actors hold every CPU.
    cpus_per_read: float = 0.0
    #: A read task takes row groups of one window up to about this many rows, >= 1.
    rows_per_read: int = 65_536
    #: Object store memory that one execution may use, bytes.
    execution_bytes_max: int = 512 * 2**20
    #: Read tasks of one execution, >= 1. The next one starts when half of them are done.
    tasks_per_execution: int = 256


@dataclasses.dataclass(frozen=True)
class ReadTask:
    """Consecutive row groups of a window, numbered as in ``window.row_groups`` from ``first_group``."""

    window: Window
    first_group: int
    row_groups: tuple[RowGroup, ...]


@dataclasses.dataclass(frozen=True)
class ReadResult:
    """A row group of a window, complete and in row order, or why it is lost."""

    window: Window
    group: int
    table: pa.Table | None
    error: str | None = None


def plan_reads(order: VirtualOrder, first: Window, stop: Window | None, options: ReadOptions) -> list[ReadTask]:
    """The read tasks of one execution: whole windows from ``first``, before ``stop`` (None: without end)."""
    tasks: list[ReadTask] = []
    window = first
    while len(tasks) < options.tasks_per_execution and (stop is None or _key(window) < _key(stop)):
        begin, rows = 0, 0
        for number, group in enumerate(window.row_groups):
            rows += group.num_rows
            if rows >= options.rows_per_read or number + 1 == len(window.row_groups):
                tasks.append(ReadTask(window, begin, window.row_groups[begin : number + 1]))
                begin, rows = number + 1, 0
        window = order.next_window(window)
    return tasks


class Execution:
    """One Ray Data pipeline, running in a thread of its own from construction; iterate it for its row groups."""

    def __init__(self, dataset: Dataset, order: VirtualOrder, tasks: Sequence[ReadTask], options: ReadOptions) -> None:
        self.tasks = tasks
        self._dataset = dataset
        self._order = order
        self._options = options
        self._blocks: queue.Queue[pa.Table | BaseException | None] = queue.Queue(maxsize=4)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-ray-data", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[ReadResult]:
        """Row groups as they become complete. Raises what Ray Data raised."""
        pieces = _Pieces(self.tasks, self._dataset.arrow_schema)
        while True:
            try:
                block = self._blocks.get(timeout=1.0)
            except queue.Empty:
                if self._is_closed.is_set():
                    return
                continue
            if block is None:
                pieces.check_complete()
                return
            if isinstance(block, BaseException):
                raise block
            yield from pieces.add(block)

    def close(self) -> None:
        """Stop the pipeline at its next block."""
        self._is_closed.set()

    def _run(self) -> None:
        try:
            for block in self._iterate():
                if not self._put(block):
                    return
            self._put(None)
        except BaseException as error:  # Raised where the execution is iterated.
            self._put(error)

    def _put(self, item: pa.Table | BaseException | None) -> bool:
        while not self._is_closed.is_set():
            try:
                self._blocks.put(item, timeout=0.5)
                return True
            except queue.Full:
                continue
        return False

    def _iterate(self) -> Iterator[pa.Table]:
        import ray.data

        numbers = list(range(len(self.tasks)))
        reads = ray.data.from_items(numbers, override_num_blocks=len(numbers)).map_batches(
            _reader(self._dataset, self._order, self.tasks),
            batch_size=None,
            batch_format="pyarrow",
            zero_copy_batch=True,
            num_cpus=self._options.cpus_per_read,
            compute=ray.data.TaskPoolStrategy(size=self._options.concurrency),
        )
        context = reads.context
        # A long pause of the trainers is no reason to fail; our own waits have deadlines.
        context.execution_no_progress_timeout_s = -1
        context.print_on_execution_start = False
        context.execution_options.resource_limits = ray.data.ExecutionResources(
            object_store_memory=self._options.execution_bytes_max
        )
        return iter(reads.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1))


class _Pieces:
    """Collects blocks until a row group is complete."""

    def __init__(self, tasks: Sequence[ReadTask], arrow_schema: pa.Schema) -> None:
        self._tasks = tasks
        self._schema = arrow_schema
        self._missing = {
            (number, task.first_group + i): group.num_rows
            for number, task in enumerate(tasks)
            for i, group in enumerate(task.row_groups)
        }
        self._parts: dict[tuple[int, int], list[pa.Table]] = {}

    def add(self, block: pa.Table) -> Iterator[ReadResult]:
        keys = np.stack([block.column(name).to_numpy() for name in (_TASK, _GROUP)])
        cuts = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1
        for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), block.num_rows]):
            if start == stop:
                continue
            key = (int(keys[0, start]), int(keys[1, start]))
            window = self._tasks[key[0]].window
            part = block.slice(start, stop - start)
            error = part.column(_ERROR)[0].as_py()
            if error is not None:
                del self._missing[key]
                yield ReadResult(window, key[1], None, error)
                continue
            self._parts.setdefault(key, []).append(part)
            self._missing[key] -= part.num_rows
            if self._missing[key] == 0:
                del self._missing[key]
                yield ReadResult(window, key[1], self._join(self._parts.pop(key)))

    def check_complete(self) -> None:
        """Raise DataError if the pipeline ended before every row group was complete."""
        if self._missing:
            (number, group), rows = next(iter(self._missing.items()))
            window = self._tasks[number].window
            raise DataError(
                f"Ray Data ended with {len(self._missing)} row groups incomplete: for example {rows} rows of row group "
                f"{group} of window {window.index}, epoch {window.epoch}"
            )

    def _join(self, parts: list[pa.Table]) -> pa.Table:
        parts.sort(key=lambda part: part.column(_ROW)[0].as_py())
        whole = pa.concat_tables(parts)
        rows = whole.column(_ROW).to_numpy()
        if (rows[1:] < rows[:-1]).any():
            whole = whole.take(pa.array(np.argsort(rows, kind="stable")))
        return pa.table([whole.column(name) for name in self._schema.names], schema=self._schema)


def _reader(dataset: Dataset, order: VirtualOrder, tasks: Sequence[ReadTask]):  # type: ignore[no-untyped-def]
    """The function Ray Data maps over task numbers; a bad row group becomes one row that carries the error."""
    paths = [file.path for file in order.files]
    reads = [
        [(paths[g.file], g.index, g.num_rows, t.first_group + i) for i, g in enumerate(t.row_groups)] for t in tasks
    ]

    def read(numbers: pa.Table) -> Iterator[pa.Table]:
        for number in numbers.column("item").to_pylist():
            for path, index, num_rows, group in reads[number]:
                try:
                    table = dataset.read_row_group(path, index, num_rows=num_rows)
                    error = None
                except DataError as caught:
                    nulls = [pa.nulls(1, field.type) for field in dataset.arrow_schema]
                    table = pa.table(nulls, schema=dataset.arrow_schema)
                    error = str(caught)
                yield _with_keys(table, number, group, error)

    return read


def _with_keys(table: pa.Table, task: int, group: int, error: str | None) -> pa.Table:
    n = table.num_rows
    keys = [
        pa.array(np.full(n, task, np.int32)),
        pa.array(np.full(n, group, np.int32)),
        pa.array(np.arange(n, dtype=np.int32)),
        pa.nulls(n, pa.string()) if error is None else pa.array([error] * n, pa.string()),
    ]
    for field, column in zip(_KEYS, keys):
        table = table.append_column(field, column)
    return table


def _key(window: Window) -> tuple[int, int]:
    return window.epoch, window.index
