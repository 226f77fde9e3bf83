"""A live run on two Ray nodes: it grows, shrinks, and loses workers, its controller, its feeder, its driver, a node."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "multiproc"))
sys.path.insert(0, str(Path(__file__).parent))

import live_run
import parity
from live_run import LiveRun, left_behind

import shoal
from shoal.platform.chaos_checks import check_events, check_lineage
from shoal.platform.storage import Storage
from shoal.platform.telemetry import read_events

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

REPLACE = {"recovery": "replicated", "on_loss": "replace", "protect_every_steps": 10}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with live_run.nodes((2, 2)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity.write_data(tmp_path_factory.mktemp("data") / "train")


def start(data: Path, folder: Path, name: str, **changes: Any) -> LiveRun:
    run = LiveRun(live_run.job(data, folder, name, **changes))
    run.trains_with(run.trainer.config.scaling.max_workers, beyond=20, timeout_s=120)
    return run


def end(run: LiveRun) -> None:
    result = run.stop()
    assert result.is_stopped and result.checkpoint is not None
    assert left_behind(run.name) == []
    assert [*check_events(list(read_events(Storage(result.path)))), *check_lineage(result.path)] == []


def kill(run: LiveRun, actor: Any) -> None:
    os.kill(run.pid_of(actor), signal.SIGKILL)


def with_failure(**fields: Any) -> dict[str, Any]:
    return {"failure": {**REPLACE, **fields}}


#: A run that has become smaller does not grow again.
STAYS = {"elastic_resize_monitor_interval_s": 600}


def with_short_deadlines() -> dict[str, Any]:
    """Two seconds until an exchange fails, two more until who cannot be ended is given up."""
    return {"failure": {**REPLACE, "on_loss": "shrink", "lease_s": 2.0}, "timeouts": {"op_timeout_s": 2.0}}


def test_scale_grows_and_shrinks_without_restarting_anybody(cluster, data, tmp_path):
    run = start(data, tmp_path, "grow")
    first = {worker: run.pid_of(actor) for worker, actor in run.workers().items()}
    assert "3 wanted" in shoal.scale("grow", 3)
    grown = run.trains_with(3, beyond=run.record.step, timeout_s=120)
    now = {worker: run.pid_of(actor) for worker, actor in run.workers().items()}
    assert first.items() < now.items(), "survivors are the same processes"
    shoal.scale("grow", 1)
    run.trains_with(1, beyond=grown.step)
    run.until(lambda: len(run.workers()) == 1, "leavers end")
    end(run)


def test_killed_worker_is_replaced_from_its_copy(cluster, data, tmp_path):
    run = start(data, tmp_path, "killed", run=with_failure())
    step = run.until(lambda: (r := run.record).protected_step and r.protected_step > 0 and r.step, "protected")
    victim = sorted(run.workers())[1]
    kill(run, run.workers()[victim])
    run.until(lambda: run.events("failure"), "the loss is told")
    record = run.trains_with(2, beyond=step + 40, timeout_s=120)
    assert record.epoch > 0 and victim not in run.workers()
    end(run)


def is_running(pid: int) -> bool:
    try:
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_run_goes_on_without_workers_that_were_killed_or_stopped(cluster, data, tmp_path):
    """F1, F2: peers of a stopped process (SIGSTOP) hear nothing; the deadline of an exchange tells. It is ended before
    its work is given away, or given up after its lease; SIGCONT wakes nobody who does harm."""
    run = start(data, tmp_path, "shrink", scaling={"num_workers": [1, 3], **STAYS}, run=with_short_deadlines())
    _, killed, stopped = sorted(run.workers())
    pid = run.pid_of(run.workers()[stopped])
    kill(run, run.workers()[killed])
    step = run.trains_with(2, beyond=run.record.step).step
    os.kill(pid, signal.SIGSTOP)
    run.until(lambda: len(run.events("recovered")) == 2, "it goes on")
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    run.until(lambda: not is_running(pid), "it ends")
    run.trains_with(1, beyond=step)
    assert [event["lost"] for event in run.events("recovered")] == [[killed], [stopped]], run.told()
    end(run)


def controller_pid(name: str) -> int:
    import ray

    from shoal.actors.runtime import actor_name, find_actor

    return ray.get(find_actor(actor_name(name, "controller")).pid.remote(), timeout=30)


def test_killed_controller_comes_back_and_adopts_its_workers(cluster, data, tmp_path):
    """F8. The second time a worker dies at the same instant: who comes back finds a view that is not whole."""
    run = start(data, tmp_path, "adopt", scaling={"num_workers": [1, 2], **STAYS})
    workers = set(run.workers())
    step, pid = run.record.step, controller_pid("adopt")
    os.kill(pid, signal.SIGKILL)
    run.until(lambda: run.events("controller_restarted"), "it is back", 120)
    run.trains_with(2, beyond=step + 40, timeout_s=120)
    assert set(run.workers()) == workers
    victim = sorted(workers)[0]
    step, pid, worker_pid = run.record.step, controller_pid("adopt"), run.pid_of(run.workers()[victim])
    os.kill(pid, signal.SIGKILL)
    os.kill(worker_pid, signal.SIGKILL)
    run.until(lambda: len(run.events("controller_restarted")) == 2, "it is back again", 120)
    run.trains_with(1, beyond=step + 20, timeout_s=120)
    assert set(run.workers()) == workers - {victim}
    end(run)


def test_killed_feeder_comes_back(cluster, data, tmp_path):
    import ray

    from shoal.actors.runtime import actor_name, find_actor

    run = start(data, tmp_path, "fed")
    pid = ray.get(find_actor(actor_name("fed", "feeder")).pid.remote(), timeout=30)
    step = run.record.step
    os.kill(pid, signal.SIGKILL)
    run.trains_with(2, beyond=step + 60, timeout_s=120)
    assert not run.events("failure")
    end(run)


DRIVER = """
import os, sys, ray
sys.path[:0] = {paths!r}
import live_run
ray.init(address={address!r}, namespace="shoal", log_to_driver=False)
from pathlib import Path
import shoal
shoal.ElasticTrainer(**live_run.job(Path({data!r}), Path({folder!r}), "orphan")).fit()
"""


def test_run_survives_its_driver_and_is_attached_to(cluster, data, tmp_path):
    from shoal.actors.runtime import list_actors
    from shoal.jobs.live import attach

    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "multiproc")]
    code = DRIVER.format(paths=paths, address=cluster.address, data=str(data), folder=str(tmp_path))
    driver = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert driver.stderr is not None
    for line in driver.stderr:
        if line.startswith("step=60/"):
            break
    driver.kill()
    driver.wait(30)
    steps: list[int] = []

    def watch(item: Any) -> None:
        if hasattr(item, "samples_per_s"):
            steps.append(item.step)
        if len(steps) >= 5 and steps[-1] >= 120:
            stop_once()

    asked: list[bool] = []

    def stop_once() -> None:
        from shoal.platform.run_actor import RayController, find_controller

        if not asked:
            asked.append(True)
            RayController(find_controller("orphan")).stop("the test has seen enough")

    result = attach("orphan", on_record=watch)
    assert result.is_stopped and result.steps >= 120 and steps[0] <= 60
    assert list_actors("orphan") == []


def test_drained_worker_is_moved_away_before_its_node_goes(cluster, data, tmp_path):
    """SIGTERM of a worker's process is a notice: its rows leave before it does."""
    run = start(data, tmp_path, "drain", run=with_failure())
    victim = sorted(run.workers())[1]
    os.kill(run.pid_of(run.workers()[victim]), signal.SIGTERM)
    run.until(lambda: run.events("drain"), "the notice is heard")
    run.until(lambda: len(run.events("view")) > 1, "a view without it", 120)
    assert not run.events("failure"), run.told()
    run.until(lambda: victim not in run.workers(), "it ends")
    end(run)


