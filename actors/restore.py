"""Restore: a worker reads the rows of its row blocks from the part files of a checkpoint into its row store.

Any world size and any placement: a part file names the row blocks it holds, the worker is given the parts that overlap
its own blocks, and every row goes to the block its id hashes to. A file is read once, whole, checked against the
manifest's size and checksum, and only then imported. Loading replaces what the owned blocks held, so a load that failed
half way may simply be repeated, also from another checkpoint.

Of an incremental checkpoint the files of its parents come first: a later file's rows replace those of the same id, and
ids it says are deleted are (K3). In the end every block must have as many rows as the newest of its files says.

Any cut into column blocks: what a table needs of a wider stored one is cut out as it is read, and what lies in several
is put together first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from shoal.actors.datafile import Checksum, FileEntry, PlannedFile, stored_blocks
from shoal.actors.partfile import narrow, read_ids, read_part, take
from shoal.kernels.column_blocks import covers
from shoal.kernels.cut import BlockRows
from shoal.kernels.errors import CheckpointError, StorageMissingError
from shoal.kernels.hashing import row_blocks
from shoal.kernels.row_columns import join_columns, move_columns, slice_columns
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import TableSpec

T = TypeVar("T")

#: Files of column blocks that are put together are taken so many bytes at a time.
JOIN_BYTES = 256 * 2**20
_READ_BYTES = 2**20
_NUM_READERS = 2


class ObjectReader(Protocol):
    """The part of ``shoal.platform.storage.Storage`` that a restore needs."""

    def open_input(self, path: str) -> contextlib.AbstractContextManager[Any]: ...

    def retrying(self, operation: str, path: str, attempt: Callable[[], T]) -> T: ...


class BlockSink(Protocol):
    """A row store."""

    def import_block(self, table: int, block: int, rows: BlockRows, *, replace: bool = True) -> None: ...

    def delete(self, table: int, ids: Tensor) -> int: ...

    def num_rows(self, table: int, block: int) -> int: ...


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What a load brought in: rows and bytes of files read, over all tables of this worker."""

    num_rows: int
    read_bytes: int


def load_rows(
    store: BlockSink,
    tables: Sequence[TableSpec],
    owned: Mapping[str, Sequence[int]],
    parts: Sequence[PlannedFile],
    storage: ObjectReader,
) -> LoadReport:
    """Replace the rows of the ``owned`` blocks (table name -> blocks) in ``store`` by those in ``parts``.

    Args:
        tables: in the store's order. A table without parts ends up empty: its rows start from their initial values.
        parts: files as ``shoal.platform.loadplan.plan_load`` chose and ordered them; others' rows in them are skipped.
        storage: the run's.

    Raises CheckpointError, in one line that names file and table, if a file is missing, short, damaged, or does not
    have the table's columns, or if a block ends up with another number of rows than it had when it was written. The
    store's owned blocks are then partly filled: load again or drop the store.
    """
    numbers = {spec.name: index for index, spec in enumerate(tables)}
    importer = _Importer(store, tables, owned)
    num_rows = read_bytes = 0
    plain, apart = _part_by_cut(parts, {spec.name: spec for spec in tables})
    for entry, data in _read_ahead(plain, storage):
        number = numbers[entry.loaded_into]
        name = f"{entry.folder}/{entry.shown}"
        found = 0
        if entry.kind == "deleted":
            ids = read_ids(data, name)
            importer.delete(number, ids, entry)
            found = ids.numel()
        else:
            for rows in read_part(data, entry.stored or tables[number], name):
                found += len(rows)
                if entry.stored is not None:
                    rows = move_columns(rows, entry.stored, tables[number])
                num_rows += importer.add(number, rows, entry)
        if found != entry.num_rows:
            raise CheckpointError(f"{name}: holds {found} rows, the manifest says {entry.num_rows}")
        read_bytes += entry.size_bytes
    for target, entries in apart.items():
        number = numbers[target]
        for group in join_parts(tables[number], owned.get(target, ()), entries, storage):
            num_rows += sum(importer.put(number, block, rows) for block, rows in group)
        read_bytes += sum(entry.size_bytes for entry in entries)
    importer.clear_untouched()
    _check_counts(store, tables, owned, plain)
    return LoadReport(num_rows, read_bytes)


def _part_by_cut(
    parts: Sequence[PlannedFile], tables: Mapping[str, TableSpec]
) -> tuple[list[PlannedFile], dict[str, list[PlannedFile]]]:
    """(files that have all columns of their target, target -> files of it that have some of them)."""
    plain: list[PlannedFile] = []
    apart: dict[str, list[PlannedFile]] = {}
    for entry in parts:
        if entry.stored is None or covers(entry.stored, tables[entry.loaded_into]):
            plain.append(entry)
        else:
            apart.setdefault(entry.loaded_into, []).append(entry)
    return plain, apart


