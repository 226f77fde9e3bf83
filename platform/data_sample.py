"""What a small sample of the training data says about its ids: how many a row has and how many distinct ones appear.

Distinct ids of N rows are extrapolated from n sampled rows by Heaps' law: u(N) = u(n) * (N / n) ** b, with b fitted
from u(n/2) and u(n). Click data follows it well; it is an estimate and is called one wherever it is shown.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from shoal.actors.dataset import Dataset
    from shoal.kernels.schema import Schema

SAMPLE_ROWS = 100_000
SAMPLE_FILES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureSample:
    """One feature in the sample."""

    name: str
    ids_per_row: float
    #: Distinct ids of the first half of the rows, and of all.
    unique_half: int
    unique: int
    #: Distinct ids in the rows of one worker's part of a batch.
    unique_per_batch: int

    def unique_of(self, rows: int, sample_rows: int) -> int:
        """Estimate of the distinct ids of ``rows`` rows (Heaps' law)."""
        if self.unique == 0 or rows <= sample_rows:
            return min(self.unique, math.ceil(rows * self.ids_per_row))
        return round(self.unique * (rows / sample_rows) ** self.growth)

    @property
    def growth(self) -> float:
        """The exponent of Heaps' law."""
        growth = math.log2(self.unique / self.unique_half) if self.unique_half else 1.0
        return min(1.0, max(0.0, growth))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSample:
    """A sample of a data set."""

    rows: int
    total_rows: int
    features: dict[str, FeatureSample]


def sample_dataset(dataset: Dataset, schema: Schema, *, batch_rows: int, rows_max: int = SAMPLE_ROWS) -> DataSample:
    """Read a few row groups, spread over the files, and count ids. Costs at most ``SAMPLE_FILES`` row groups."""
    files = [file for file in dataset.files if file.num_rows > 0]
    step = max(1, len(files) // SAMPLE_FILES)
    chosen = files[::step][:SAMPLE_FILES]
    per_file = max(1, rows_max // max(1, len(chosen)))
    tables = []
    for file in chosen:
        group = next(i for i, num_rows in enumerate(file.row_groups) if num_rows > 0)
        tables.append(dataset.read_row_group(file.path, group, num_rows=file.row_groups[group]).slice(0, per_file))
    table = pa.concat_tables(tables)
    features = {
        feature.name: _count_ids(feature.name, table.column(feature.source), min(batch_rows, table.num_rows))
        for feature in schema.sparse
    }
    return DataSample(rows=table.num_rows, total_rows=dataset.num_rows, features=features)


def _count_ids(name: str, column: pa.ChunkedArray, batch_rows: int) -> FeatureSample:
    rows = len(column)
    return FeatureSample(
        name=name,
        ids_per_row=len(_codes(column)) / max(1, rows),
        unique_half=_num_unique(column.slice(0, max(1, rows // 2))),
        unique=_num_unique(column),
        unique_per_batch=_num_unique(column.slice(0, batch_rows)),
    )


def _num_unique(column: pa.ChunkedArray) -> int:
    return len(np.unique(_codes(column)))


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    """The ids of a column as integers, nulls left out; text as positions in its own dictionary."""
    flat = column.combine_chunks()
    if pa.types.is_nested(flat.type):
        flat = pc.list_flatten(flat)
    flat = flat.drop_null()
    if not pa.types.is_integer(flat.type):
        flat = flat if pa.types.is_dictionary(flat.type) else flat.dictionary_encode()
        flat = flat.indices
    return flat.to_numpy(zero_copy_only=False)