def protected(run: LiveRun) -> int:
    return run.until(lambda: (r := run.record).protected_step and r.protected_step > 0 and r.step, "protected")


def with_nodes(cluster: Any, number: int) -> None:
    """Add nodes until so many live beside the head, once Ray has noticed which are lost: until then it may put a worker
    of the next run on one of them, and that run would begin with fewer."""
    import ray

    def alive() -> set[str]:
        draining = ray._private.state.state.get_draining_nodes()
        return {node["NodeID"] for node in ray.nodes() if node["Alive"]} - set(draining)

    known = {node.node_id for node in [cluster.head_node, *cluster.parts]}
    deadline = time.monotonic() + 60.0
    while alive() - known:
        assert time.monotonic() < deadline, ray.nodes()
        time.sleep(0.1)
    cluster.parts[:] = [node for node in cluster.parts if node.node_id in alive()]
    while len(cluster.parts) < number:
        cluster.parts.append(cluster.add_node(num_cpus=2, **live_run.NODE))


def node_with(cluster: Any, run: LiveRun, num_workers: int) -> tuple[Any, set[str]]:
    """A node with so many of the run's workers, and their ids."""
    import ray

    polls = {worker: actor.poll.remote() for worker, actor in run.workers().items()}
    hosts = {worker: ray.get(poll, timeout=30).status.host for worker, poll in polls.items()}
    node = next(n for n in cluster.parts if list(hosts.values()).count(n.node_id) == num_workers)
    return node, {worker for worker, host in hosts.items() if host == node.node_id}


