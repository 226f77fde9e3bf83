"""Outage of a planned resize, 1->2->1 and 2->3->2, beside the same model under an elastic TorchTrainer.

One cluster of single-CPU nodes, one of them always free; both sides on it in turn. Ours is told by ``shoal scale`` and
is fed by its Feeder actor; the peer's reservation is changed (see torch_trainer).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
from elastic_cluster import bench_cluster
from elastic_job import OurRun, quickstart_job
from elastic_steps import Outage, resize_outage
from torch_trainer import Peer

EXPECTATION = (
    "A survivor pauses for one closing exchange, the rows changed since the last round, a flip of row blocks and one "
    "exchange in groups formed beforehand: tens of milliseconds, whatever the tables' size. The peer ends all workers, "
    "starts new processes (import torch, form a group) and reads a checkpoint: ten seconds on two cores."
)
SIZES = (2, 1, 2, 3, 2)
#: At the defaults the peer looks at its size once a minute: one growth and one shrinkage are enough.
DEFAULT_SIZES = (2, 1)
TIMES_SHORTER = 10.0
OUTAGE_MAX_S = 1.0
LR, EPS = 0.5, 2e-3


def measure(side: Any, start: int, sizes: tuple[int, ...], timeout_s: float) -> dict[str, Outage]:
    """Resize ``side`` from ``start`` through ``sizes``: "1->2" -> outage, "1->2 again" for a second one."""
    found: dict[str, Outage] = {}
    for size in sizes:
        ordered = side.resize(size, timeout_s)
        outage = resize_outage(side.marks(), ordered, size)
        assert outage is not None, f"no step of {size} workers"
        name = f"{start}->{size}"
        found[f"{name} again" if name in found else name] = outage
        print(f"{type(side).__name__:8s} {name}: {outage.seconds:.3f} s", flush=True)
        start = size
    return found


def measure_peer(folder: Path, address: str, job: Any, intervals: str, sizes: tuple[int, ...]) -> dict[str, Outage]:
    """The peer's outages at its ``intervals``."""
    peer = Peer.start(
        folder / intervals, address, {"data": job.data.to_dict()}, dict(job.model.args), intervals=intervals,
        num_workers=1, max_workers=3, num_cpus=4, lr=LR, eps=EPS,
    )  # fmt: skip
    try:
        return measure(peer, 1, sizes, 180.0)
    finally:
        peer.stop()


def cases_of(ours: dict[str, Outage], peers: dict[str, dict[str, Outage]]) -> list[dict[str, Any]]:
    """Each resize beside the faster of the peer's settings, and the median of ours."""
    cases = []
    for name, outage in ours.items():
        theirs = {i: o[name].seconds for i, o in peers.items() if name in o}
        if not theirs:
            continue
        faster = min(theirs, key=lambda intervals: theirs[intervals])
        cases.append(
            harness.case(
                name, "s", [outage.seconds], [theirs[faster]], f"TorchTrainer {faster}", TIMES_SHORTER,
                peer_s={i: round(s, 2) for i, s in theirs.items()},
                peer_to_new_step_s={i: round(o[name].seconds_to_new, 2) for i, o in peers.items() if name in o},
                peer_redone_steps={i: o[name].redone_steps for i, o in peers.items() if name in o},
                ours_redone_steps=outage.redone_steps,
            )
        )  # fmt: skip
    outages = [outage.seconds for outage in ours.values()]
    theirs = statistics.median(min(o[n].seconds for o in peers.values() if n in o) for n in ours)
    mine = statistics.median(outages)
    cases.append(harness.case("median of all", "s", [mine], [theirs], "TorchTrainer faster", TIMES_SHORTER))
    cases.append(
        harness.case("median outage", "s", outages, None, None, OUTAGE_MAX_S, higher_is_better=False)
    )
    return cases


def main(has_defaults: bool = True) -> list[dict[str, Any]]:
    """Run both sides and write the results."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-resize-"))
    try:
        job = quickstart_job(folder, "resize", num_workers=1)
        # One node more than workers: nobody ever waits for one.
        with bench_cluster(4) as cluster:
            run = OurRun.start(folder / "ours", cluster.address, job, num_workers=1)
            try:
                ours = measure(run, 1, SIZES, 180.0)
            finally:
                run.stop()
            peers = {"minimum": measure_peer(folder, cluster.address, job, "minimum", SIZES)}
            if has_defaults:
                peers["default"] = measure_peer(folder, cluster.address, job, "default", DEFAULT_SIZES)
        return harness.write("resize_outage", cases_of(ours, peers), EXPECTATION)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--skip-defaults", action="store_true", help="leave out the peer at its default intervals")
    main(not parser.parse_args().skip_defaults)
