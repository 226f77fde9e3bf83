"""Seeded synthetic data: Criteo-shaped click logs as Parquet, and the named workloads of the benchmarks.

``synth`` writes the folders ``train``, ``valid`` and ``test`` (the last rows in time) with ``part-00000.parquet`` and
so on, and a ``meta.json`` with everything needed to use and judge the data. Memory is bounded by one chunk, whatever
the number of rows. Needs numpy and pyarrow, not torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shoal.jobs.clicks import CHUNK_ROWS, CRITEO_CARDINALITIES, Chunk, ClickLog, ClickLogSpec
from shoal.jobs.workloads import NUM_BATCHES, IdWorkload, dlrm_step, embedding_op, many_tables, wide_rows
from shoal.jobs.zipf import bounded_zipf, scatter_ids
from shoal.kernels.errors import ConfigError
from shoal.kernels.metrics import BinaryMetrics

__all__ = [
    "CHUNK_ROWS",
    "CRITEO_CARDINALITIES",
    "NUM_BATCHES",
    "Chunk",
    "ClickLog",
    "ClickLogSpec",
    "IdWorkload",
    "SynthReport",
    "bounded_zipf",
    "dlrm_step",
    "embedding_op",
    "many_tables",
    "scatter_ids",
    "synth",
    "wide_rows",
]

#: Batch size at which duplication is reported.
REPORT_BATCH_ROWS = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class SynthReport:
    """What was written, and what is known about it."""

    out: str
    rows: int
    valid_rows: int
    test_rows: int
    num_files: int
    file_bytes: int
    seed: int
    label_mean: float
    #: AUC of the true probabilities over all rows: the best that any model can reach, and its error bound.
    bayes_auc: float
    bayes_auc_error_max: float
    #: Mean entropy of the labels given the features: the lowest log loss that any model can reach.
    bayes_log_loss: float
    #: Unique ids per batch of 2,048 rows, summed over sparse columns, and ids per unique id.
    unique_ids_per_batch: float
    duplication_factor: float
    #: Sparse column -> number of distinct ids it can have.
    num_ids: dict[str, int]
    dense: tuple[str, ...]


def synth(
    out: str | Path,
    rows: int = 1_000_000,
    seed: int = 0,
    *,
    alpha: float = 1.05,
    drift: float = 1.0,
    cardinality_max: int | None = None,
    signal: float = 1.5,
    interaction: float = 0.2,
    multi_hot: Mapping[str, int] | None = None,
    valid_fraction: float = 0.05,
    test_fraction: float = 0.1,
    rows_per_file: int = 1_048_576,
    compression: str = "zstd",
) -> SynthReport:
    """Write a Criteo-shaped click log; the files are a pure function of the arguments.

    Args:
        out: a new or empty folder.
        rows: rows to write, test rows included.
        alpha, drift, cardinality_max, signal, interaction, multi_hot: see ``ClickLogSpec``.
        valid_fraction, test_fraction: parts of the rows that go to ``valid`` and, the last ones, to ``test``; >= 0.
        rows_per_file: rounded up to whole chunks of 65,536 rows, each one row group.
        compression: of the Parquet files.

    Raises:
        ConfigError: an argument is out of range, or ``out`` has contents.
    """
    spec = ClickLogSpec(
        rows=rows,
        seed=seed,
        alpha=alpha,
        drift=drift,
        cardinality_max=cardinality_max,
        signal=signal,
        interaction=interaction,
        multi_hot=dict(multi_hot or {}),
    )
    return write(
        ClickLog(spec),
        out,
        valid_fraction=valid_fraction,
        test_fraction=test_fraction,
        rows_per_file=rows_per_file,
        compression=compression,
    )


def write(
    log: ClickLog,
    out: str | Path,
    *,
    valid_fraction: float = 0.05,
    test_fraction: float = 0.1,
    rows_per_file: int = 1_048_576,
    compression: str = "zstd",
) -> SynthReport:
    """Write any click log; see ``synth``."""
    spec, folder = log.spec, Path(out)
    if min(valid_fraction, test_fraction) < 0 or valid_fraction + test_fraction >= 1:
        fractions = f"valid_fraction is {valid_fraction} and test_fraction {test_fraction}"
        raise ConfigError(f"synth: {fractions}; they must be >= 0 and leave rows to train on")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"synth: {folder} is not empty; name a new folder")
    test_rows, valid_rows = int(spec.rows * test_fraction), int(spec.rows * valid_fraction)
    ends = {"train": spec.rows - test_rows - valid_rows, "valid": spec.rows - test_rows, "test": spec.rows}
    chunks_per_file = max(1, -(-rows_per_file // CHUNK_ROWS))
    files = {split: _PartFiles(folder / split, chunks_per_file, compression) for split in ends}
    truth, duplication = BinaryMetrics(), _Duplication()
    for index in range(spec.num_chunks):
        chunk = log.chunk(index)
        # A label equal to its probability counts as that part of a positive: this is the expectation over labels.
        truth.update(chunk.probability, chunk.probability)
        duplication.add(chunk.table, spec.sparse_names)
        first = 0
        for split, end in ends.items():
            stop = min(max(first, end - index * CHUNK_ROWS), chunk.table.num_rows)
            files[split].write(chunk.table.slice(first, stop - first))
            first = stop
    for parts in files.values():
        parts.close()
    best = truth.compute()
    report = SynthReport(
        out=str(folder),
        rows=spec.rows,
        valid_rows=valid_rows,
        test_rows=test_rows,
        num_files=sum(parts.num_files for parts in files.values()),
        file_bytes=sum(parts.file_bytes for parts in files.values()),
        seed=spec.seed,
        label_mean=best["label_mean"],
        bayes_auc=best["auc"],
        bayes_auc_error_max=best["auc_error_max"],
        bayes_log_loss=best["log_loss"],
        unique_ids_per_batch=duplication.unique / max(1, duplication.batches),
        duplication_factor=duplication.ids / max(1, duplication.unique),
        num_ids=spec.num_ids,
        dense=spec.dense_names,
    )
    meta: dict[str, Any] = {"report": dataclasses.asdict(report), "spec": dataclasses.asdict(spec)}
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    return report


class _PartFiles:
    """Parquet files of one split: a row group per write, a new file every ``chunks_per_file`` writes."""

    def __init__(self, folder: Path, chunks_per_file: int, compression: str) -> None:
        self.num_files = 0
        self.file_bytes = 0
        self._folder = folder
        self._chunks_per_file = chunks_per_file
        self._compression = compression
        self._chunks = 0
        self._writer: pq.ParquetWriter | None = None
        self._partial = Path()

    def write(self, table: pa.Table) -> None:
        if table.num_rows == 0:
            return
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Renamed when complete, so that a torn file is never read as data.
            self._partial = self._folder / f"part-{self.num_files:05d}.parquet.partial"
            self._writer = pq.ParquetWriter(self._partial, table.schema, compression=self._compression)
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._chunks += 1
        if self._chunks == self._chunks_per_file:
            self.close()

    def close(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self.file_bytes += self._partial.stat().st_size
        self._partial.rename(self._partial.with_suffix(""))
        self._writer, self._chunks = None, 0
        self.num_files += 1


class _Duplication:
    """Ids and unique ids of the first batch of each chunk, summed over columns."""

    def __init__(self) -> None:
        self.batches = self.ids = self.unique = 0

    def add(self, table: pa.Table, names: tuple[str, ...]) -> None:
        batch = table.slice(0, REPORT_BATCH_ROWS)
        self.batches += 1
        for name in names:
            column = batch.column(name).combine_chunks()
            ids = column.flatten() if pa.types.is_list(column.type) else column
            self.ids += len(ids)
            self.unique += len(np.unique(ids.to_numpy()))
