"""Export: the tables of a checkpoint as Parquet, for people and systems that know nothing of Shoal.

One folder per table, one Parquet file per part of the checkpoint, so memory stays bounded by a part. Vectors are
float32 whatever the row type was (fp16 and bf16 widen exactly). Only complete checkpoints can be exported (durable
steps, PROTOCOLS 0), and every part is checked against the manifest as it is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from shoal.actors.datafile import FileEntry, folder_name
from shoal.actors.partfile import read_part
from shoal.actors.restore import read_checked
from shoal.kernels.cut import BlockRows
from shoal.kernels.errors import CheckpointError
from shoal.kernels.spec import TableSpec
from shoal.platform.checkpoint import open_checkpoint
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
    storage, directory, manifest = open_checkpoint(checkpoint_uri)
    known = {spec.name: spec for spec in manifest.tables}
    for name in tables or ():
        if name not in known:
            raise CheckpointError(f"{manifest.name} has no table {name!r}; it has {', '.join(map(repr, known))}")
    target = Storage(out)
    chosen = known.values() if tables is None else [known[name] for name in tables]
    exported = tuple(_export_table(storage, directory, manifest, spec, target, slots) for spec in chosen)
    return ExportReport(name=manifest.name, out=target.shown_uri, tables=exported)


def _export_table(
    storage: Storage, directory: str, manifest: Manifest, spec: TableSpec, target: Storage, slots: bool
) -> ExportedTable:
    entries = [entry for entry in manifest.files if entry.kind == "table" and entry.table == spec.name]
    folder = folder_name(spec.name)
    schema = _schema(spec, slots)
    for number, entry in enumerate(entries or [None]):
        batches = _batches(storage, directory, entry, spec, schema) if entry else []

        def produce(stream: object, batches: list[pa.RecordBatch] = batches) -> None:
            with pq.ParquetWriter(stream, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)

        target.write_object(f"{folder}/part-{number:05d}.parquet", produce)
    return ExportedTable(
        table=spec.name,
        path=folder,
        num_files=max(1, len(entries)),
        num_rows=sum(entry.num_rows for entry in entries),
    )


def _schema(spec: TableSpec, slots: bool) -> pa.Schema:
    fields = [pa.field("id", pa.uint64()), pa.field("vector", pa.list_(pa.float32(), spec.embedding_dim))]
    if slots:
        for name, width in spec.optimizer.slots(spec.embedding_dim):
            fields.append(pa.field(name, pa.float32() if width == 1 else pa.list_(pa.float32(), width)))
        fields += [pa.field("last_step", pa.int64()), pa.field("count", pa.int64())]
    return pa.schema(fields, metadata={"shoal.table": spec.name, "shoal.dtype": spec.data_type.value})


def _batches(
    storage: Storage, directory: str, entry: FileEntry, spec: TableSpec, schema: pa.Schema
) -> list[pa.RecordBatch]:
    data = read_checked(storage, directory, entry)
    return [_batch(rows, spec, schema) for rows in read_part(data, spec, f"{directory}/{entry.shown}")]


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
