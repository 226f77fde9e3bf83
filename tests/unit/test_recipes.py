"""Recipes are complete jobs, examples are valid, the baseline and the quickstart report what they measured."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.jobs import baseline, quickstart, recipes
from shoal.platform.config_file import dump_config, load_config, parse_config

REPOSITORY = Path(__file__).parents[2]


def make_recipe(recipe=recipes.movielens, **changes):
    folders = {split: f"data/{split}" for split in ("train", "valid", "test")}
    arguments = {
        "folders": folders,
        "num_ids": {"user": 943, "genres": 19},
        "dense": ("timestamp",),
        "train_rows": 80_000,
        "name": "seed0",
        "storage_path": "runs",
    }
    return recipe(**{**arguments, **changes})


@pytest.mark.parametrize("recipe", [recipes.movielens, recipes.dlrm])
def test_recipes_are_valid_and_survive_a_job_file(recipe):
    config = make_recipe(recipe, seed=7, num_workers=3)
    config.validate()
    assert parse_config(dump_config(config), source="job.yaml") == config
    assert config.train.seed == 7 and config.scaling.num_workers == 3
    assert config.model.args["tables"] == {"user": 943, "genres": 19}
    assert [feature.name for feature in config.data.sparse] == ["user", "genres"]


def test_schedule_ends_with_the_last_step():
    config = make_recipe(recipes.dlrm, train_rows=1001, batch_size=100, epochs=3)
    assert config.train.schedule.decay_steps == 33


@pytest.mark.parametrize("path", sorted((REPOSITORY / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_valid_jobs(path):
    load_config(path).validate()


def test_criteo_example_fits_what_synth_writes():
    from shoal.jobs.clicks import ClickLogSpec

    config = load_config(REPOSITORY / "examples" / "criteo_synth.yaml")
    spec = ClickLogSpec(rows=1_000_000, cardinality_max=100_000)
    assert config.model.args["tables"] == spec.num_ids
    assert config.data.dense == spec.dense_names
    assert tuple(feature.name for feature in config.data.sparse) == spec.sparse_names


def click_table(n: int, seed: int) -> pa.Table:
    rng = np.random.default_rng(seed)
    user, tags = rng.integers(0, 5, n), [rng.integers(0, 4, rng.integers(0, 3)).tolist() for _ in range(n)]
    logit = np.array([-2, -1, 0, 1, 2])[user] + np.array([sum(bag) - 1.5 for bag in tags])
    label = rng.random(n) < 1 / (1 + np.exp(-logit))
    columns = {"label": label.astype(np.float32), "user": user, "tags": pa.array(tags, pa.list_(pa.int64()))}
    return pa.table({**columns, "time": rng.standard_normal(n).astype(np.float32)})


def test_one_hot_has_a_column_per_id_and_keeps_dense_numbers():
    table = pa.table(
        {
            "user": [2, 0],
            "tags": pa.array([[1, 1], []], pa.list_(pa.int64())),
            "time": pa.array([0.5, -1.0], pa.float32()),
        }
    )
    matrix = baseline.one_hot(table, {"user": 3, "tags": 2}, ("time",)).toarray()
    assert matrix.tolist() == [[0, 0, 1, 0, 2, 0.5], [1, 0, 0, 0, 0, -1.0]]


def test_baseline_finds_a_linear_signal_and_chooses_c_by_validation(tmp_path):
    pytest.importorskip("sklearn")
    folders = {}
    for seed, (split, n) in enumerate((("train", 4000), ("valid", 1000), ("test", 1000))):
        folders[split] = tmp_path / split
        folders[split].mkdir()
        pq.write_table(click_table(n, seed), folders[split] / "part-0.parquet")
    result = baseline.logistic_regression(folders, {"user": 5, "tags": 4}, dense=("time",))
    assert result.auc > 0.8 and result.log_loss < 0.55
    assert result.regularisation_c in baseline.C_GRID


def test_quickstart_falls_back_to_the_generator_and_says_so(tmp_path, monkeypatch):
    def unavailable(path, **_):
        raise quickstart.movielens.DataUnavailableError("no network")

    monkeypatch.setattr(quickstart.movielens, "locate", unavailable)
    monkeypatch.setattr(quickstart, "GENERATED_ROWS", 2000)
    said: list[str] = []
    prepared = quickstart.prepare(tmp_path, 0, None, said.append)
    assert "no network" in said[0] and "generated" in said[0]
    assert sum(prepared.rows.values()) == 2000
    for split, folder in prepared.folders.items():
        assert pq.read_table(folder).num_rows == prepared.rows[split]
    assert 0.6 < prepared.reference["auc"] < 1
    # The user's own path is never replaced by something else.
    with pytest.raises(quickstart.movielens.DataUnavailableError):
        quickstart.prepare(tmp_path, 0, "some/path", said.append)


def test_quickstart_without_scikit_learn_says_what_to_install_and_goes_on(monkeypatch):
    # None in sys.modules makes the import fail as if the package were absent.
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    prepared = quickstart.PreparedData(
        name=quickstart.MOVIELENS, folders={}, num_ids={}, dense=(), rows={}, reference={}, reference_source=""
    )
    said: list[str] = []
    assert quickstart._baseline(prepared, said.append) is None
    assert said[0].startswith("no comparison with a logistic regression") and "shoal[quickstart]" in said[0]


def test_each_quickstart_run_gets_its_own_folder(tmp_path):
    prepared = quickstart.PreparedData(
        name=quickstart.MOVIELENS,
        folders={split: split for split in ("train", "valid", "test")},
        num_ids={"user": 3},
        dense=("timestamp",),
        rows={"train": 80_000},
        reference={},
        reference_source="",
    )
    names = []
    for _ in range(2):
        config = quickstart.job(prepared, tmp_path, seed=4, num_workers=0)
        names.append(config.run.name)
        Path(config.run.run_dir).mkdir(parents=True)
    assert names == ["seed4", "seed4-2"]


@pytest.mark.parametrize(("auc", "is_good"), [(0.78, True), (0.76, False)])
def test_report_compares_with_the_baseline(auc, is_good):
    prepared = quickstart.PreparedData(
        name=quickstart.MOVIELENS,
        folders={},
        num_ids={},
        dense=(),
        rows={"train": 80_000, "valid": 10_000, "test": 10_000},
        reference=quickstart.PUBLISHED,
        reference_source=quickstart.PUBLISHED_SOURCE,
    )
    result = baseline.BaselineResult(auc=0.77, log_loss=0.57, valid_auc=0.77, regularisation_c=1.0)
    report = quickstart.compare(prepared, {"auc": auc, "log_loss": 0.56}, result)
    assert report["is_at_least_baseline"] is is_good
    report |= {"seed": 0, "num_workers": 2, "steps": 10, "train_seconds": 1.0}
    text = quickstart.format_report(report)
    for part in ("80,000 / 10,000 / 10,000", f"{auc:.4f}", "0.7700", "0.7765", "0.5620", "RecBole"):
        assert part in text
    assert ("below" in text) is not is_good
    without = quickstart.compare(prepared, {"auc": auc, "log_loss": 0.56}, None)
    assert without["is_at_least_baseline"] is None