def lose_node(cluster: Any, run: LiveRun, num_workers: int) -> set[str]:
    """Kill a node with so many of the run's workers; their ids."""
    node, workers = node_with(cluster, run, num_workers)
    cluster.parts.remove(node)
    cluster.remove_node(node, allow_graceful=False)
    return workers


def goes_on(run: LiveRun, lost: set[str], step: int, num_workers: int) -> None:
    """``num_workers`` train on without the lost ones, and what it took is told."""
    run.until(lambda: run.events("resumed"), "the first new step", 60)
    run.trains_with(num_workers, beyond=step, timeout_s=60)
    (recovered,), (resumed,) = run.events("recovered"), run.events("resumed")
    assert set(recovered["lost"]) == lost and recovered["rows_lost"] == 0, run.told()
    assert recovered["redone_steps"] <= 20, run.told()
    # It lives with its driver, not on a node with workers: Ray takes 20 s to notice a node's loss and to restart it.
    assert not run.events("controller_restarted"), run.told()
    # Blocks of the feed that Ray cannot fetch for 7-14 s must not hold up the first step.
    assert resumed["fed_s"] < 5.0, run.told()


def test_run_goes_on_without_a_lost_node(cluster, data, tmp_path):
    """From here to the end of this file, nodes are lost: they do not come back."""
    with_nodes(cluster, 3)
    run = start(data, tmp_path, "node", scaling={"num_workers": [1, 3], **STAYS}, run=with_short_deadlines())
    step = protected(run)
    goes_on(run, lose_node(cluster, run, 1), step, 2)
    stands_still(cluster, run)
    end(run)


def stands_still(cluster: Any, run: LiveRun) -> None:
    """F7: a worker on a node that does nothing for a while (SIGSTOP of its worker and its raylet) cannot be ended; it
    is given up after its lease, and who wakes up later trains with nobody and writes nothing."""
    node, (worker,) = node_with(cluster, run, 1)
    pid = run.pid_of(run.workers()[worker])
    pids = [pid, *(entry.process.pid for entry in node.all_processes["raylet"])]
    step = run.record.step
    for one in pids:
        os.kill(one, signal.SIGSTOP)
    try:
        run.until(lambda: len(run.events("recovered")) == 2, "it is given up")
    finally:
        for one in pids:
            os.kill(one, signal.SIGCONT)
    run.until(lambda: not is_running(pid), "who woke up ends")
    run.trains_with(1, beyond=step + 40)
    assert len(run.events("failure")) == 2 and run.events("recovered")[1]["lost"] == [worker], run.told()


def test_worker_of_a_lost_or_drained_node_is_replaced_on_a_spare_node(cluster, data, tmp_path):
    with_nodes(cluster, 3)
    run = start(data, tmp_path, "spare", run=with_failure())
    step = protected(run)
    goes_on(run, lose_node(cluster, run, 1), step, 2)
    from ray._raylet import GcsClient  # what `ray drain-node` calls (Ray 2.60)

    node, leaving = node_with(cluster, run, 1)
    deadline_ms = int(1e3 * (time.time() + 120))
    # 2: a preemption, which a node that is at work takes too.
    accepted, why = GcsClient(address=cluster.address).drain_node(node.node_id, 2, "maintenance", deadline_ms)
    assert accepted, why
    told = run.until(lambda: run.events("drain"), "the notice is heard")
    assert {event["worker"] for event in told} == leaving and "node" in told[0]["reason"]
    run.until(lambda: not leaving & set(run.workers()) and len(run.workers()) == 2, "its place is taken", 120)
    run.trains_with(2, beyond=run.record.step)
    assert len(run.events("failure")) == 1, run.told()
    end(run)


def test_two_workers_of_a_lost_node_have_their_copies_on_another(cluster, data, tmp_path):
    with_nodes(cluster, 2)
    run = start(data, tmp_path, "pair", scaling={"num_workers": [1, 4], **STAYS})
    step = protected(run)
    lost = lose_node(cluster, run, 2)
    assert len(lost) == 2
    goes_on(run, lost, step, 2)
    end(run)
