"""Snapshot: one worker's part of a checkpoint, written from a cut while training goes on (PROTOCOLS K1, C1).

Data files only: their entries go to the controller, which alone writes the manifest. Memory is bounded by WRITERS
parts and one row block, whatever the size of the tables: parts are written by as many threads, so that export, checksum
and copy of some overlap with the disk's work on others.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, Protocol, TypeVar

import safetensors.torch
from torch import Tensor

from shoal.actors.datafile import FORMAT_VERSION, Checksum, FileEntry, checksum_of, part_path
from shoal.actors.partfile import concatenate, narrow, write_part
from shoal.kernels.cut import BlockRows
from shoal.kernels.errors import ShoalError
from shoal.kernels.spec import TableSpec

T = TypeVar("T")

DENSE_PATH = "dense.safetensors"
#: A part file is closed when it holds this many bytes of rows. It is the unit of reading and of checking.
PART_BYTES = 32 * 2**20
#: Parts that are written at once. A thread spends most of its time in the sync, with the disk.
WRITERS = 4
#: Small row blocks are put together, which copies them, into record batches of at least this many bytes.
BATCH_BYTES = 2**20
# The limiter sleeps between writes of this size, so that a slow limit is smooth.
_WRITE_BYTES = 2**20


class ObjectWriter(Protocol):
    """The part of ``shoal.platform.storage.Storage`` that a snapshot needs."""

    def write_object(self, path: str, produce: Callable[[IO[bytes]], T]) -> T: ...

    def delete_file(self, path: str) -> None: ...


class BlockSource(Protocol):
    """A cut, or a store that nobody is writing to."""

    def export_block(self, table: int, block: int) -> BlockRows: ...


class SnapshotCancelledError(ShoalError, RuntimeError):
    """The snapshot was asked to stop; its files are leftovers and no entry of them was returned."""

    code = "SHOAL-305"


class RateLimiter:
    """Holds the mean rate of a writer, shared by its threads, at or below ``bytes_per_s`` (0: unlimited)."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._free_at_s = 0.0

    def cancel(self) -> None:
        """Make every present and later ``acquire`` raise SnapshotCancelledError."""
        self._cancelled.set()

    def acquire(self, num_bytes: int) -> None:
        """Wait until ``num_bytes`` more may be written."""
        wait_s = 0.0
        if self.bytes_per_s > 0:
            with self._lock:
                now_s = time.monotonic()
                start_s = max(now_s, self._free_at_s)
                self._free_at_s = start_s + num_bytes / self.bytes_per_s
                wait_s = start_s - now_s
        if self._cancelled.wait(wait_s) if wait_s > 0 else self._cancelled.is_set():
            raise SnapshotCancelledError("the snapshot was cancelled")


