"""A Parquet data set: its files, the one type each declared column is read as, and reading row groups.

A scan reads every footer before anything starts, so that what is wrong with the files is said at once (data faults 36,
40, 41, 43, 47): a missing column, a type that cannot play its role, or types that differ between files and have no
common one name both files; files that cannot be opened are counted against ``max_bad_files``.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from shoal.kernels.columns import NativeColumns
from shoal.kernels.errors import DataError, SchemaError
from shoal.kernels.schema import DataFile, Schema


@dataclasses.dataclass(frozen=True)
class BadFile:
    """A file that could not be read and was left out."""

    path: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Dataset:
    """What a scan found. Immutable and picklable; reading needs nothing else."""

    files: tuple[DataFile, ...]
    #: Only the declared columns, each with the type that every file's column is read as.
    arrow_schema: pa.Schema
    filesystem: pafs.FileSystem
    bad_files: tuple[BadFile, ...] = ()
    max_bad_files: int = 0

    @property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self.files)

    def read_row_group(self, path: str, index: int, *, num_rows: int) -> pa.Table:
        """One row group: the declared columns, as ``arrow_schema``.

        Raises DataError naming file and row group when it cannot be read or does not hold ``num_rows`` rows.
        """
        try:
            with pq.ParquetFile(path, filesystem=self.filesystem, pre_buffer=True) as file:
                table = file.read_row_group(index, columns=self.arrow_schema.names, use_threads=False)
            table = table.select(self.arrow_schema.names)
            # The file's own key-value metadata must not make its tables different from another file's.
            table = table.replace_schema_metadata(None)
            if not table.schema.equals(self.arrow_schema, check_metadata=True):
                table = _cast(table, self.arrow_schema)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise DataError(f"{path}, row group {index}: cannot be read: {_one_line(error)}") from error
        if table.num_rows != num_rows:
            raise DataError(
                f"{path}, row group {index} holds {table.num_rows} rows; it held {num_rows} when the run scanned it. "
                "Do not rewrite the files of a running job"
            )
        return table


def scan_dataset(
    paths: str | Sequence[str],
    schema: Schema,
    *,
    filesystem: pafs.FileSystem | None = None,
    max_bad_files: int = 0,
    num_threads: int = 8,
) -> Dataset:
    """List ``paths`` (files, folders, globs or URIs), read all footers and unify the declared columns.

    Raises DataError when there are no files or rows, or more than ``max_bad_files`` files cannot be opened; SchemaError
    naming the column and the files when a type does not fit.
    """
    filesystem, found = list_files(paths, filesystem=filesystem)
    files: list[DataFile] = []
    schemas: list[tuple[str, pa.Schema]] = []
    bad: list[BadFile] = []
    with ThreadPoolExecutor(max_workers=num_threads) as pool:
        for (path, size), footer in zip(found, pool.map(lambda item: read_footer(filesystem, item[0]), found)):
            if isinstance(footer, BadFile):
                bad.append(footer)
                continue
            rows, file_schema = footer
            files.append(DataFile(path, size, rows))
            schemas.append((path, file_schema))
    if len(bad) > max_bad_files:
        listed = "; ".join(f"{file.path}: {file.reason}" for file in bad[:3])
        raise DataError(f"{len(bad)} of {len(found)} files cannot be read, max_bad_files is {max_bad_files}: {listed}")
    if sum(file.num_rows for file in files) == 0:
        raise DataError(f"the data set {paths} is empty: {len(files)} readable files with 0 rows")
    return Dataset(tuple(files), unify_schemas(schemas, schema), filesystem, tuple(bad), max_bad_files)


def list_files(
    paths: str | Sequence[str], *, filesystem: pafs.FileSystem | None = None
) -> tuple[pafs.FileSystem, list[tuple[str, int]]]:
    """The Parquet files (path, bytes) behind ``paths``, sorted by path: files, folders (recursively; names that begin
    with "." or "_" are skipped), globs; local or ``s3://``-like URIs, all of one file system.

    Raises DataError when a path does not exist or nothing is found.
    """
    paths = [paths] if isinstance(paths, str) else list(paths)
    if not paths:
        raise DataError("data.paths is empty; name a file, a folder or a glob of Parquet files")
    found: dict[str, int] = {}
    is_given = filesystem is not None
    for path in paths:
        if not is_given:
            resolved, inner = _resolve(path)
            if filesystem is not None and not filesystem.equals(resolved):
                raise DataError(f"{paths[0]} and {path} are on different file systems; one data set lives on one")
            filesystem, path = filesystem or resolved, inner
        assert filesystem is not None
        matches = list(_expand(filesystem, path))
        if not matches:
            raise DataError(f"no Parquet files at {path}; data.paths takes files, folders and globs")
        found.update(matches)
    assert filesystem is not None
    return filesystem, sorted(found.items())


def read_footer(filesystem: pafs.FileSystem, path: str) -> tuple[tuple[int, ...], pa.Schema] | BadFile:
    """Rows per row group and the Arrow schema of a file, or why it cannot be read."""
    try:
        with pq.ParquetFile(path, filesystem=filesystem) as file:
            metadata = file.metadata
            rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
            return rows, file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        return BadFile(path, _one_line(error))


def unify_schemas(schemas: Iterable[tuple[str, pa.Schema]], schema: Schema) -> pa.Schema:
    """One type per declared column that holds every file's values. Raises SchemaError naming column and both files."""
    columns = NativeColumns(schema)
    unified: dict[str, tuple[str, pa.DataType]] = {}
    seen: list[pa.Schema] = []
    first_path = ""
    for path, file_schema in schemas:
        if any(file_schema.equals(other) for other in seen):
            continue
        if len(seen) < 64:
            seen.append(file_schema)
        problems = columns.bind(file_schema)
        if problems:
            column, sentence = problems[0]
            before = unified.get(column)
            elsewhere = f"; in {before[0]} it is {before[1]}" if before else ""
            more = f" (and {len(problems) - 1} more columns)" if len(problems) > 1 else ""
            raise SchemaError(f"{path}: {sentence}{elsewhere}{more}")
        for column in schema.columns:
            found = file_schema.field(column).type
            before = unified.setdefault(column, (path, found))
            common = common_type(before[1], found)
            if common is None:
                raise SchemaError(
                    f"column {column!r} is {before[1]} in {before[0]} but {found} in {path}, and no type holds both; "
                    "rewrite one of the files"
                )
            unified[column] = (before[0], common)
        first_path = first_path or path
    result = pa.schema([pa.field(column, unified[column][1]) for column in schema.columns])
    problems = columns.bind(result)
    assert not problems, f"types that fit alone do not fit together: {problems}"
    return result


