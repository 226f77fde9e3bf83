"""Named id workloads for benchmarks: what each one looks up, from which distribution, with how many duplicates.

STYLE 21: a benchmark names its workload, prints ``describe()`` with its result and rotates over >= 16 batches. Needs
numpy (and pyarrow for ``record_batch``). Batches are pure functions of (workload, index).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from shoal.jobs.zipf import bounded_zipf

if TYPE_CHECKING:
    import pyarrow as pa

#: Batches a benchmark rotates over.
NUM_BATCHES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdWorkload:
    """``num_features`` features, one per table, each with bags of exactly ``pooling`` ids."""

    name: str
    num_features: int
    num_embeddings: int
    embedding_dim: int
    batch_size: int
    #: Ids per bag, >= 1.
    pooling: int = 1
    #: Exponent of the bounded Zipf distribution; 0 is uniform.
    alpha: float = 0.0
    num_dense: int = 0
    seed: int = 0

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(f"c{i + 1}" for i in range(self.num_features))

    @property
    def ids_per_batch(self) -> int:
        return self.num_features * self.batch_size * self.pooling

    def values(self, index: int) -> np.ndarray:
        """Ids of batch ``index``: int64 [num_features * batch_size * pooling], feature-major like a KJT."""
        rng = np.random.default_rng((self.seed, index))
        return bounded_zipf(self.ids_per_batch, self.num_embeddings, self.alpha, rng)

    def lengths(self) -> np.ndarray:
        """Bag lengths of every batch: int32 [num_features * batch_size]."""
        return np.full(self.num_features * self.batch_size, self.pooling, np.int32)

    def offsets(self) -> np.ndarray:
        """Bag offsets of every batch: int64 [num_features * batch_size + 1]."""
        return np.arange(self.num_features * self.batch_size + 1, dtype=np.int64) * self.pooling

    def dense(self, index: int) -> np.ndarray:
        """Dense features of batch ``index``: float32 [batch_size, num_dense], standard normal."""
        rng = np.random.default_rng((self.seed, index, 1))
        return rng.standard_normal((self.batch_size, self.num_dense), dtype=np.float32)

    def labels(self, index: int) -> np.ndarray:
        """Labels of batch ``index``: float32 [batch_size], 0 or 1, a quarter of them 1."""
        rng = np.random.default_rng((self.seed, index, 2))
        return (rng.random(self.batch_size) < 0.25).astype(np.float32)

    def record_batch(self, index: int) -> pa.RecordBatch:
        """Batch ``index`` as Arrow: ``label``, ``i1``.. float32, ``c1``.. int64 (lists of int64 if pooling > 1)."""
        import pyarrow as pa

        columns = {"label": pa.array(self.labels(index))}
        dense = self.dense(index)
        columns.update({f"i{j + 1}": pa.array(dense[:, j]) for j in range(self.num_dense)})
        ids = self.values(index).reshape(self.num_features, -1)
        bags = pa.array(np.arange(self.batch_size + 1, dtype=np.int32) * self.pooling)
        for name, row in zip(self.feature_names, ids):
            flat = pa.array(row)
            columns[name] = flat if self.pooling == 1 else pa.ListArray.from_arrays(bags, flat)
        return pa.RecordBatch.from_pydict(columns)

    def describe(self, num_batches: int = 4) -> dict[str, float | str]:
        """Measured over ``num_batches``: ids and unique ids per batch (summed over tables) and their ratio."""
        unique = 0
        for index in range(num_batches):
            ids = self.values(index).reshape(self.num_features, -1)
            unique += sum(len(np.unique(row)) for row in ids)
        unique_per_batch = unique / num_batches
        return {
            "workload": self.name,
            "ids_per_batch": self.ids_per_batch,
            "unique_ids_per_batch": unique_per_batch,
            "duplication_factor": self.ids_per_batch / unique_per_batch,
        }


def embedding_op(distribution: str = "uniform", pooling: int = 1) -> IdWorkload:
    """One table of 1 M rows x 64 and 81,920 ids a batch; distribution ``uniform`` or ``zipf`` (bounded, 1.2)."""
    return IdWorkload(
        name=f"embedding_op_{distribution}_pooling{pooling}",
        num_features=1,
        num_embeddings=1_000_000,
        embedding_dim=64,
        batch_size=81_920 // pooling,
        pooling=pooling,
        alpha={"uniform": 0.0, "zipf": 1.2}[distribution],
    )


def many_tables() -> IdWorkload:
    """1,000 tables of 10,000 rows x 16, batch 256, bags of one."""
    return IdWorkload(
        name="many_tables", num_features=1000, num_embeddings=10_000, embedding_dim=16, batch_size=256, alpha=1.05
    )


def dlrm_step(batch_size: int = 2048) -> IdWorkload:
    """26 tables of 200,000 rows x 32, bags of one, bounded Zipf 1.2, 13 dense features: the step benchmarks."""
    return IdWorkload(
        name="dlrm_step",
        num_features=26,
        num_embeddings=200_000,
        embedding_dim=32,
        batch_size=batch_size,
        alpha=1.2,
        num_dense=13,
    )


def wide_rows() -> IdWorkload:
    """1,000 list columns x 256 rows, bags of two: the widest input."""
    return IdWorkload(
        name="wide_rows",
        num_features=1000,
        num_embeddings=10_000,
        embedding_dim=16,
        batch_size=256,
        pooling=2,
        alpha=1.05,
    )
