"""Export: the tables of a checkpoint as Parquet, for people and systems that know nothing of Shoal.

One folder per table, one Parquet file per part of the checkpoint, so memory stays bounded by a part and, of an
incremental checkpoint, the ids that changed in it and in those between it and the full one. Tables that are cut into
column blocks come out whole, one file per few row blocks. Vectors are float32
whatever the row type was (fp16 and bf16 widen exactly). Only complete checkpoints can be exported (durable steps,
PROTOCOLS 0), and every part is checked against the manifest as it is read.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from shoal.actors.datafile import PlannedFile, folder_name
from shoal.actors.partfile import read_ids, read_part, take
from shoal.actors.restore import join_parts, read_checked
from shoal.kernels.column_blocks import logical_table, logical_tables
from shoal.kernels.cut import BlockRows
from shoal.kernels.errors import CheckpointError
from shoal.kernels.hashing import row_blocks
from shoal.kernels.spec import TableSpec
from shoal.platform.checkpoint import open_checkpoint
from shoal.platform.loadplan import plan_columns
from shoal.platform.manifest import CheckpointName, Manifest
from shoal.platform.storage import Storage


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportedTable:
    """One exported table: its folder below the output, and what it holds."""

    table: str
    path: str
    num_files: int
    num_rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What ``export_parquet`` wrote, and of which checkpoint."""

    name: CheckpointName
    out: str
    tables: tuple[ExportedTable, ...]


def export_parquet(
    checkpoint_uri: str, out: str, tables: Sequence[str] | None = None, *, slots: bool = False
) -> ExportReport:
    """Write ``<out>/<table>/part-00000.parquet`` ...: ``id`` uint64, ``vector`` list<float>; rows that were trained.

    Args:
        checkpoint_uri: a checkpoint's folder, or a run's (then its newest complete checkpoint).
        out: a folder or storage URI; existing files of the same names are replaced.
        tables: names; default all. A table without rows yields one file with no rows.
        slots: also ``last_step``, ``count`` and the optimizer's state, one column per slot.

    Raises CheckpointError for a damaged file (naming file and table) or an unknown table, StorageError for ``out``.
    """
    storage, manifest = open_checkpoint(checkpoint_uri)
    known = {name: logical_table(blocks[0]) for name, blocks in logical_tables(manifest.tables).items()}
    for name in tables or ():
        if name not in known:
            raise CheckpointError(f"{manifest.name} has no table {name!r}; it has {', '.join(map(repr, known))}")
    target = Storage(out)
    chosen = known.values() if tables is None else [known[name] for name in tables]
    exported = tuple(_export_table(storage, manifest, spec, target, slots) for spec in chosen)
    return ExportReport(name=manifest.name, out=target.shown_uri, tables=exported)


def _export_table(storage: Storage, manifest: Manifest, spec: TableSpec, target: Storage, slots: bool) -> ExportedTable:
    planned = plan_columns(manifest, spec, range(spec.num_blocks))
    folder = folder_name(spec.name)
    schema = _schema(spec, slots)
    num_files = num_rows = 0
    is_cut = any(entry.stored for entry in planned)
    for parts in (_joined_rows if is_cut else _final_rows)(storage, spec, planned):
        batches = [_batch(rows, spec, schema) for rows in parts]

        def produce(stream: object, batches: list[pa.RecordBatch] = batches) -> None:
            with pq.ParquetWriter(stream, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)

        target.write_object(f"{folder}/part-{num_files:05d}.parquet", produce)
        num_files += 1
        num_rows += sum(len(rows) for rows in parts)
    return ExportedTable(table=spec.name, path=folder, num_files=num_files, num_rows=num_rows)


def _final_rows(storage: Storage, spec: TableSpec, planned: Sequence[PlannedFile]) -> Iterator[list[BlockRows]]:
    """The rows of each table file that no newer checkpoint of the chain replaces or deletes, the newest first.

    At least one list, which has no rows if the table has none.
    """
    layers = [list(files) for _, files in itertools.groupby(planned, key=lambda entry: entry.folder)]
    hidden = np.empty(0, dtype=np.int64)  # ids that newer checkpoints hold or delete
    for layer in reversed(layers):
        found = [hidden]
        for entry in layer:
            data = read_checked(storage, entry.folder, entry)
            name = f"{entry.folder}/{entry.shown}"
            if entry.kind == "deleted":
                found.append(read_ids(data, name).numpy())
                continue
            batches = [_visible(rows, entry, hidden) for rows in read_part(data, spec, name)]
            if layer is not layers[0]:
                found += (rows.ids.numpy().copy() for rows in batches)
            yield batches
        hidden = np.unique(np.concatenate(found))
    if not any(entry.kind == "table" for entry in planned):
        yield []


def _joined_rows(storage: Storage, spec: TableSpec, planned: Sequence[PlannedFile]) -> Iterator[list[BlockRows]]:
    """The rows of a table that is cut into column blocks, put together, some row blocks at a time."""
    for group in join_parts(spec, range(spec.num_blocks), planned, storage):
        yield [rows for _, rows in group]


def _visible(rows: BlockRows, entry: PlannedFile, hidden: np.ndarray) -> BlockRows:
    ids = rows.ids.numpy()
    mask = np.isin(ids, hidden, invert=True)
    if len(entry.taken) < len(entry.blocks):
        mask &= np.isin(row_blocks(ids, entry.num_blocks), entry.taken)
    return rows if mask.all() else take(rows, torch.from_numpy(np.flatnonzero(mask)))


def _schema(spec: TableSpec, slots: bool) -> pa.Schema:
    fields = [pa.field("id", pa.uint64()), pa.field("vector", pa.list_(pa.float32(), spec.embedding_dim))]
    if slots:
        for name, width in spec.optimizer.slots(spec.embedding_dim):
            fields.append(pa.field(name, pa.float32() if width == 1 else pa.list_(pa.float32(), width)))
        fields += [pa.field("last_step", pa.int64()), pa.field("count", pa.int64())]
    return pa.schema(fields, metadata={"shoal.table": spec.name, "shoal.dtype": spec.data_type.value})


def _batch(rows: BlockRows, spec: TableSpec, schema: pa.Schema) -> pa.RecordBatch:
    columns = [pa.array(rows.ids.numpy().view("uint64")), _lists(rows.weights.float(), schema.field("vector").type)]
    if len(schema) > len(columns):
        start = 0
        for name, width in spec.optimizer.slots(spec.embedding_dim):
            columns.append(_lists(rows.slots[:, start : start + width], schema.field(name).type))
            start += width
        columns += [pa.array(rows.last_step.numpy()), pa.array(rows.count.numpy())]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _lists(values: torch.Tensor, type_: pa.DataType) -> pa.Array:
    flat = pa.array(values.contiguous().reshape(-1).numpy())
    return pa.FixedSizeListArray.from_arrays(flat, type=type_) if pa.types.is_fixed_size_list(type_) else flat