def common_type(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both without changing an id, or None.

    int64 and uint64 have none (an id would change its meaning), nor have numbers and strings, nor scalars and lists.
    """
    if a.equals(b):
        return a
    if pa.types.is_null(a) or pa.types.is_null(b):
        return b if pa.types.is_null(a) else a
    if _is_list(a) or _is_list(b):
        if not (_is_list(a) and _is_list(b)):
            return None
        element = common_type(a.value_type, b.value_type)
        is_large = pa.types.is_large_list(a) or pa.types.is_large_list(b)
        return None if element is None else (pa.large_list(element) if is_large else pa.list_(element))
    if pa.types.is_dictionary(a) or pa.types.is_dictionary(b):
        return common_type(_decoded(a), _decoded(b))
    if _is_text(a) and _is_text(b):
        is_utf8 = all(pa.types.is_string(t) or pa.types.is_large_string(t) for t in (a, b))
        return pa.large_string() if is_utf8 else pa.large_binary()
    if pa.types.is_integer(a) and pa.types.is_integer(b):
        if pa.types.is_uint64(a) or pa.types.is_uint64(b):
            return pa.uint64() if all(pa.types.is_unsigned_integer(t) for t in (a, b)) else None
        return pa.int64()
    is_number = all(pa.types.is_integer(t) or pa.types.is_floating(t) or pa.types.is_boolean(t) for t in (a, b))
    if is_number:
        return pa.float64() if pa.types.is_floating(a) or pa.types.is_floating(b) else pa.int64()
    return None


def _cast(table: pa.Table, target: pa.Schema) -> pa.Table:
    columns = []
    for field in target:
        column = table.column(field.name)
        if pa.types.is_large_binary(field.type) and not pa.types.is_large_binary(column.type):
            column = column.cast(pa.binary() if not pa.types.is_large_string(column.type) else pa.large_binary())
        columns.append(column if column.type.equals(field.type) else column.cast(field.type))
    return pa.table(columns, schema=target)


def _decoded(data_type: pa.DataType) -> pa.DataType:
    return data_type.value_type if pa.types.is_dictionary(data_type) else data_type


def _is_list(data_type: pa.DataType) -> bool:
    return pa.types.is_list(data_type) or pa.types.is_large_list(data_type) or pa.types.is_fixed_size_list(data_type)


def _is_text(data_type: pa.DataType) -> bool:
    tests: tuple[Callable[[pa.DataType], bool], ...] = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    return any(test(data_type) for test in tests)


def _resolve(path: str) -> tuple[pafs.FileSystem, str]:
    if "://" in path:
        try:
            return pafs.FileSystem.from_uri(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: cannot be opened: {_one_line(error)}") from error
    return pafs.LocalFileSystem(), path


def _expand(filesystem: pafs.FileSystem, path: str) -> Iterable[tuple[str, int]]:
    if any(letter in path for letter in "*?["):
        head = path[: min(path.find(letter) for letter in "*?[" if letter in path)]
        folder = head.rsplit("/", 1)[0] if "/" in head else "."
        prefix = "./" if folder == "." else ""
        for info in _walk(filesystem, folder):
            if fnmatch.fnmatchcase(info.path.removeprefix(prefix), path):
                yield info.path, info.size
        return
    info = filesystem.get_file_info(path)
    if info.type == pafs.FileType.NotFound:
        raise DataError(f"{path} does not exist")
    if info.type == pafs.FileType.File:
        yield info.path, info.size
        return
    for info in _walk(filesystem, path):
        inner = info.path.removeprefix(path.rstrip("/")).lstrip("/")
        is_hidden = any(part.startswith((".", "_")) for part in inner.split("/"))
        if not is_hidden and info.path.endswith((".parquet", ".pq")):
            yield info.path, info.size


def _walk(filesystem: pafs.FileSystem, folder: str) -> Iterable[pafs.FileInfo]:
    selector = pafs.FileSelector(folder, recursive=True, allow_not_found=True)
    return (info for info in filesystem.get_file_info(selector) if info.type == pafs.FileType.File)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
