"""What elasticity does to the model: 1->3->2->4 workers and two kills, against the same job at a fixed size.

MovieLens-100K and the click generator, the quickstart's jobs to their end. Both runs train the same batches; all that
may differ is the order in which gradients of ranks are summed. Workers are processes under the production controller.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
import numpy as np
import pyarrow.parquet as pq
from elastic_processes import ProcessRun, process_run
from elastic_steps import loss_outage

from shoal.jobs import quickstart
from shoal.jobs.evaluate import evaluate_run
from shoal.platform.checkpoint import CheckpointState, list_checkpoints

EXPECTATION = (
    "A view change moves rows with all their state and a recovery returns to a common step, so every batch is applied "
    "exactly once; float32 sums over ranks associate differently at another world size: 1e-7 per step, which Adam and "
    "240 steps grow to 1e-6 - 1e-5 of a tensor's norm. The AUC moves in the sixth digit."
)
AUC_MAX = 1e-3
RELATIVE_MAX = 1e-4
FIXED_WORKERS = 2
#: Time for a process to start within few steps, and between changes.
SLOW_S, FAST_S = 0.7, 0.01


def jobs_of(folder: Path) -> dict[str, tuple[Any, Any]]:
    """Data set -> (job of the fixed run, job of the elastic one); the same but for workers and names."""
    found = {}
    for name, prepared in (
        ("MovieLens-100K", quickstart.prepare(folder / "movielens", 0, None, print)),
        ("generated clicks", quickstart._generated(folder / "clicks", 0)),
    ):
        base = quickstart.job(prepared, folder / name.replace(" ", "-"), seed=0, num_workers=1)
        if prepared.name != quickstart.MOVIELENS:
            # As many steps as MovieLens takes.
            base = dataclasses.replace(base, train=dataclasses.replace(base.train, epochs=6))
        failure = dataclasses.replace(
            base.run.failure, recovery="replicated", on_loss="replace", protect_every_steps=10
        )
        base = dataclasses.replace(base, run=dataclasses.replace(base.run, failure=failure))
        found[name] = (_as(base, "fixed", FIXED_WORKERS), _as(base, "elastic", 1))
    return found


def _as(job: Any, name: str, num_workers: int) -> Any:
    return dataclasses.replace(
        job,
        run=dataclasses.replace(job.run, name=name),
        scaling=dataclasses.replace(job.scaling, num_workers=num_workers),
    )


def train_fixed(folder: Path, job: Any) -> None:
    """The job from beginning to end."""
    with process_run(folder, job) as run:
        run.join(240.0)


def train_elastic(folder: Path, job: Any) -> dict[str, Any]:
    """The job through 1->3->2->4 workers with two kills; says what happened."""
    with process_run(folder, job) as run:
        run.tempo.pause_s = SLOW_S
        run.wait(lambda m: m.step >= 5, 90.0, "the first steps")
        _resize(run, 3)
        kills = [_kill(run, 1)]
        _resize(run, 2)
        kills.append(_kill(run, 0))
        _resize(run, 4)
        changed_at = run.step()
        run.tempo.pause_s = 0.0
        run.join(240.0)
        events = run.events()
    views = [e["workers"] for e in events if e["kind"] in ("view", "recovered")]
    return {"workers": views, "redone_steps": kills, "last_change_at_step": changed_at}


def _resize(run: ProcessRun, num_workers: int) -> None:
    run.tempo.pause_s = SLOW_S
    run.resize(num_workers, 120.0, more_steps=2)
    _train_on(run)


def _kill(run: ProcessRun, rank: int) -> int:
    """Kill the worker of ``rank`` with SIGKILL; returns how many steps were done again."""
    run.tempo.pause_s = SLOW_S
    killed = time.time()
    run.ranks()[rank].kill()
    outage = run.wait_for(lambda: loss_outage(run.marks(), killed), 120.0, "a recovery")
    _train_on(run)
    return outage.redone_steps


def _train_on(run: ProcessRun, steps: int = 15) -> None:
    run.tempo.pause_s = FAST_S
    until = run.step() + steps
    run.wait(lambda m: m.step >= until, 60.0, f"step {until}")


def final_state(job: Any, folder: Path) -> dict[str, np.ndarray]:
    """Name -> values of the newest checkpoint: every table's weights and optimizer state by id, and all dense ones."""
    from safetensors.numpy import load_file

    from shoal.platform.export import export_parquet

    info = [i for i in list_checkpoints(job.run.run_dir) if i.state is CheckpointState.COMPLETE][-1]
    target = folder / f"export-{job.run.name}"
    report = export_parquet(info.uri, str(target), slots=True)
    found: dict[str, np.ndarray] = {}
    for exported in report.tables:
        table = pq.read_table(target / exported.table).sort_by("id")
        for column in table.column_names:
            values = table.column(column).combine_chunks()
            flat = values.flatten() if hasattr(values, "flatten") else values
            found[f"{exported.table}.{column}"] = flat.to_numpy(zero_copy_only=False)
    for path in sorted(Path(info.uri).rglob("*.safetensors")):
        # Metric bins count predictions: one that moves by 1e-7 may fall into the next bin.
        tensors = {name: values for name, values in load_file(path).items() if not name.startswith("metrics")}
        found |= {f"dense.{name}": values for name, values in tensors.items()}
    return found


def difference(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> tuple[float, str]:
    """The largest relative difference of a tensor, ||a - b|| / ||b||, and whose it is."""
    assert mine.keys() == theirs.keys(), sorted(mine.keys() ^ theirs.keys())
    worst = (0.0, "")
    for name, values in theirs.items():
        a, b = mine[name].astype(np.float64), values.astype(np.float64)
        assert a.shape == b.shape, f"{name}: {a.shape} and {b.shape}"
        norm = float(np.linalg.norm(b))
        worst = max(worst, (float(np.linalg.norm(a - b)) / norm if norm else float(np.linalg.norm(a)), name))
    return worst


def main() -> list[dict[str, Any]]:
    """Train both data sets twice, compare, and write the results."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-quality-"))
    cases: list[dict[str, Any]] = []
    try:
        for name, (fixed, elastic) in jobs_of(folder).items():
            place = folder / name.replace(" ", "-")
            train_fixed(place / "fixed-marks", fixed)
            happened = train_elastic(place / "elastic-marks", elastic)
            auc = {job.run.name: evaluate_run(job, paths=job.data.test)["auc"] for job in (fixed, elastic)}
            worst, whose = difference(final_state(elastic, place), final_state(fixed, place))
            print(f"{name}: {auc}, {worst:.2e} in {whose}; {happened}", flush=True)
            delta = abs(auc["elastic"] - auc["fixed"])
            cases += [
                harness.case(
                    f"{name}: AUC difference", "AUC", [delta], None, None, AUC_MAX, higher_is_better=False, auc=auc,
                    **happened,
                ),
                harness.case(
                    f"{name}: weights and optimizer state", "relative", [worst], None, None, RELATIVE_MAX,
                    higher_is_better=False, largest_in=whose,
                ),
            ]  # fmt: skip
        return harness.write("elastic_quality", cases, EXPECTATION)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
