"""Where the milliseconds of a step go: median and 90th percentile of each phase, two workers of one thread each."""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
import torch

EXPECTATION = (
    "26 tables x 200 k x 32, batch 2,048 per worker, bounded Zipf 1.2, row-wise Adagrad, shipped DLRM, shared memory. "
    "The targets are 1.5x the phases of a throw-away prototype of this design on the same kind of machine."
)
WORLD = 2
STEPS, WARMUP, NUM_BATCHES = 60, 20, 16

#: Our phase -> the prototype's milliseconds for the same work. merge + update is one kernel here ("apply").
PROTOTYPE_MS = {
    "route": 1.3,
    "gather": 0.9,
    "F": 1.9,
    "pool": 1.1,
    "segment_sum": 1.3,
    "B": 3.1,
    "apply": 1.9,
    "optimizer": 1.2,
    "rest": 1.0,
}


def run_rank(rank: int, port: int, result_path: str) -> None:
    """One worker: many steps over batches in turn; rank 0 writes every step's phases."""
    import step_torchrec
    from step_shoal import ShippedDense, ShoalRank

    from shoal.jobs import workloads

    torch.set_num_threads(1)
    workload = workloads.dlrm_step()
    batches = [step_torchrec.Raw(workload, 1000 * rank + index) for index in range(NUM_BATCHES)]
    side = ShoalRank(ShippedDense, workload, rank, WORLD, port, 0)
    step = side.step_over(batches)
    for _ in range(WARMUP + STEPS):
        step()
    if rank == 0:
        record = {"phases": side.phases[WARMUP:], "workload": workload.describe()}
        Path(result_path).write_text(json.dumps(record), encoding="utf-8")
    side.close()


def main() -> list[dict[str, Any]]:
    """Measure and write the results."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    record = harness.record_of_ranks(run_rank, WORLD)
    phases = record["phases"]
    cases = []
    for name in (*PROTOTYPE_MS, "dense"):
        times = [1e3 * phase.get(name, 0.0) for phase in phases]
        prototype = PROTOTYPE_MS.get(name)
        target = None if prototype is None else 1.0 if name == "rest" else 1.5 * prototype
        p90 = statistics.quantiles(times, n=10)[8]
        cases.append(harness.case(name, "ms", times, None, None, target, higher_is_better=False, p90=p90))
    total = [1e3 * sum(phase.values()) for phase in phases]
    cases.append(harness.case("step", "ms", total, None, None, None, workload=record["workload"]))
    return harness.write("step_breakdown", cases, EXPECTATION)


if __name__ == "__main__":
    main()