def join_parts(
    spec: TableSpec, blocks: Sequence[int], parts: Sequence[PlannedFile], storage: ObjectReader
) -> Iterator[list[tuple[int, BlockRows]]]:
    """The rows of some row blocks of ``spec``, whose columns lie in files of several stored column blocks.

    Yields (row block, rows sorted by id) of all ``blocks``, a few at a time: the stored column blocks are loaded into
    stores of their own, chains of incremental checkpoints included, and put together row by row. In memory are
    about JOIN_BYTES of them at a time, or one row block. Raises as ``load_rows``, and CheckpointError naming the table
    where the stored column blocks do not have the same rows.
    """
    sources = sorted({entry.stored for entry in parts if entry.stored}, key=lambda source: source.first_column)
    local = [dataclasses.replace(source, num_blocks=spec.num_blocks) for source in sources]
    ordered = sorted(blocks)
    num_groups = max(1, sum(entry.size_bytes for entry in parts) // JOIN_BYTES)
    size = max(1, -(-len(ordered) // num_groups))
    start = spec.first_column - sources[0].first_column
    for first in range(0, len(ordered), size):
        group = ordered[first : first + size]
        staging = RowStore(local, undo_steps=0)
        for number, block in itertools.product(range(len(local)), group):
            staging.add_block(number, block)
        chosen = [
            dataclasses.replace(entry, target=None, stored=None)
            for entry in parts
            if not stored_blocks(group, spec.num_blocks, entry.num_blocks).isdisjoint(entry.blocks)
        ]
        load_rows(staging, local, {source.name: group for source in local}, chosen, storage)
        joined = []
        for block in group:
            pieces = [staging.export_block(number, block) for number in range(len(local))]
            try:
                rows = join_columns(pieces, spec.optimizer)
            except ValueError as error:
                names = ", ".join(source.name for source in sources)
                raise CheckpointError(
                    f"{parts[0].folder} (table {spec.logical_name!r}): row block {block} of {names}: {error}"
                ) from None
            joined.append((block, slice_columns(rows, spec.optimizer, start, start + spec.embedding_dim)))
        yield joined


def _check_counts(
    store: BlockSink, tables: Sequence[TableSpec], owned: Mapping[str, Sequence[int]], parts: Sequence[PlannedFile]
) -> None:
    """Compare the rows of each loaded block with what the newest file that says it says (a chain must add up)."""
    expected: dict[tuple[str, int], tuple[int, PlannedFile]] = {}
    for entry in parts:
        for block, num_rows in zip(entry.blocks, entry.block_rows):
            if block in entry.taken:
                expected[entry.loaded_into, block] = (num_rows, entry)
    for number, spec in enumerate(tables):
        for block in owned.get(spec.name, ()):
            # With fewer blocks than when it was written several counts would have to be summed, with more, split.
            if (spec.name, block) not in expected:
                continue
            num_rows, entry = expected[spec.name, block]
            if entry.num_blocks == spec.num_blocks and (found := store.num_rows(number, block)) != num_rows:
                raise CheckpointError(
                    f"{entry.folder} (table {spec.name!r}): row block {block} has {found} rows after loading, its "
                    f"manifest says {num_rows}"
                )


def read_checked(storage: ObjectReader, directory: str, entry: FileEntry, buffer: Tensor | None = None) -> Tensor:
    """The whole file as uint8 [size], in ``buffer`` (uint8, at least that long) if one is given.

    Raises CheckpointError if it is missing, of another size or fails its checksum.
    """
    path = f"{directory}/{entry.path}"

    def attempt() -> tuple[Tensor, int, str]:
        with storage.open_input(path) as stream:
            size = stream.size()
            if size != entry.size_bytes:
                return torch.empty(0, dtype=torch.uint8), size, ""
            data = torch.empty(size, dtype=torch.uint8) if buffer is None else buffer[:size]
            view = memoryview(data.numpy())  # type: ignore[arg-type]
            checksum = Checksum()
            start = 0
            while start < size:
                count = stream.readinto(view[start : start + _READ_BYTES])
                if not count:
                    break
                checksum.update(view[start : start + count])
                start += count
            return data, start, str(checksum)

    try:
        data, size, checksum = storage.retrying("read", path, attempt)
    except StorageMissingError as error:
        raise CheckpointError(f"{directory}/{entry.shown}: the file is missing") from error
    if size != entry.size_bytes:
        sizes = f"{size} bytes, the manifest says {entry.size_bytes}"
        raise CheckpointError(f"{directory}/{entry.shown}: truncated: {sizes}")
    if checksum != entry.checksum:
        raise CheckpointError(
            f"{directory}/{entry.shown}: damaged: checksum {checksum}, the manifest says {entry.checksum}"
        )
    return data


def read_dense(storage: ObjectReader, directory: str, entry: FileEntry) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata as ``snapshot.write_dense`` was given them. safetensors only: no pickle is ever loaded."""
    data = read_checked(storage, directory, entry).numpy().tobytes()
    try:
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = json.loads(header.get("__metadata__", {}).get("shoal.metadata", "{}"))
    except (safetensors.SafetensorError, ValueError) as error:
        raise CheckpointError(f"{directory}/{entry.path}: not a readable safetensors file: {error}") from error
    return tensors, metadata


class _Importer:
    """Sorts rows into the owned blocks: the first rows of a block replace what it held, later ones are added."""

    def __init__(self, store: BlockSink, tables: Sequence[TableSpec], owned: Mapping[str, Sequence[int]]) -> None:
        self._store = store
        self._tables = tables
        self._owned = [frozenset(owned.get(spec.name, ())) for spec in tables]
        self._seen: set[tuple[int, int]] = set()

    def add(self, number: int, rows: BlockRows, entry: PlannedFile) -> int:
        """Import the rows of ``entry`` that are to be taken and belong to owned blocks; returns how many those were."""
        rows = _taken(rows, entry)
        if len(rows) == 0:
            return 0
        blocks = row_blocks(rows.ids.numpy(), self._tables[number].num_blocks)
        if np.any(blocks[1:] < blocks[:-1]):  # written with another number of blocks
            order = np.lexsort((rows.ids.numpy().view(np.uint64), blocks))
            rows, blocks = take(rows, torch.from_numpy(order)), blocks[order]
        edges = np.flatnonzero(np.diff(blocks)) + 1
        imported = 0
        for start, end in zip([0, *edges.tolist()], [*edges.tolist(), blocks.size]):
            block = int(blocks[start])
            if block in self._owned[number]:
                self._import(number, block, narrow(rows, start, end))
                imported += end - start
        return imported

    def put(self, number: int, block: int, rows: BlockRows) -> int:
        """Make ``rows`` all rows of an owned block; returns how many they are."""
        self._import(number, block, rows)
        return len(rows)

    def delete(self, number: int, ids: Tensor, entry: PlannedFile) -> None:
        """Delete the rows of owned blocks that ``entry`` names; blocks that nothing was imported into have none."""
        blocks = row_blocks(ids.numpy(), self._tables[number].num_blocks)
        touched = [b for b in self._owned[number] if (number, b) in self._seen]
        mask = np.isin(blocks, touched) & _is_taken(ids, entry)
        if mask.any():
            self._store.delete(number, ids[torch.from_numpy(mask)])

    def clear_untouched(self) -> None:
        """Empty the owned blocks no part had rows for."""
        for number, (spec, owned) in enumerate(zip(self._tables, self._owned)):
            empty = BlockRows.empty(spec)
            for block in owned:
                if (number, block) not in self._seen:
                    self._import(number, block, empty)

    def _import(self, number: int, block: int, rows: BlockRows) -> None:
        is_first = (number, block) not in self._seen
        self._seen.add((number, block))
        self._store.import_block(number, block, rows, replace=is_first)


def _taken(rows: BlockRows, entry: PlannedFile) -> BlockRows:
    """The rows of the blocks that the plan takes from this file."""
    if len(entry.taken) == len(entry.blocks) or len(rows) == 0:
        return rows
    return take(rows, torch.from_numpy(np.flatnonzero(_is_taken(rows.ids, entry))))


def _is_taken(ids: Tensor, entry: PlannedFile) -> np.ndarray:
    return np.isin(row_blocks(ids.numpy(), entry.num_blocks), entry.taken)


def _read_ahead(parts: Sequence[PlannedFile], storage: ObjectReader) -> Iterator[tuple[PlannedFile, Tensor]]:
    """Checked parts in order; the next two are being read while the caller uses this one.

    The buffers are used again (fresh memory costs more than the copy into it), so what is yielded is valid until the
    next one is asked for.
    """
    upcoming = iter(parts)
    longest = max((entry.size_bytes for entry in parts), default=0)
    pending: deque[tuple[PlannedFile, Tensor, Future[Tensor]]] = deque()
    with ThreadPoolExecutor(max_workers=_NUM_READERS, thread_name_prefix="shoal-restore") as pool:

        def submit(buffer: Tensor) -> None:
            entry = next(upcoming, None)
            if entry is not None:
                pending.append((entry, buffer, pool.submit(read_checked, storage, entry.folder, entry, buffer)))

        for _ in range(min(_NUM_READERS + 1, len(parts))):
            submit(torch.empty(longest, dtype=torch.uint8))
        while pending:
            entry, buffer, future = pending.popleft()
            yield entry, future.result()
            submit(buffer)
