"""``evaluate_run``: the numbers of a checkpoint equal those of the run that wrote it, and nothing is changed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from shoal.jobs import recipes, synth
from shoal.jobs.clicks import ClickLog, ClickLogSpec
from shoal.jobs.evaluate import evaluate_run
from shoal.jobs.train import ElasticTrainer
from shoal.kernels.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    log = ClickLog(ClickLogSpec(rows=3000, num_dense=2, cardinalities=(50, 7, 200), drift=0.0))
    report = synth.write(log, folder / "data", valid_fraction=0.2, test_fraction=0.2)
    config = recipes.dlrm(
        folders={split: str(folder / "data" / split) for split in ("train", "valid", "test")},
        num_ids=report.num_ids,
        dense=report.dense,
        train_rows=1800,
        name="run",
        storage_path=str(folder / "runs"),
        num_workers=0,
        batch_size=256,
        epochs=2,
        embedding_dim=4,
        dense_arch=(),
        over_arch=(8,),
    )
    return config, ElasticTrainer.from_config(config).fit()


def files_of(folder: str) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in Path(folder).rglob("*") if path.is_file()}


def test_equals_the_evaluation_of_the_run_itself_and_writes_nothing(trained):
    config, result = trained
    before = files_of(config.run.run_dir)
    values = evaluate_run(config, paths=config.data.eval)
    assert files_of(config.run.run_dir) == before
    assert values["step"] == result.steps == 16
    for name in ("auc", "log_loss", "ne", "num_samples"):
        assert values[name] == result.metrics[f"eval/{name}"], name
    assert values["num_samples"] == 600
    assert evaluate_run(config, paths=config.data.eval, step=16) == values


def test_a_job_for_several_workers_is_evaluated_in_one_process(trained):
    config, result = trained
    elastic = config.replace(scaling=config.scaling.replace(num_workers=(2, 3)))
    values = evaluate_run(elastic, paths=config.data.eval)
    assert values["auc"] == result.metrics["eval/auc"]


def test_other_data_gives_other_numbers(trained):
    config, _ = trained
    values = evaluate_run(config, paths=config.data.test)
    assert values["num_samples"] == 600 and math.isfinite(values["auc"])
    assert values["log_loss"] != evaluate_run(config, paths=config.data.eval)["log_loss"]


def test_missing_checkpoint_and_missing_data_are_named(trained):
    config, _ = trained
    with pytest.raises(CheckpointError, match="999"):
        evaluate_run(config, paths=config.data.eval, step=999)
    elsewhere = config.replace(run=config.run.replace(name="other"))
    with pytest.raises(CheckpointError, match="other"):
        evaluate_run(elsewhere, paths=config.data.eval)
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        evaluate_run(config, paths=())
