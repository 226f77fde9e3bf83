"""Checks a data set against its declared schema and reports everything that is wrong, not only the first thing.

Streaming, in bounded memory: one slice of a row group at a time, and the first few examples of each kind of violation
with file, row group and row; all are counted. What a run would refuse is a violation; what a declared policy handles
(nulls dropped, lists cut) is only counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from shoal.actors.dataset import BadFile, common_type, list_files, read_footer
from shoal.kernels.arrow import VIOLATION_KINDS, BatchConverter, Conversion
from shoal.kernels.columns import NativeColumns
from shoal.kernels.errors import DataError
from shoal.kernels.schema import Schema

#: Rows converted at a time.
_SLICE_ROWS = 32_768


@dataclasses.dataclass(frozen=True)
class Example:
    """Where something is wrong. ``row`` counts from 0 within the row group; None where it concerns the whole file."""

    file: str
    row_group: int | None
    row: int | None
    reason: str

    def __str__(self) -> str:
        place = self.file
        if self.row_group is not None:
            place += f", row group {self.row_group}, row {self.row}"
        return f"{place}: {self.reason}"


@dataclasses.dataclass
class Finding:
    """One kind of violation in one column ("" for whole files): how often, and the first examples."""

    kind: str
    column: str
    count: int = 0
    examples: list[Example] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Report:
    """What a check found."""

    num_files: int = 0
    num_rows: int = 0
    num_ids: int = 0
    findings: list[Finding] = dataclasses.field(default_factory=list)
    #: What policies did, e.g. {"genres: nulls": 12}.
    counters: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Smallest and largest id per feature, as signed 64-bit integers (hashed ids use all of them).
    id_ranges: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    #: Rows whose label is above 0.5.
    num_positive: int = 0

    @property
    def is_ok(self) -> bool:
        """Whether nothing was found that a run would refuse."""
        return not self.findings

    def lines(self) -> Iterator[str]:
        """The report as text, one finding or example a line."""
        share = f", {self.num_positive / self.num_rows:.2%} positive" if self.num_rows else ""
        yield f"{self.num_files} files, {self.num_rows:,} rows{share}, {self.num_ids:,} ids"
        for name, (low, high) in self.id_ranges.items():
            yield f"  ids of {name}: {low} .. {high}"
        for name, count in self.counters.items():
            yield f"  handled by policy: {name}: {count:,}"
        for finding in self.findings:
            where = f" in column {finding.column!r}" if finding.column else ""
            yield f"VIOLATION {finding.kind}{where}: {finding.count:,}"
            for example in finding.examples:
                yield f"    {example}"
        yield "no violations" if self.is_ok else f"{len(self.findings)} kinds of violation"


def check_dataset(
    paths: str | Sequence[str],
    schema: Schema,
    *,
    table_sizes: Mapping[str, int] | None = None,
    filesystem: pafs.FileSystem | None = None,
    max_examples: int = 5,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Read every row of the data set and report every violation of the schema.

    ``table_sizes``: per feature the number of rows of its static table, where an id outside is an error (leave out
    features whose table is dynamic or whose policy handles such ids). ``progress(files done, files)`` is called after
    each file. Raises DataError only when ``paths`` name nothing at all.
    """
    schema.validate()
    check = _Check(schema, table_sizes or {}, max_examples)
    try:
        filesystem, files = list_files(paths, filesystem=filesystem)
    except DataError as error:
        raise DataError(f"nothing to check: {error.args[0]}") from error
    for done, (path, _) in enumerate(files):
        check.file(filesystem, path)
        if progress is not None:
            progress(done + 1, len(files))
    check.report.num_files = len(files)
    if check.report.num_rows == 0:
        check.add("empty data set", "", Example(", ".join(files and [files[0][0]]), None, None, "no rows at all"))
    return check.report


