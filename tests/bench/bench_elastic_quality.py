"""What elasticity does to the model: 1->3->2->4 workers and two kills, against the same job at fixed sizes.

MovieLens-100K and the click generator, the quickstart's jobs to their end. All runs train the same batches; all that
may differ is the order in which gradients of ranks are summed. The baseline is what that alone does: runs of other
fixed sizes against the one of 2 workers. Workers are processes under the production controller.
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
    "240 steps grow to 1e-6 - 1e-5 of a tensor's norm. In a model with ReLUs that now and then moves the input of one "
    "across zero for a sample, and the first moment of its layer by that sample's part, 1e-4 - 1e-2 of its norm, also "
    "between fixed sizes; so tensors are held to 1e-4 with softplus in its place. The AUC moves in the sixth digit."
)
AUC_MAX = 1e-3
RELATIVE_MAX = 1e-4
#: The run that others are compared with.
FIXED_WORKERS = 2
OTHER_FIXED_WORKERS = (1, 3, 4)
#: Time for a process to start within few steps, and between changes.
SLOW_S, FAST_S = 0.7, 0.01


def jobs_of(folder: Path) -> dict[str, Any]:
    """Data set -> its job with one worker; runs differ in workers and names."""
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
        found[name] = base
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
            found[f"{exported.table}.{column}"] = flat.to_numpy(zero_copy_only=False).reshape(len(table), -1)
    for path in sorted(Path(info.uri).rglob("*.safetensors")):
        # Metric bins count predictions: one that moves by 1e-7 may fall into the next bin.
        tensors = {name: values for name, values in load_file(path).items() if not name.startswith("metrics")}
        found |= {f"dense.{name}": values for name, values in tensors.items()}
    return found


@dataclasses.dataclass(frozen=True)
class Differences:
    """How far two final states are apart, and where the most."""

    #: ||a - b|| / ||b|| of a tensor.
    tensor: tuple[float, str] = (0.0, "")
    #: ||a_r - b_r|| of a row over the root mean square of the norms of its tensor's rows: one wrong row of a large
    #: table cannot hide in it.
    row: tuple[float, str] = (0.0, "")


def difference(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> Differences:
    """The largest relative difference of a tensor and of a row, and whose they are."""
    assert mine.keys() == theirs.keys(), sorted(mine.keys() ^ theirs.keys())
    found = Differences()
    for name, values in theirs.items():
        assert mine[name].shape == values.shape, f"{name}: {mine[name].shape} and {values.shape}"
        b = values.astype(np.float64).reshape(values.shape[0] if values.ndim else 1, -1)
        rows = np.linalg.norm(mine[name].astype(np.float64).reshape(b.shape) - b, axis=1)
        norm = float(np.linalg.norm(b)) or 1.0
        found = Differences(
            tensor=max(found.tensor, (float(np.linalg.norm(rows)) / norm, name)),
            row=max(found.row, (float(rows.max(initial=0.0)) * len(b) ** 0.5 / norm, name)),
        )
    return found


def compare(name: str, base: Any, place: Path, *, is_smooth: bool) -> list[dict[str, Any]]:
    """Train a data set at every fixed size and elastically, and compare."""
    aucs: dict[str, float] = {}
    states: dict[str, dict[str, np.ndarray]] = {}

    def finished(job: Any) -> None:
        aucs[job.run.name] = evaluate_run(job, paths=job.data.test)["auc"]
        states[job.run.name] = final_state(job, place)

    sizes = (FIXED_WORKERS, *OTHER_FIXED_WORKERS)
    reference, *others = [f"fixed-{workers}" for workers in sizes]
    for fixed, workers in zip((reference, *others), sizes):
        job = _as(base, fixed, workers)
        train_fixed(place / f"marks-{fixed}", job)
        finished(job)
    elastic = _as(base, "elastic", 1)
    happened = train_elastic(place / "marks-elastic", elastic)
    finished(elastic)
    apart = difference(states["elastic"], states[reference])
    spread = [difference(states[fixed], states[reference]) for fixed in others]
    aucs_apart = [abs(aucs[fixed] - aucs[reference]) for fixed in others]
    print(f"{name}: {aucs}, {apart}; between fixed sizes {spread}; {happened}", flush=True)
    cases = [
        harness.case(
            f"{name}: AUC difference", "AUC", [abs(aucs["elastic"] - aucs[reference])], None, None, AUC_MAX,
            higher_is_better=False, between_fixed_sizes=aucs_apart, auc=aucs, **happened,
        )
    ]  # fmt: skip
    for what, of in (("weights and optimizer state", lambda d: d.tensor), ("the same, row by row", lambda d: d.row)):
        value, whose = of(apart)
        cases.append(
            harness.case(
                f"{name}: {what}", "relative", [value], None, None, RELATIVE_MAX if is_smooth else None,
                higher_is_better=False, largest_in=whose, between_fixed_sizes=[of(d)[0] for d in spread],
            )
        )  # fmt: skip
    return cases


def main() -> list[dict[str, Any]]:
    """Compare on both data sets, and write the results."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-quality-"))
    cases: list[dict[str, Any]] = []
    try:
        for name, base in jobs_of(folder).items():
            for variant, factory in (("ReLU", base.model.factory), ("softplus", "smooth_dlrm:build")):
                place = folder / name.replace(" ", "-") / variant
                run = dataclasses.replace(base.run, storage_path=str(place / "runs"))
                job = dataclasses.replace(base, model=dataclasses.replace(base.model, factory=factory), run=run)
                cases += compare(f"{name}, {variant}", job, place, is_smooth=variant == "softplus")
        return harness.write("elastic_quality", cases, EXPECTATION)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