class ChecksumSink:
    """A write-only file that counts, checksums and rate-limits what passes to ``stream``."""

    def __init__(self, stream: IO[bytes], limiter: RateLimiter) -> None:
        self._stream = stream
        self._limiter = limiter
        self._checksum = Checksum()
        self.size_bytes = 0
        self.closed = False

    @property
    def checksum(self) -> str:
        return str(self._checksum)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _WRITE_BYTES):
            piece = view[start : start + _WRITE_BYTES]
            self._limiter.acquire(len(piece))
            self._checksum.update(piece)
            self._stream.write(piece)  # type: ignore[arg-type]
        self.size_bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is held back here."""

    def close(self) -> None:
        self.closed = True


def write_snapshot(
    source: BlockSource,
    owned: Mapping[str, Sequence[int]],
    tables: Sequence[TableSpec],
    storage: ObjectWriter,
    directory: str,
    rank: int,
    *,
    limiter: RateLimiter | None = None,
    part_bytes: int = PART_BYTES,
) -> list[FileEntry]:
    """Write all rows of the row blocks in ``owned`` (table name -> blocks) below ``directory``; blocks until done.

    Args:
        source: the cut; ``tables`` in its order (a table's number is its place in ``tables``).
        storage: where; ``directory`` is the checkpoint's folder, as ``shoal.platform.checkpoint`` names it.
        rank: of the writer; part of the file names, so no two workers write one file.

    Returns the entries of the files, in table order. Raises StorageError or SnapshotCancelledError, after removing what
    it wrote as far as the storage still answers; what remains is a leftover without a manifest.
    """
    limiter = limiter or RateLimiter()
    paths: list[str] = []
    pending: deque[Future[FileEntry]] = deque()
    entries: list[FileEntry] = []
    try:
        with ThreadPoolExecutor(max_workers=WRITERS, thread_name_prefix="shoal-snapshot") as pool:
            try:
                for spec, part, pieces in _parts(source, owned, tables, part_bytes):
                    paths.append(part_path(spec.name, rank, part))
                    pending.append(pool.submit(_write_part, storage, directory, paths[-1], spec, pieces, limiter))
                    del pieces
                    if len(pending) == WRITERS:
                        entries.append(pending.popleft().result())
                entries.extend(future.result() for future in pending)
            except BaseException:
                limiter.cancel()
                raise
    except BaseException:
        # A full disk must not stay full of what can never become a checkpoint.
        with contextlib.suppress(OSError):
            for path in paths:
                storage.delete_file(f"{directory}/{path}")
        raise
    return entries


def write_dense(
    storage: ObjectWriter, directory: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None
) -> FileEntry:
    """Write flat name -> tensor and JSON-able ``metadata`` (non-tensor optimizer state) as ``dense.safetensors``.

    The caller hands over copies: a tensor must not change until this returns.
    """
    text = {"shoal.format_version": str(FORMAT_VERSION), "shoal.metadata": json.dumps(dict(metadata or {}))}
    data = safetensors.torch.save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, text)
    return write_blob(storage, directory, DENSE_PATH, data, kind="dense")


def write_blob(storage: ObjectWriter, directory: str, name: str, data: bytes, *, kind: str = "blob") -> FileEntry:
    """Write a small file of any content (metric bins, dense state) into the checkpoint's folder."""
    storage.write_object(f"{directory}/{name}", lambda stream: stream.write(data))
    return FileEntry(path=name, kind=kind, size_bytes=len(data), checksum=checksum_of(data))


class PendingSnapshot(Future[T]):
    """A snapshot being written by a background thread: a Future of what its function returns, plus ``cancel_write``."""

    def __init__(self, limiter: RateLimiter) -> None:
        super().__init__()
        self._limiter = limiter

    def cancel_write(self) -> None:
        """Ask the writer to stop at its next megabyte; the future then holds SnapshotCancelledError."""
        self._limiter.cancel()


def write_in_background(write: Callable[[RateLimiter], T], bytes_per_s: float = 0.0) -> PendingSnapshot[T]:
    """Run ``write(limiter)`` in a thread of its own. Its exception, of any kind, is the future's."""
    limiter = RateLimiter(bytes_per_s)
    pending: PendingSnapshot[T] = PendingSnapshot(limiter)

    def run() -> None:
        try:
            pending.set_result(write(limiter))
        except BaseException as error:
            pending.set_exception(error)

    threading.Thread(target=run, name="shoal-snapshot", daemon=True).start()
    return pending


Pieces = list[tuple[int, BlockRows]]


def _parts(
    source: BlockSource, owned: Mapping[str, Sequence[int]], tables: Sequence[TableSpec], part_bytes: int
) -> Iterator[tuple[TableSpec, int, Pieces]]:
    """(table, number of the part, its rows), each part of at most ``part_bytes``; a large block spans several."""
    for table, spec in enumerate(tables):
        part_rows = max(1, part_bytes // _row_bytes(spec))
        number = num_rows = 0
        pieces: Pieces = []
        for block in sorted(owned.get(spec.name, ())):
            rows = source.export_block(table, block)
            start = 0
            while start < len(rows):
                end = min(len(rows), start + part_rows - num_rows)
                pieces.append((block, narrow(rows, start, end)))
                num_rows += end - start
                start = end
                if num_rows == part_rows:
                    yield spec, number, pieces
                    pieces, num_rows, number = [], 0, number + 1
        if pieces:
            yield spec, number, pieces


def _row_bytes(spec: TableSpec) -> int:
    """Bytes of a row in a part file: with its id, step and count."""
    return spec.row_bytes + 24


def _write_part(
    storage: ObjectWriter, directory: str, path: str, spec: TableSpec, pieces: Pieces, limiter: RateLimiter
) -> FileEntry:
    blocks = tuple(dict.fromkeys(block for block, _ in pieces))
    batches = _batches(pieces, max(1, BATCH_BYTES // _row_bytes(spec)))

    def produce(stream: IO[bytes]) -> ChecksumSink:
        sink = ChecksumSink(stream, limiter)
        write_part(sink, spec, blocks, batches)
        return sink

    sink = storage.write_object(f"{directory}/{path}", produce)
    return FileEntry(
        path=path,
        kind="table",
        size_bytes=sink.size_bytes,
        checksum=sink.checksum,
        table=spec.name,
        num_rows=sum(len(rows) for rows in batches),
        blocks=blocks,
    )


def _batches(pieces: Pieces, batch_rows: int) -> list[BlockRows]:
    """Neighbouring small pieces joined until a batch has ``batch_rows``; large ones stay as they are."""
    batches: list[BlockRows] = []
    group: list[BlockRows] = []
    for _, rows in pieces:
        group.append(rows)
        if sum(len(r) for r in group) >= batch_rows:
            batches.append(concatenate(group))
            group = []
    if group:
        batches.append(concatenate(group))
    return batches
