"""Jobs of the elastic benchmarks beside the quickstart's: the DLRM step over files, and one table of a given size.

Both keep the whole file order or shuffle as a production job does; what decides the numbers is named in ``describe``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shoal.jobs import recipes
from shoal.jobs.workloads import IdWorkload
from shoal.platform.config import JobConfig, ScheduleConfig, SparseColumnConfig

ENDLESS_EPOCHS = 1_000_000


def endless(job: JobConfig, *, failure: dict[str, Any], log_every_steps: int = 100_000) -> JobConfig:
    """The job without an end, schedules, evaluation or checkpoints, and with fields of run.failure."""
    run = job.run
    return dataclasses.replace(
        job,
        data=dataclasses.replace(job.data, eval=(), test=()),
        train=dataclasses.replace(
            job.train, epochs=ENDLESS_EPOCHS, schedule=ScheduleConfig(), log_every_steps=log_every_steps
        ),
        run=dataclasses.replace(
            run,
            checkpoint=dataclasses.replace(run.checkpoint, at_end=False),
            failure=dataclasses.replace(run.failure, **failure),
        ),
    )


def dlrm_job(
    folder: Path, workload: IdWorkload, name: str, *, num_batches: int, batch_size: int, **failure: Any
) -> JobConfig:
    """DLRM over ``num_batches`` batches of a workload in Parquet, written once per folder."""
    data = folder / f"{workload.name}-{workload.alpha:g}"
    if not data.exists():
        data.mkdir(parents=True)
        batches = [workload.record_batch(index) for index in range(num_batches)]
        pq.write_table(pa.Table.from_batches(batches), data / "part-0.parquet", row_group_size=8192)
    job = recipes.dlrm(
        folders={"train": str(data), "valid": str(data), "test": str(data)},
        num_ids=dict.fromkeys(workload.feature_names, workload.num_embeddings),
        dense=tuple(f"i{j + 1}" for j in range(workload.num_dense)),
        train_rows=num_batches * workload.batch_size,
        name=name,
        storage_path=str(folder / "runs"),
        num_workers=2,
        batch_size=batch_size,
        embedding_dim=workload.embedding_dim,
        dense_arch=(64,),
        over_arch=(128, 64),
    )
    return endless(job, failure=failure)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BigTable:
    """One table all of whose rows exist after ``sweep_steps`` steps; then ``ids_per_step`` uniform ids a step.

    A row is its weights, a row-wise Adagrad accumulator, and the id, step and count that belong to every row.
    """

    table_bytes: int
    ids_per_step: int = 4096
    embedding_dim: int = 64
    batch_size: int = 2048
    #: Ids of a sample while rows are made.
    sweep_bag: int = 64
    #: Beyond them the rows would be made once more, so a measurement has to end before.
    steady_steps: int = 5000
    seed: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as it travels and lies in the arena: weights, accumulator, id, step of last update, count."""
        return 4 * self.embedding_dim + 4 + 3 * 8

    @property
    def num_rows(self) -> int:
        per_step = self.batch_size * self.sweep_bag
        return self.table_bytes // self.row_bytes // per_step * per_step

    @property
    def sweep_steps(self) -> int:
        return self.num_rows // (self.batch_size * self.sweep_bag)

    def write(self, folder: Path) -> Path:
        """The sweep in ascending ids, then ``steady_steps`` steps; in the order of the files."""
        target = folder / f"table-{self.table_bytes}-{self.ids_per_step}"
        target.mkdir(parents=True)
        rng = np.random.default_rng(self.seed)
        sweep = np.arange(self.num_rows, dtype=np.int64)
        _write_bags(target / "part-0.parquet", sweep, self.sweep_bag, self.batch_size)
        steady = rng.integers(0, self.num_rows, self.steady_steps * self.ids_per_step, dtype=np.int64)
        _write_bags(target / "part-1.parquet", steady, self.ids_per_step // self.batch_size, self.batch_size)
        return target

    def job(self, folder: Path, name: str, **failure: Any) -> JobConfig:
        """A small DLRM over the table; the files' order is kept."""
        data = self.write(folder)
        job = recipes.dlrm(
            folders=dict.fromkeys(("train", "valid", "test"), str(data)),
            num_ids={"c1": self.num_rows},
            dense=("i1",),
            train_rows=(self.sweep_steps + self.steady_steps) * self.batch_size,
            name=name,
            storage_path=str(folder / "runs"),
            num_workers=1,
            batch_size=self.batch_size,
            embedding_dim=self.embedding_dim,
        )
        job = dataclasses.replace(
            job,
            data=dataclasses.replace(
                job.data, shuffle=False, sparse=(SparseColumnConfig(name="c1", kind="list"),), window_rows=16_384
            ),
        )
        return endless(job, failure=failure)


def _write_bags(path: Path, ids: np.ndarray, bag: int, batch_size: int) -> None:
    """Bags of ``bag`` ids, one dense column and a label, a row group per 4 steps."""
    num_rows = len(ids) // bag
    offsets = pa.array(np.arange(num_rows + 1, dtype=np.int32) * bag)
    rng = np.random.default_rng(1)
    table = pa.table(
        {
            "label": pa.array((rng.random(num_rows) < 0.25).astype(np.float32)),
            "i1": pa.array(rng.standard_normal(num_rows, dtype=np.float32)),
            "c1": pa.ListArray.from_arrays(offsets, pa.array(ids)),
        }
    )
    pq.write_table(table, path, row_group_size=4 * batch_size, compression="none", use_dictionary=False)