class _Check:
    """The state of a check: the report so far, and the types seen first."""

    def __init__(self, schema: Schema, table_sizes: Mapping[str, int], max_examples: int) -> None:
        self.report = Report()
        self._schema = schema
        self._sizes = table_sizes
        self._max_examples = max_examples
        self._findings: dict[tuple[str, str], Finding] = {}
        self._types: dict[str, tuple[str, pa.DataType]] = {}
        self._converters: dict[Schema, BatchConverter] = {}

    def add(self, kind: str, column: str, example: Example | None, count: int = 1) -> None:
        finding = self._findings.get((kind, column))
        if finding is None:
            finding = self._findings[kind, column] = Finding(kind, column)
            self.report.findings.append(finding)
        finding.count += count
        if example is not None and len(finding.examples) < self._max_examples:
            finding.examples.append(example)

    def file(self, filesystem: pafs.FileSystem, path: str) -> None:
        """Check one file: footer, types, then values of the columns whose types fit."""
        footer = read_footer(filesystem, path)
        if isinstance(footer, BadFile):
            self.add("unreadable file", "", Example(path, None, None, footer.reason))
            return
        row_groups, arrow_schema = footer
        bad_columns = self._check_types(path, arrow_schema)
        schema = _without(self._schema, bad_columns)
        if schema is None:  # Without a label there is no batch; its type is reported.
            self.report.num_rows += sum(row_groups)
            return
        converter = self._converters.setdefault(schema, BatchConverter(schema, violations_max=self._max_examples))
        for index in range(len(row_groups)):
            try:
                self._check_row_group(filesystem, path, index, converter)
            except (pa.ArrowException, OSError) as error:
                reason = " ".join(str(error).split())[:300]
                self.add("unreadable row group", "", Example(path, index, None, reason))

    def _check_types(self, path: str, arrow_schema: pa.Schema) -> set[str]:
        """Report columns that are missing, of a wrong type, or of a type that does not go with earlier files."""
        bad = set()
        for column, sentence in NativeColumns(self._schema).bind(arrow_schema):
            before = self._types.get(column)
            elsewhere = f"; in {before[0]} it is {before[1]}" if before else ""
            kind = "missing column" if arrow_schema.get_field_index(column) < 0 else "wrong type"
            self.add(kind, column, Example(path, None, None, sentence + elsewhere))
            bad.add(column)
        for column in self._schema.columns:
            if column in bad or arrow_schema.get_field_index(column) < 0:
                continue
            found = arrow_schema.field(column).type
            first = self._types.setdefault(column, (path, found))
            common = common_type(first[1], found)
            if common is None:
                reason = f"it is {found}, but {first[1]} in {first[0]}; no type holds both"
                self.add("type differs between files", column, Example(path, None, None, reason))
            else:
                self._types[column] = (first[0], common)
        return bad

    def _check_row_group(self, filesystem: pafs.FileSystem, path: str, index: int, converter: BatchConverter) -> None:
        first = 0
        with pq.ParquetFile(path, filesystem=filesystem, pre_buffer=True) as file:
            columns = converter.schema.columns
            for batch in file.iter_batches(batch_size=_SLICE_ROWS, row_groups=[index], columns=columns):
                self._check_slice(path, index, first, converter, converter.inspect(batch))
                first += batch.num_rows

    def _check_slice(self, path: str, index: int, first: int, converter: BatchConverter, found: Conversion) -> None:
        report, batch = self.report, found.batch
        report.num_rows += len(batch)
        report.num_positive += int((batch.labels > 0.5).sum())
        report.num_ids += batch.sparse_features.values().numel()
        for name, count in batch.counters.items():
            report.counters[name] = report.counters.get(name, 0) + count
        for column, counts in zip(converter.names, found.counts[:, 2:].tolist()):
            for kind, count in zip(VIOLATION_KINDS, counts):
                if count:
                    self.add(kind, column, None, count)
        for violation in found.violations:
            example = Example(path, index, first + violation.row, violation.reason)
            self.add(violation.kind, violation.column, example, 0)
        self._check_ids(path, index, first, converter.schema, found)

    def _check_ids(self, path: str, index: int, first: int, schema: Schema, found: Conversion) -> None:
        features = found.batch.sparse_features
        values, offsets, rows = features.values().numpy(), features.offsets().numpy(), len(found.batch)
        for k, feature in enumerate(schema.sparse):
            own_offsets = offsets[k * rows : (k + 1) * rows + 1]
            ids = values[own_offsets[0] : own_offsets[-1]]
            if ids.size == 0:
                continue
            low, high = int(ids.min()), int(ids.max())
            before = self.report.id_ranges.get(feature.name, (low, high))
            self.report.id_ranges[feature.name] = (min(low, before[0]), max(high, before[1]))
            size = self._sizes.get(feature.name)
            if size is None or (low >= 0 and high < size):
                continue
            at = np.flatnonzero((ids < 0) | (ids >= size))
            self.add("id out of range", feature.source, None, at.size)
            for position in at[: self._max_examples].tolist():
                row = int(np.searchsorted(own_offsets, own_offsets[0] + position, side="right")) - 1
                reason = f"id {ids[position]} of feature {feature.name!r} is outside its table, 0 .. {size - 1}"
                self.add("id out of range", feature.source, Example(path, index, first + row, reason), 0)


def _without(schema: Schema, columns: set[str]) -> Schema | None:
    """The schema without some columns; None without its label."""
    if not columns:
        return schema
    if schema.label in columns:
        return None
    return dataclasses.replace(
        schema,
        dense=tuple(name for name in schema.dense if name not in columns),
        sparse=tuple(feature for feature in schema.sparse if feature.source not in columns),
        weight=None if schema.weight in columns else schema.weight,
        extras=tuple(name for name in schema.extras if name not in columns),
    )
