"""Outage after losses: from the last step applied before to the first new one after, and what it is made of.

On one cluster of single-CPU nodes: our runs lose a process and a whole node, with ``on_loss`` shrink and replace, then
a process and a node stop without a word; on another, of network namespaces, a node's link goes down (skipped, saying
so, where that needs rights we lack). The elastic TorchTrainer at its shortest intervals loses a worker, a node while
another is free, and a node when none is (its reservation is then stale, as found). The feed is the real one.

About 10 minutes; with ``--ours`` only our side, and no results are written.
"""

from __future__ import annotations

import dataclasses
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
from elastic_cluster import BenchCluster, bench_cluster, signal_node, signal_process
from elastic_job import OurRun, quickstart_job
from elastic_steps import Kind, Outage, loss_outage, wait_until
from host_cluster import can_make_hosts, host_cluster
from torch_trainer import Peer

EXPECTATION = (
    "A process's death breaks its peers' exchange in tens of milliseconds (shared memory looks for the owner's pid, "
    "Gloo's connection closes); the controller polls 5 times a second; survivors roll back at most K = 50 steps, "
    "promote copies in place and form groups in tens of milliseconds. Shrinking: below a second beside up to 50 redone "
    "steps of 10 ms. Replacing adds a new process: 3-5 s of imports on a busy core. Without a word the exchange's "
    "deadline of 10 s comes first. The peer starts all processes again from a checkpoint."
)
SHRINK_MAX_S = 3.0
REPLACE_MAX_S = 8.0
#: Beyond the deadline of an exchange.
SILENT_MARGIN_S = 8.0
LR, EPS = 0.5, 2e-3
WAIT_S = 120.0


@dataclasses.dataclass
class Found:
    """A loss and what came of it."""

    outage: Outage
    parts_s: dict[str, float]
    notes: dict[str, Any]


def lose(run: OurRun, strike: Callable[[int], float], spare: Callable[[int], bool] = lambda pid: False) -> Found:
    """Strike the process of the highest rank that ``spare`` does not except; returns when a new step has been made."""
    settle(run)
    pid = next(pid for _, pid in sorted(run.pids().items(), reverse=True) if not spare(pid))
    struck = strike(pid)

    def recovered() -> Outage | None:
        return loss_outage(run.marks(), struck)

    try:
        outage = wait_until(recovered, WAIT_S, f"recovery of {run.name}", 0.1)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; {run.log()}") from None
    event = run.wait_event("recovered", struck, 30.0)
    return Found(outage, parts_of(run, outage, struck, event), _shown(event))


def settle(run: OurRun) -> None:
    """Wait until a snapshot is protected in the present view: 3 windows of steps."""
    step = max(m.step for m in run.marks())
    run.wait(lambda m: m.step >= step + 150, 60.0, "150 more steps")


def parts_of(run: OurRun, outage: Outage, struck: float, event: dict[str, Any]) -> dict[str, float]:
    """Detect, decide, form, restore, feed, redo; ``other`` is what none of them covers."""
    failure = next((e for e in run.events(struck) if e["kind"] == "failure"), None)
    marks = [m for m in run.marks() if m.time > struck and m.pid == outage.first.pid]
    asked = next((m for m in marks if m.kind == Kind.ASK and m.step == outage.first.step), None)
    got = next((m for m in marks if m.kind == Kind.GOT and m.step == outage.first.step), None)
    parts = {
        "detect": (failure["time"] if failure else event["time"]) - struck,
        "decide": float(event.get("decided_after_s", 0.0)),
        "form": float(event.get("form_s", 0.0)) + float(event.get("meet_s", 0.0)),
        "restore": sum(float(event.get(f"{part}_s", 0.0)) for part in ("roll_back", "copy", "build", "restore")),
        "feed": got.time - asked.time if asked and got else 0.0,
        "redo": outage.redo_s,
    }
    parts["other"] = outage.seconds_to_new - sum(parts.values())
    return {name: round(seconds, 3) for name, seconds in parts.items()}


