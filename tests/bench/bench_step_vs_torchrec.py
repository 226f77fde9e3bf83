"""A whole DLRM training step beside TorchRec's, 1, 2 and 4 workers of one thread on one machine, over Gloo there.

Both sides run alternately in the same processes. Four workers on fewer cores are oversubscribed, and labelled so.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
import torch.distributed as dist

EXPECTATION = (
    "TorchRec moves 26 x 2,048 pooled vectors of 128 bytes per worker each way (6.8 MB) through Gloo and sums "
    "gradients per occurrence; at Zipf 1.2 an id occurs 3.2 times in a batch, so de-duplicated rows are a third of the "
    "bytes and of the updates, in a constant number of exchanges through shared memory. TorchRec's interaction (bmm "
    "and index) is most of its dense time; the native one is a few milliseconds. Bound of (b): the dense layers alone."
)

WORLDS = (1, 2, 4)
ROUNDS = {1: 20, 2: 20, 4: 12}
NUM_BATCHES = 16

#: Targets per world size: (a) ours / TorchRec's of what is not dense, at most; (b) and (c) speed-ups, at least.
SHARE_MAX = {1: 1 / 2, 2: 1 / 3, 4: 1 / 3}
SHIPPED_MIN = {1: 2.0, 2: 2.3, 4: 2.3}
NATIVE_MIN = {1: 1.3, 2: 1.6, 4: 1.6}


def run_rank(rank: int, world_size: int, torch_port: int, result_path: str) -> None:
    """One process: TorchRec's default group, our own groups beside it, every side once per round."""
    import step_torchrec
    from step_shoal import SameDense, ShippedDense, ShoalRank

    from shoal.jobs import workloads

    own_store, port = step_torchrec.join(rank, world_size, torch_port)
    workload = workloads.dlrm_step()
    batches = [step_torchrec.Raw(workload, 1000 * rank + index) for index in range(NUM_BATCHES)]
    plain, pipelined = (step_torchrec.TorchRecModel(workload, world_size) for _ in range(2))
    steps = {"plain": plain.plain_step(batches), "pipelined": pipelined.pipelined_step(batches)}

    def with_interaction(
        model: step_torchrec.TorchRecModel, step: Callable[[], Any], native: bool
    ) -> Callable[[], Any]:
        def run() -> None:
            model.use_native_interaction(native)
            step()

        return run

    ours = {
        "same_dense": ShoalRank(SameDense, workload, rank, world_size, port, 0),
        "shipped": ShoalRank(ShippedDense, workload, rank, world_size, port, 1),
    }
    sides = {
        "torchrec plain": with_interaction(plain, steps["plain"], False),
        "torchrec pipelined": with_interaction(pipelined, steps["pipelined"], False),
        "torchrec plain native": with_interaction(plain, steps["plain"], True),
        "torchrec pipelined native": with_interaction(pipelined, steps["pipelined"], True),
        "dense": step_torchrec.dense_step(workload, batches, False),
        "ours same_dense": ours["same_dense"].step_over(batches),
        "ours shipped": ours["shipped"].step_over(batches),
    }
    # Rows are created at their first step: all batches once before timing, so that timed steps create none.
    for name in ("ours same_dense", "ours shipped"):
        for _ in range(NUM_BATCHES):
            sides[name]()
    together = {name: _in_step(step) for name, step in sides.items()}
    times = harness.alternate(together, ROUNDS[world_size], warmup=3, before=dist.barrier)
    if rank == 0:
        phases = {name: _medians_ms(side.phases[-ROUNDS[world_size] :]) for name, side in ours.items()}
        record = {"times": times, "phases": phases, "workload": workload.describe()}
        Path(result_path).write_text(json.dumps(record), encoding="utf-8")
    dist.barrier()
    for side in ours.values():
        side.close()
    dist.destroy_process_group()
    del own_store


def _in_step(step: Callable[[], Any]) -> Callable[[], float]:
    """The step's seconds until the slowest rank is done."""

    def run() -> float:
        start = time.perf_counter()
        step()
        dist.barrier()
        return time.perf_counter() - start

    return run


def _medians_ms(phases: list[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(1e3 * statistics.median(p.get(name, 0.0) for p in phases), 2) for name in phases[0]}


def measure(world_size: int) -> dict[str, Any]:
    """Seconds per side and round, and our phases, of a world of ``world_size`` processes."""
    return harness.record_of_ranks(run_rank, world_size, world_size)


def cases_of(world_size: int, record: dict[str, Any]) -> list[dict[str, Any]]:
    """The three comparisons at one world size; TorchRec's side is the faster of plain and pipelined, by median."""
    times = record["times"]
    kinds = {}
    for native in ("", " native"):
        names = [f"torchrec {kind}{native}" for kind in ("plain", "pipelined")]
        kinds[native] = min(names, key=lambda name: statistics.median(times[name]))
    is_oversubscribed = world_size > (os.cpu_count() or 1)
    label = f"W={world_size}" + (" oversubscribed" if is_oversubscribed else "")
    notes = {"phases_ms": record["phases"], "workload": record["workload"], "is_oversubscribed": is_oversubscribed}
    notes["medians_ms"] = {name: round(1e3 * statistics.median(seconds), 2) for name, seconds in times.items()}
    stock, native = kinds[""], kinds[" native"]
    # What is not dense is a difference, in which noise of single rounds would divide by nearly nothing: medians, then.
    dense = statistics.median(times["dense"])
    ours_rest = [seconds - dense for seconds in times["ours same_dense"]]
    their_rest = [seconds - dense for seconds in times[stock]]
    share = [mine / theirs for mine, theirs in zip(ours_rest, their_rest)]
    rest = harness.case(
        f"{label} (a) step minus dense, ours / TorchRec's",
        "share",
        share,
        None,
        stock,
        SHARE_MAX[world_size],
        higher_is_better=False,
        ours_ms=1e3 * statistics.median(ours_rest),
        baseline_ms=1e3 * statistics.median(their_rest),
        **notes,
    )
    shipped, same = times["ours shipped"], {"value_scale": 1e3}
    return [
        rest,
        harness.case(f"{label} (b) shipped DLRM", "ms", shipped, times[stock], stock, SHIPPED_MIN[world_size], **same),
        harness.case(
            f"{label} (c) native interaction both", "ms", shipped, times[native], native, NATIVE_MIN[world_size], **same
        ),
    ]


def main(worlds: tuple[int, ...] = WORLDS) -> list[dict[str, Any]]:
    """Measure every world size and write the results."""
    cases: list[dict[str, Any]] = []
    for world_size in worlds:
        cases.extend(cases_of(world_size, measure(world_size)))
    return harness.write("step_vs_torchrec", cases, EXPECTATION)


if __name__ == "__main__":
    main(tuple(int(argument) for argument in sys.argv[1:]) or WORLDS)
