"""Arrow tables to training batches: every column of the schema in one native call over the Arrow C data interface.

What holds for any chunking, slice offset and null bitmap of the input (data faults 36, 37, 39, 45, 51):

* each value is copied once, from the Arrow buffer to the batch; integers of every width become int64, and uint64 keeps
  its bit pattern; strings and binaries become XXH64(bytes, seed 0) as a signed 64-bit pattern, the same whatever the
  string type, dictionary or language;
* nulls follow the column's policy and are counted; a null list is an empty bag unless the policy says otherwise;
* labels, weights and dense values are checked, and the first offence raises ``RowError`` naming column, row and value.

Cost: about 2 ns an id and 0.5 us a column, of which most is Arrow's export.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from shoal.kernels import _arrow
from shoal.kernels.batch import Batch
from shoal.kernels.columns import NativeColumns
from shoal.kernels.errors import RowError, SchemaError
from shoal.kernels.jagged import KeyedJaggedTensor
from shoal.kernels.schema import Schema

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa


class Violation(NamedTuple):
    """A value that the schema does not allow: the column, the row of the batch, and why."""

    column: str
    row: int
    reason: str
    kind: str


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A batch and what was found in it.

    ``counts`` is int64 [declared columns in the order of ``names``, 2 + violation kinds]: nulls, ids cut off by
    ``max_length``, then how often each of ``VIOLATION_KINDS`` occurred. ``violations`` holds the first few per column.
    """

    batch: Batch
    counts: np.ndarray
    violations: list[Violation]


def hash_string(value: str | bytes) -> int:
    """The id of a string or binary: XXH64, seed 0, of its (UTF-8) bytes, as a signed 64-bit integer."""
    data = value.encode() if isinstance(value, str) else value
    word = _arrow.xxh64(data)
    return word - (1 << 64) if word >= 1 << 63 else word


class ArrowTable:
    """A table handed over to native code once, to be converted part by part. Keeps the columns' memory alive."""

    def __init__(self, table: pa.Table | pa.RecordBatch) -> None:
        self.native = _arrow.Table(table.__arrow_c_stream__())
        self.arrow_schema: pa.Schema = table.schema
        self.num_rows: int = table.num_rows


class TablePart(NamedTuple):
    """Rows [start, stop) of a table."""

    table: ArrowTable
    start: int
    stop: int


class BatchConverter:
    """Converts tables with the columns of one schema. Not for concurrent use; one per thread.

    ``violations_max`` values per column that the schema forbids are kept by ``inspect``; all are counted.
    """

    def __init__(self, schema: Schema, *, violations_max: int = 1) -> None:
        self.schema = schema
        self._columns = NativeColumns(schema, violations_max=violations_max)
        self._keys = schema.keys
        self._bound: pa.Schema | None = None

    @property
    def names(self) -> list[str]:
        """The declared columns in the order of ``Conversion.counts``."""
        return self._columns.names

    def convert(self, table: pa.Table | pa.RecordBatch | Sequence[TablePart], *, position: int = 0) -> Batch:
        """The rows of a table, or of several parts of tables in order, as one Batch.

        Raises SchemaError for a type, RowError for a value. The parts must have one schema.
        """
        conversion = self.inspect(table, position=position)
        if conversion.violations:
            first = min(conversion.violations, key=lambda violation: violation.row)
            raise RowError(first.column, first.row, first.reason)
        return conversion.batch

    def inspect(self, table: pa.Table | pa.RecordBatch | Sequence[TablePart], *, position: int = 0) -> Conversion:
        """As ``convert``, but violations are returned rather than raised. Raises SchemaError for a type."""
        if not isinstance(table, Sequence):
            arrow_table = ArrowTable(table)
            table = [TablePart(arrow_table, 0, arrow_table.num_rows)]
        arrow_schema = table[0].table.arrow_schema
        assert all(part.table.arrow_schema.equals(arrow_schema) for part in table), "parts of different schemas"
        if self._bound is None or not arrow_schema.equals(self._bound):
            self._bound = None
            problems = self._columns.bind(arrow_schema)
            if problems:
                raise SchemaError("; ".join(sentence for _, sentence in problems))
            self._bound = arrow_schema
        values, offsets, weights, dense, labels, sample_weights, extras, counts, failures = (
            self._columns.native.convert([(part.table.native, part.start, part.stop) for part in table])
        )
        num_rows = labels.shape[0]
        features = KeyedJaggedTensor(
            keys=self._keys,
            values=torch.from_numpy(values),
            weights=None if weights is None else torch.from_numpy(weights),
            offsets=torch.from_numpy(offsets),
            stride=num_rows,
        )
        batch = Batch(
            dense_features=torch.from_numpy(dense),
            sparse_features=features,
            labels=torch.from_numpy(labels),
            weights=None if sample_weights is None else torch.from_numpy(sample_weights),
            extras={name: torch.from_numpy(column) for name, column in zip(self.schema.extras, extras)},
            position=position,
            counters=self._counters(counts) if counts.any() else {},
        )
        return Conversion(batch, counts, [self._violation(*failure) for failure in failures])

    def _counters(self, counts: np.ndarray) -> dict[str, int]:
        counters: dict[str, int] = {}
        for name, (nulls, truncated, *_) in zip(self._columns.names, counts.tolist()):
            if nulls:
                counters[f"{name}: nulls"] = counters.get(f"{name}: nulls", 0) + nulls
            if truncated:
                counters[f"{name}: truncated"] = counters.get(f"{name}: truncated", 0) + truncated
        return counters

    def _violation(self, column: int, kind: int, row: int, value: float, expected: int) -> Violation:
        name, weights_column = self._columns.names[column], self._columns.weights[column]
        kind_name, sentence = _VIOLATIONS[kind]
        if kind == 4 and self.schema.label_kind == "regression":
            sentence = "the label is {value}; it must be finite"
        reason = sentence.format(value=f"{value:g}", expected=expected, weights=weights_column)
        return Violation(name, row, reason, kind_name)


# By the native FailureKind: a stable name and a sentence.
_VIOLATIONS = (
    ("null id", "a null id, and the column's null_policy is error"),
    ("weights length", "{value} weights in column {weights!r} for {expected} ids"),
    ("bad weight", "a weight in column {weights!r} is null or not finite ({value})"),
    ("null label", "the label is null"),
    ("bad label", "the label is {value}; it must be 0 or 1 (label_kind: regression allows any finite number)"),
    ("bad dense", "the dense value is null or not finite ({value}); dense_missing: zero reads it as 0"),
    ("bad sample weight", "the sample weight is {value}; it must be finite and >= 0"),
    ("null extra", "an extra column holds a null"),
)

#: Stable names of what can be wrong with a value, in the order of ``Conversion.counts``.
VIOLATION_KINDS = tuple(name for name, _ in _VIOLATIONS)