def _shown(event: dict[str, Any]) -> dict[str, Any]:
    return {k: event[k] for k in ("cause", "workers", "attempts", "rows_lost") if k in event}


def our_losses(folder: Path, cluster: BenchCluster) -> dict[str, tuple[Found, float]]:
    """Name -> what was found and the longest outage allowed."""
    found: dict[str, tuple[Found, float]] = {}

    def note(name: str, one: Found, limit_s: float) -> None:
        found[name] = (one, limit_s)
        print(f"ours {name}: {one.outage.seconds_to_new:.2f} s {one.parts_s}", flush=True)

    def kill_process(pid: int) -> float:
        return signal_process(pid, signal.SIGKILL)

    def kill_node(pid: int) -> float:
        node = cluster.node_of(pid)
        killed = cluster.kill_node(node)
        cluster.forget_node(node)
        return killed

    def keeps_controller(pid: int) -> bool:
        """The loss of a controller is another case."""
        return cluster.has_controller(cluster.node_of(pid))

    # As many workers as cores: steps that are done again take as long as they should.
    job = quickstart_job(folder, "shrink", num_workers=(1, 2), failure={"on_loss": "shrink", "recovery": "replicated"})
    run = OurRun.start(folder / "shrink", cluster.address, job, num_workers=2)
    try:
        note("process killed, shrink", lose(run, kill_process), SHRINK_MAX_S)
        # It grows again by itself, for there is room.
        grown_after = time.time()
        run.wait(lambda m: m.time > grown_after and m.world_size == 2, WAIT_S, "2 workers again")
        note("node killed, shrink", lose(run, kill_node, keeps_controller), SHRINK_MAX_S)
    finally:
        run.stop()
    cluster.add_node()
    job = quickstart_job(folder, "replace", num_workers=2, failure={"on_loss": "replace", "recovery": "replicated"})
    silent_s = job.run.timeouts.op_timeout_s + SILENT_MARGIN_S
    run = OurRun.start(folder / "replace", cluster.address, job, num_workers=2)
    frozen: list[Any] = []

    def stop_node(pid: int) -> float:
        frozen.append(cluster.node_of(pid))
        return signal_node(frozen[-1], signal.SIGSTOP)

    try:
        note("process killed, replace", lose(run, kill_process), REPLACE_MAX_S)
        note("node killed, replace", lose(run, kill_node, keeps_controller), REPLACE_MAX_S)
        note("process stopped (SIGSTOP), replace", lose(run, lambda p: signal_process(p, signal.SIGSTOP)), silent_s)
    finally:
        run.stop()
    while len(cluster.nodes) < 3:
        cluster.add_node()
    run = start_shrinking(folder, cluster.address, "silent")
    try:
        note("node stopped (SIGSTOP), shrink", lose(run, stop_node, keeps_controller), silent_s)
    finally:
        run.stop()
        for node in frozen:
            cluster.kill_node(node)
            cluster.forget_node(node)
    return found


def start_shrinking(folder: Path, address: str, name: str) -> OurRun:
    """A run of two workers that goes on with one, and asks for no other meanwhile."""
    failure = {"on_loss": "shrink", "recovery": "replicated"}
    job = quickstart_job(folder, name, num_workers=(1, 2), failure=failure)
    scaling = dataclasses.replace(job.scaling, elastic_resize_monitor_interval_s=600.0)
    job = dataclasses.replace(job, scaling=scaling)
    return OurRun.start(folder / name, address, job, num_workers=2)


