"""Snapshot: one worker's part of a checkpoint, written from a cut while training goes on (PROTOCOLS K1, C1).

Data files only: their entries go to the controller, which alone writes the manifest. Memory is bounded by WRITERS
parts and one row block, whatever the size of the tables: parts are written by as many threads, so that export, checksum
and copy of some overlap with the disk's work on others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, Protocol, TypeVar

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from shoal.actors.datafile import UNCUT_FORMAT_VERSION, Checksum, FileEntry, checksum_of, deleted_path, part_path
from shoal.actors.partfile import concatenate, narrow, take, write_ids, write_part
from shoal.kernels import faults
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
            faults.reach("checkpoint.part")
        self.size_bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is held back here."""

    def close(self) -> None:
        self.closed = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """What an incremental snapshot may leave out (K3): rows that its parent holds already."""

    #: Steps applied in the parent: rows updated later are written.
    since: int
    #: (table, block) -> ids (int64) of all rows deleted there since, and perhaps more: those that exist are left out.
    #: A block that is not named is written whole.
    deleted: Mapping[tuple[int, int], Tensor]


def write_snapshot(
    source: BlockSource,
    owned: Mapping[str, Sequence[int]],
    tables: Sequence[TableSpec],
    storage: ObjectWriter,
    directory: str,
    rank: int,
    *,
    delta: Delta | None = None,
    limiter: RateLimiter | None = None,
    part_bytes: int = PART_BYTES,
) -> list[FileEntry]:
    """Write the rows of the row blocks in ``owned`` (table name -> blocks) below ``directory``; blocks until done.

    Args:
        source: the cut; ``tables`` in its order (a table's number is its place in ``tables``).
        storage: where; ``directory`` is the checkpoint's folder, as ``shoal.platform.checkpoint`` names it.
        rank: of the writer; part of the file names, so no two workers write one file.
        delta: what may be left out; None: nothing.

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
                for file in _files(source, owned, tables, rank, delta, part_bytes):
                    paths.append(file.path)
                    pending.append(pool.submit(_write_file, storage, directory, file, limiter))
                    del file
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
    text = {"shoal.format_version": str(UNCUT_FORMAT_VERSION), "shoal.metadata": json.dumps(dict(metadata or {}))}
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


@dataclasses.dataclass
class _File:
    """One file to be written: rows of row blocks, in block order, or ids of deleted rows."""

    path: str
    spec: TableSpec
    since: int | None = None
    rows: list[BlockRows] = dataclasses.field(default_factory=list)
    ids: list[Tensor] = dataclasses.field(default_factory=list)
    #: Row block -> how many rows it has in the cut.
    blocks: dict[int, int] = dataclasses.field(default_factory=dict)


#: A row block, its rows to be written, and how many it has in the cut.
_BlockPiece = tuple[int, BlockRows, int]


def _files(
    source: BlockSource,
    owned: Mapping[str, Sequence[int]],
    tables: Sequence[TableSpec],
    rank: int,
    delta: Delta | None,
    part_bytes: int,
) -> Iterator[_File]:
    """The files of a snapshot in table order, each of at most ``part_bytes``; one row block in memory at a time."""
    known = delta.deleted if delta is not None else {}
    for table, spec in enumerate(tables):
        blocks = sorted(owned.get(spec.name, ()))
        part_rows = max(1, part_bytes // _row_bytes(spec))
        paths = _part_paths(spec.name, rank)
        whole = _whole_blocks(source, table, [block for block in blocks if (table, block) not in known])
        yield from _row_files(spec, paths, whole, None, part_rows)
        if delta is None:
            continue
        gone: list[tuple[int, Tensor, int]] = []
        changed = _changed_blocks(source, table, [block for block in blocks if (table, block) in known], delta, gone)
        yield from _row_files(spec, paths, changed, delta.since, part_rows)
        if gone:
            left = {block: num_rows for block, _, num_rows in gone}
            yield _File(deleted_path(spec.name, rank), spec, ids=[ids for _, ids, _ in gone], blocks=left)


def _part_paths(table: str, rank: int) -> Iterator[str]:
    return (part_path(table, rank, number) for number in itertools.count())


def _whole_blocks(source: BlockSource, table: int, blocks: Sequence[int]) -> Iterator[_BlockPiece]:
    for block in blocks:
        rows = source.export_block(table, block)
        yield block, rows, len(rows)


def _changed_blocks(
    source: BlockSource, table: int, blocks: Sequence[int], delta: Delta, gone: list[tuple[int, Tensor, int]]
) -> Iterator[_BlockPiece]:
    """The rows updated since the parent; ``gone`` receives (block, deleted ids, rows left) where there are any."""
    for block in blocks:
        rows = source.export_block(table, block)
        ids = _absent(delta.deleted[table, block], rows.ids)
        if ids.numel():
            gone.append((block, ids, len(rows)))
        yield block, take(rows, torch.nonzero(rows.last_step > delta.since).view(-1)), len(rows)


def _row_files(
    spec: TableSpec, paths: Iterator[str], pieces: Iterator[_BlockPiece], since: int | None, part_rows: int
) -> Iterator[_File]:
    """Pieces put together into files of ``part_rows``. Written whole, also a block without rows is named (K3)."""
    file: _File | None = None
    num_rows = 0
    for block, rows, total in pieces:
        start, is_named = 0, since is None
        while is_named or start < len(rows):
            is_named = False
            file = file or _File(next(paths), spec, since)
            end = min(len(rows), start + part_rows - num_rows)
            file.rows.append(narrow(rows, start, end))
            file.blocks[block] = total
            num_rows += end - start
            if num_rows == part_rows:
                yield file
                file, num_rows = None, 0
            start = end
    if file is not None:
        yield file


def _absent(ids: Tensor, present: Tensor) -> Tensor:
    """Those of ``ids`` that are not among ``present``, each once: a deletion that was undone is none."""
    return torch.from_numpy(np.setdiff1d(ids.numpy(), present.numpy())) if ids.numel() else ids


def _row_bytes(spec: TableSpec) -> int:
    """Bytes of a row in a part file: with its id, step and count."""
    return spec.row_bytes + 24


def _write_file(storage: ObjectWriter, directory: str, file: _File, limiter: RateLimiter) -> FileEntry:
    blocks = tuple(file.blocks)
    batches = _batches(file.rows, max(1, BATCH_BYTES // _row_bytes(file.spec)))
    ids = torch.cat(file.ids) if file.ids else None

    def produce(stream: IO[bytes]) -> ChecksumSink:
        sink = ChecksumSink(stream, limiter)
        if ids is not None:
            write_ids(sink, file.spec.name, ids)
        else:
            write_part(sink, file.spec, blocks, batches)
        return sink

    sink = storage.write_object(f"{directory}/{file.path}", produce)
    return FileEntry(
        path=file.path,
        kind="table" if ids is None else "deleted",
        size_bytes=sink.size_bytes,
        checksum=sink.checksum,
        table=file.spec.name,
        num_rows=sum(len(rows) for rows in batches) if ids is None else ids.numel(),
        blocks=blocks,
        since=file.since,
        block_rows=tuple(file.blocks.values()),
    )


def _batches(pieces: Sequence[BlockRows], batch_rows: int) -> list[BlockRows]:
    """Neighbouring small pieces joined until a batch has ``batch_rows``; large ones stay as they are."""
    batches: list[BlockRows] = []
    group: list[BlockRows] = []
    for rows in pieces:
        group.append(rows)
        if sum(len(r) for r in group) >= batch_rows:
            batches.append(concatenate(group))
            group = []
    if group:
        batches.append(concatenate(group))
    return batches
