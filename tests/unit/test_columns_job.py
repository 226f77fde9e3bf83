"""A job over tables cut into column blocks, from its configuration to checkpoints, evaluation and export."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from shoal.jobs import recipes, synth
from shoal.jobs.clicks import ClickLog, ClickLogSpec
from shoal.jobs.evaluate import evaluate_run
from shoal.jobs.train import ElasticTrainer
from shoal.platform.config import JobConfig, TableConfig, TablesConfig
from shoal.platform.export import export_parquet


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> JobConfig:
    folder = tmp_path_factory.mktemp("columns")
    log = ClickLog(ClickLogSpec(rows=2000, num_dense=2, cardinalities=(50, 7, 200), drift=0.0))
    report = synth.write(log, folder / "data", valid_fraction=0.2, test_fraction=0.2)
    return recipes.dlrm(
        folders={split: str(folder / "data" / split) for split in ("train", "valid", "test")},
        num_ids=report.num_ids,
        dense=report.dense,
        train_rows=1200,
        name="run",
        storage_path=str(folder / "runs"),
        num_workers=0,
        batch_size=256,
        epochs=2,
        embedding_dim=6,
        dense_arch=(),
        over_arch=(8,),
    )


def cut(job: JobConfig, name: str, column_blocks: int | None, epochs: int = 2) -> JobConfig:
    sharding = None if column_blocks is None else "column_wise"
    tables = TablesConfig(defaults=TableConfig(sharding_type=sharding, column_blocks=column_blocks))
    return job.replace(
        tables=tables,
        run=job.run.replace(name=name),
        train=job.train.replace(epochs=epochs),
    )


def test_a_run_goes_on_from_its_checkpoint_with_another_cut(job, tmp_path):
    """K1: cut into 2, then into 3; equal to the run of the uncut tables, row-wise Adagrad included."""
    whole = ElasticTrainer.from_config(cut(job, "whole", None)).fit()
    ElasticTrainer.from_config(cut(job, "cut", 2, epochs=1)).fit()
    result = ElasticTrainer.from_config(cut(job, "cut", 3)).fit()
    assert result.steps == whole.steps
    assert result.metrics["eval/log_loss"] == pytest.approx(whole.metrics["eval/log_loss"], rel=1e-6)
    # Also for the tables as they are in the model: each name once, whole rows.
    exports = {}
    for name in ("whole", "cut"):
        config = cut(job, name, 3)
        report = export_parquet(config.run.run_dir, str(tmp_path / name), slots=True)
        exports[name] = {
            t.table: pq.read_table(tmp_path / name / t.path).sort_by("id").to_pydict() for t in report.tables
        }
    assert exports["cut"].keys() == exports["whole"].keys()
    for table, rows in exports["whole"].items():
        assert exports["cut"][table]["id"] == rows["id"] and exports["cut"][table]["count"] == rows["count"]
        for ours, theirs in zip(exports["cut"][table]["vector"], rows["vector"]):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_evaluation_does_not_depend_on_the_cut(job):
    config = cut(job, "evaluated", 2, epochs=1)
    result = ElasticTrainer.from_config(config).fit()
    for other in (config, cut(job, "evaluated", None), cut(job, "evaluated", 3)):
        values = evaluate_run(other, paths=job.data.eval)
        assert values["log_loss"] == result.metrics["eval/log_loss"]
