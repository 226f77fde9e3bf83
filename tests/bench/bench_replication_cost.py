"""What copies on a buddy cost a step: 2 workers on 2 hosts, K = 50, with and without, in turn; uniform and Zipf ids.

Two production runs live at once, as processes; a gate in their feeds lets one train while the other rests. A turn ends
in the middle of a window of K steps, when the changes of its last snapshot have been sent, received and folded: the
buddies' work is in the turn that caused it. Workers, senders and receivers share two cores.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
import numpy as np
import torch
from elastic_processes import ProcessRun, process_run
from elastic_steps import applied
from elastic_workloads import dlrm_job

from shoal.jobs import workloads
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import OptimizerKind, OptimizerSpec, TableSpec

EXPECTATION = (
    "Every K steps each rank sends the rows changed since the last snapshot. Zipf 1.2: about 0.35 M of 5.2 M rows in "
    "50 steps, 50 MB, twice copied (into the message, into the staging) at about 1 GB/s: 0.1 s of CPU in 50 steps of "
    "60 ms on both ranks, 4-8 %. Uniform ids: 3.3 M rows, 480 MB: 1 s or more of CPU per 3 s window, which two busy "
    "cores do not have; there the cost is the bytes. Saved versions: a copy of a row at its first change after a "
    "snapshot."
)
K = 50
#: A turn: whole windows, ended in the middle of one.
STEPS_PER_TURN = 2 * K
#: Of the two distributions; a step with uniform ids takes three times as long.
ROUNDS = {"zipf": 5, "uniform": 3}
COST_MAX = 1.15
BATCH_ROWS = 4096
#: Rows of one epoch cover a window of K steps without repeating.
NUM_BATCHES = 100


@dataclasses.dataclass
class Turn:
    """Times of one stretch of steps, in seconds."""

    mean_s: float
    steps_s: np.ndarray


def take_turn(run: ProcessRun, until: int) -> Turn:
    """Let ``run`` train up to step ``until`` and wait for it."""
    start = run.step()
    run.tempo.limit = until
    run.wait_for(lambda: run.step() >= until, 120.0, f"step {until}")
    time.sleep(0.2)  # whoever lags behind rank 0 comes to rest
    times = {m.step: m.time for m in applied(run.marks()) if m.rank == 0 and m.step >= start}
    steps_s = np.diff([times[step] for step in sorted(times)])
    return Turn(float(steps_s.mean()), steps_s)


def measure(folder: Path, distribution: str, alpha: float) -> list[dict[str, Any]]:
    """Alternate the run with copies and the run without; the cases of one id distribution."""
    workload = dataclasses.replace(workloads.dlrm_step(), alpha=alpha, name=f"dlrm_step_{distribution}")
    kinds = {"off": "checkpoint", "on": "replicated"}
    jobs = {
        side: dlrm_job(
            folder, workload, f"{distribution}-{side}", num_batches=NUM_BATCHES, batch_size=BATCH_ROWS,
            recovery=recovery, protect_every_steps=K,
        )
        for side, recovery in kinds.items()
    }  # fmt: skip
    turns: dict[str, list[Turn]] = {"off": [], "on": []}
    with (
        process_run(folder / f"{distribution}-off", jobs["off"]) as off,
        process_run(folder / f"{distribution}-on", jobs["on"]) as on,
    ):
        runs = {"off": off, "on": on}
        # One epoch makes every row there is; the first window's changes are rows that are new to the buddy.
        until = 2 * K + K // 2
        for run in runs.values():
            run.tempo.limit = 0
        for run in runs.values():
            take_turn(run, until)
        for _ in range(ROUNDS[distribution]):
            until += STEPS_PER_TURN
            for side, run in runs.items():
                turns[side].append(take_turn(run, until))
        statuses = list(on.statuses().values())
        rows = sum(s.rows for s in statuses)
        skipped = until - max(s.protected for s in statuses)
    return cases_of(distribution, turns, {**workload.describe(), "rows": rows, "unprotected_steps_at_end": skipped})


def cases_of(distribution: str, turns: dict[str, list[Turn]], notes: dict[str, Any]) -> list[dict[str, Any]]:
    """Mean, 99th percentile and slowest of K steps, with copies against without."""
    means = {side: [turn.mean_s for turn in made] for side, made in turns.items()}
    slowdown = [on / off for on, off in zip(means["on"], means["off"])]
    steps = {side: np.concatenate([turn.steps_s for turn in made]) for side, made in turns.items()}
    ms = {side: round(1e3 * statistics.median(values), 2) for side, values in means.items()}
    cases = [
        harness.case(
            f"{distribution}: mean step", "ratio", slowdown, None, "without copies", COST_MAX, higher_is_better=False,
            mean_ms=ms, **notes,
        )
    ]  # fmt: skip
    for name, of in (("99th percentile", lambda s: np.percentile(s, 99)), ("slowest of K", _slowest_of_k)):
        found = {side: float(of(values)) for side, values in steps.items()}
        cases.append(
            harness.case(
                f"{distribution}: {name}", "ratio", [found["on"] / found["off"]], None, "without copies", None,
                ms={side: round(1e3 * value, 2) for side, value in found.items()},
            )
        )  # fmt: skip
    return cases


def _slowest_of_k(steps_s: np.ndarray) -> float:
    """Median over windows of the slowest of K steps."""
    windows = steps_s[: len(steps_s) // K * K].reshape(-1, K)
    return float(np.median(windows.max(axis=1)))


def version_case() -> dict[str, Any]:
    """Bytes the store keeps per row changed since a snapshot, beside the row itself; rows of the workload's tables."""
    dim, num_rows = workloads.dlrm_step().embedding_dim, 200_000
    table = TableSpec(
        name="t", num_embeddings=0, embedding_dim=dim, num_blocks=8,
        optimizer=OptimizerSpec(kind=OptimizerKind.ROWWISE_ADAGRAD),
    )  # fmt: skip
    store = RowStore([table], undo_steps=0)
    store.add_all_blocks()
    ids, gradient = torch.arange(num_rows), torch.ones(num_rows, dim)
    store.apply(0, ids, gradient, step=1, lr=0.1)
    with store.cut():
        store.apply(0, ids, gradient, step=2, lr=0.1)
        versions = store.version_bytes() / num_rows
    row = store.nbytes()["rows"] / num_rows
    return harness.case("versions per changed row", "bytes", [versions], None, None, None, row_bytes=round(row, 1))


def main() -> list[dict[str, Any]]:
    """Measure both distributions and write the results."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-replication-"))
    try:
        cases = measure(folder, "zipf", 1.2) + measure(folder, "uniform", 0.0)
        cases.append(version_case())
        return harness.write("replication_cost", cases, EXPECTATION)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
