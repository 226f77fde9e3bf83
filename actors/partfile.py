"""The part file: rows of one table as an Arrow IPC file that DuckDB, Polars, pandas and pyarrow open as it is.

Columns: ``id`` uint64, ``weight`` fixed_size_list<float | halffloat | uint16>[D], one column per optimizer slot (float,
or fixed_size_list<float>[w] when it is wider than one), ``last_step`` int64, ``count`` int64. bfloat16 has no Arrow
type: its bits are stored as uint16 and the field's metadata says so. The schema's metadata names the table, the row
dtype, the optimizer, the format version and the row blocks of the file; of a column block also the logical table, its
width, and which of its columns [first, end) the file's are. Rows are in block order, then by id as uint64.

Reading copies nothing: the columns are views of the buffer the file was read into.

Legend: N rows, D embedding_dim, S float32 values of optimizer state per row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from shoal.actors.datafile import FORMAT_VERSION, UNCUT_FORMAT_VERSION
from shoal.kernels.cut import TORCH_DTYPES, BlockRows
from shoal.kernels.errors import CheckpointError
from shoal.kernels.spec import DataType, TableSpec

_WEIGHT_TYPES = {DataType.FP32: pa.float32(), DataType.FP16: pa.float16(), DataType.BF16: pa.uint16()}


def narrow(rows: BlockRows, start: int, end: int) -> BlockRows:
    """Rows [start, end), as views."""
    return BlockRows(*(column[start:end] for column in _columns(rows)))


def take(rows: BlockRows, order: Tensor) -> BlockRows:
    """Rows ``order`` (int64 [M]), copied."""
    return BlockRows(*(column[order] for column in _columns(rows)))


def concatenate(pieces: Sequence[BlockRows]) -> BlockRows:
    """All rows of ``pieces`` in order; not copied if there is only one."""
    return pieces[0] if len(pieces) == 1 else BlockRows(*map(torch.cat, zip(*map(_columns, pieces))))


def _columns(rows: BlockRows) -> tuple[Tensor, ...]:
    return rows.ids, rows.weights, rows.slots, rows.last_step, rows.count


def part_schema(spec: TableSpec, blocks: Sequence[int] = ()) -> pa.Schema:
    """The schema of a part file of ``spec`` that holds the row blocks ``blocks``."""
    weight_type = pa.list_(_WEIGHT_TYPES[spec.data_type], spec.embedding_dim)
    stored = {"shoal.dtype": "bfloat16", "shoal.stored_as": "uint16"} if spec.data_type is DataType.BF16 else None
    fields = [_column("id", pa.uint64()), _column("weight", weight_type, stored)]
    for name, width in spec.optimizer.slots(spec.embedding_dim):
        fields.append(_column(name, pa.float32() if width == 1 else pa.list_(pa.float32(), width)))
    fields += [_column("last_step", pa.int64()), _column("count", pa.int64())]
    metadata = {
        "shoal.format_version": str(UNCUT_FORMAT_VERSION if spec.columns is None else FORMAT_VERSION),
        "shoal.table": spec.name,
        "shoal.dtype": spec.data_type.value,
        "shoal.optimizer": spec.optimizer.kind.name.lower(),
        "shoal.embedding_dim": str(spec.embedding_dim),
        "shoal.num_blocks": str(spec.num_blocks),
        "shoal.blocks": json.dumps(list(blocks)),
    }
    if spec.columns is not None:
        metadata |= {
            "shoal.logical_table": spec.logical_name,
            "shoal.logical_dim": str(spec.logical_dim),
            "shoal.columns": json.dumps([spec.first_column, spec.first_column + spec.embedding_dim]),
        }
    return pa.schema(fields, metadata=metadata)


def write_part(sink: Any, spec: TableSpec, blocks: Sequence[int], batches: Sequence[BlockRows]) -> None:
    """Write one part file to ``sink`` (an object with ``write(buffer)``): each of ``batches`` is one record batch.

    Nothing is copied, except optimizer state of more than one column (Adam), column by column.
    """
    schema = part_schema(spec, blocks)
    with pa.PythonFile(sink, mode="w") as stream, pa.ipc.new_file(stream, schema) as writer:
        for rows in batches:
            writer.write_batch(_record_batch(schema, spec, rows))


def read_part(data: Tensor, spec: TableSpec, name: str) -> Iterator[BlockRows]:
    """The record batches of the part file in ``data`` (uint8 [bytes], 8-byte aligned), as views of it.

    Raises CheckpointError naming ``name`` if it is not an Arrow file or its columns are not those of ``spec``.
    """
    try:
        reader = pa.ipc.open_file(pa.py_buffer(data.numpy()))
        found = reader.schema
        if not found.equals(part_schema(spec)):
            raise CheckpointError(f"{name}: expected columns {_shown(part_schema(spec))}; found {_shown(found)}")
        for index in range(reader.num_record_batches):
            yield _row_slice(data, spec, reader.get_batch(index))
    except pa.ArrowException as error:
        raise CheckpointError(f"{name}: not a readable Arrow file: {error}") from error


def write_ids(sink: Any, table: str, ids: Tensor) -> None:
    """Write a file of deleted ids (int64 [N], any bits): one column, ``id`` uint64."""
    metadata = {"shoal.format_version": str(UNCUT_FORMAT_VERSION), "shoal.table": table}
    schema = pa.schema([_column("id", pa.uint64())], metadata=metadata)
    with pa.PythonFile(sink, mode="w") as stream, pa.ipc.new_file(stream, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([_array(pa.uint64(), ids)], schema=schema))


def read_ids(data: Tensor, name: str) -> Tensor:
    """The ids (int64 [N]) of a file of deleted ids, copied. Raises CheckpointError naming ``name``."""
    try:
        column = pa.ipc.open_file(pa.py_buffer(data.numpy())).read_all().column("id")
        return torch.from_numpy(column.to_numpy().view("int64").copy())
    except (pa.ArrowException, KeyError) as error:
        raise CheckpointError(f"{name}: not a readable file of ids: {error}") from error


def _column(name: str, type_: pa.DataType, metadata: dict[str, str] | None = None) -> pa.Field:
    return pa.field(name, type_, nullable=False, metadata=metadata)


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def _record_batch(schema: pa.Schema, spec: TableSpec, rows: BlockRows) -> pa.RecordBatch:
    columns = [_array(schema.field("id").type, rows.ids), _array(schema.field("weight").type, rows.weights)]
    start = 0
    for name, width in spec.optimizer.slots(spec.embedding_dim):
        columns.append(_array(schema.field(name).type, rows.slots[:, start : start + width]))
        start += width
    columns += [_array(pa.int64(), rows.last_step), _array(pa.int64(), rows.count)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _array(type_: pa.DataType, values: Tensor) -> pa.Array:
    """``values`` [N] or [N, width] as an Arrow array over the same memory."""
    flat = values.detach().contiguous().reshape(-1)
    # torch and Arrow share no 16-bit float type through numpy but share the bits.
    bits = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
    buffer = pa.py_buffer(bits.numpy())
    if not pa.types.is_fixed_size_list(type_):
        return pa.Array.from_buffers(type_, flat.numel(), [None, buffer])
    child = pa.Array.from_buffers(type_.value_type, flat.numel(), [None, buffer])
    return pa.FixedSizeListArray.from_arrays(child, type=type_)


def _row_slice(data: Tensor, spec: TableSpec, batch: pa.RecordBatch) -> BlockRows:
    num_rows = batch.num_rows

    def column(name: str, dtype: torch.dtype, width: int) -> Tensor:
        buffer = batch.column(name).buffers()[-1]
        start = buffer.address - data.data_ptr() if num_rows else 0
        stop = start + num_rows * width * dtype.itemsize
        assert 0 <= start <= stop <= data.numel(), (name, start, stop)
        return data[start:stop].view(dtype).view(num_rows, width)

    slots = [column(name, torch.float32, width) for name, width in spec.optimizer.slots(spec.embedding_dim)]
    return BlockRows(
        ids=column("id", torch.int64, 1).view(-1),
        weights=column("weight", TORCH_DTYPES[spec.data_type], spec.embedding_dim),
        slots=slots[0] if len(slots) == 1 else torch.cat(slots, dim=1) if slots else torch.empty(num_rows, 0),
        last_step=column("last_step", torch.int64, 1).view(-1),
        count=column("count", torch.int64, 1).view(-1),
    )
