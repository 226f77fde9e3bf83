"""Seeded synthetic data: named workloads and Criteo-shaped click logs. Needs numpy and pyarrow, not torch."""

from __future__ import annotations

from shoal.jobs.workloads import NUM_BATCHES, IdWorkload, dlrm_step, embedding_op, many_tables, wide_rows
from shoal.jobs.zipf import bounded_zipf, scatter_ids

__all__ = [
    "NUM_BATCHES",
    "IdWorkload",
    "bounded_zipf",
    "dlrm_step",
    "embedding_op",
    "many_tables",
    "scatter_ids",
    "wide_rows",
]