def link_losses(folder: Path) -> dict[str, tuple[Found, float]]:
    """A node whose link goes down: nothing is refused, nothing arrives."""
    if not can_make_hosts():
        print("link down: skipped, for it needs root and the ip command", flush=True)
        return {}
    with host_cluster(2) as cluster:
        run = start_shrinking(folder, cluster.address, "link")
        try:
            one = lose(run, lambda pid: cluster.cut(cluster.host_of(pid)))
        finally:
            run.stop()
    print(f"ours link down, shrink: {one.outage.seconds_to_new:.2f} s {one.parts_s}", flush=True)
    return {"link down, shrink": (one, run.job.run.timeouts.op_timeout_s + SILENT_MARGIN_S)}


def peer_losses(folder: Path, cluster: BenchCluster) -> dict[str, Outage]:
    """TorchTrainer on 3 nodes with 2 workers."""
    import ray

    while len(cluster.nodes) < 3:
        cluster.add_node()
    job = quickstart_job(folder, "peer", num_workers=1)
    peer = Peer.start(
        folder / "peer", cluster.address, {"data": job.data.to_dict()}, dict(job.model.args), intervals="minimum",
        num_workers=2, max_workers=len(cluster.nodes), num_cpus=len(cluster.nodes), lr=LR, eps=EPS,
    )  # fmt: skip

    def strike(name: str, how: Callable[[int], float]) -> Outage:
        start = max(m.step for m in peer.marks())
        peer.wait(lambda m: m.step >= start + 150, 60.0, "150 steps")
        struck = how(peer.newest_pids()[1])
        outage = wait_until(lambda: loss_outage(peer.marks(), struck), 180.0, f"TorchTrainer: {name}", 0.2)
        print(f"peer {name}: {outage.seconds_to_new:.2f} s", flush=True)
        return outage

    def kill_node(pid: int) -> float:
        node = cluster.node_of(pid)
        killed = cluster.kill_node(node)
        cluster.forget_node(node)
        return killed

    try:
        found = {"process killed": strike("process killed", lambda pid: signal_process(pid, signal.SIGKILL))}
        found["node killed, another is free"] = strike("node killed, another is free", kill_node)
        # All nodes that are left are to be the trainer's: as soon as Ray knows which those are.
        wait_until(lambda: sum(n["Alive"] for n in ray.nodes()) <= 1 + len(cluster.nodes), 60.0, "news of the node")
        peer.rival.refresh()
        peer.rival.take(0)
        found["node killed, none is free"] = strike("node killed, none is free (as found)", kill_node)
        return found
    finally:
        peer.stop()


def cases_of(ours: dict[str, tuple[Found, float]], peers: dict[str, Outage]) -> list[dict[str, Any]]:
    """Ours against the limits, with the peer's restart beside it."""
    beside = {
        "process killed": "process killed",
        "node killed, shrink": "node killed, none is free",
        "node killed, replace": "node killed, another is free",
    }
    cases = []
    for name, (found, limit_s) in ours.items():
        key = next((theirs for prefix, theirs in beside.items() if name.startswith(prefix)), None)
        theirs = peers.get(key) if key else None
        cases.append(
            harness.case(
                name, "s", [found.outage.seconds_to_new], None, None, limit_s, higher_is_better=False,
                parts_s=found.parts_s, redone_steps=found.outage.redone_steps,
                torch_trainer_s=None if theirs is None else round(theirs.seconds_to_new, 2), **found.notes,
            )
        )  # fmt: skip
    for name, outage in peers.items():
        cases.append(
            harness.case(
                f"TorchTrainer: {name}", "s", [outage.seconds_to_new], None, None, None,
                redo_s=round(outage.redo_s, 2), redone_steps=outage.redone_steps,
            )
        )  # fmt: skip
    return cases


def main() -> list[dict[str, Any]]:
    """Run both sides and write the results."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-kill-"))
    try:
        with bench_cluster(4) as cluster:
            ours = our_losses(folder, cluster)
            peers = {} if "--ours" in sys.argv else peer_losses(folder, cluster)
        ours |= link_losses(folder)
        if not peers:
            return cases_of(ours, peers)
        return harness.write("kill_outage", cases_of(ours, peers), EXPECTATION)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
