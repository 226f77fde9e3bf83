"""The only module that makes Ray actors of plain classes.

Everything else is written against the plain classes, which tests build directly. Actors here are detached and named by
run. Ray restarts the controller and the feeder, whose state can be rebuilt, never a worker; a worker ends by itself,
and takes its placement group along, when nobody has spoken to it for ``orphan_s``: a killed driver or controller leaves
nothing behind for long (F8).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray._raylet import PlacementGroupID  # Ray 2.60 has no public way from an id to a group
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from shoal.actors.messages import Holdings, Order, SetBase, WorkerInfo, WorkerPoll
from shoal.actors.worker import Worker
from shoal.actors.worker_spec import WorkerSpec
from shoal.kernels.errors import ClusterError

logger = logging.getLogger(__name__)

#: Ray namespace of all of Shoal's named actors.
NAMESPACE = "shoal"

#: Concurrency group of the calls that must be answered at once, and its number of threads.
QUICK, QUICK_THREADS = "quick", 2

#: A worker that was told to go by SIGTERM ends after this long, whether or not its rows have left. Kubernetes and
#: ``ray start --block`` allow 30 s by default.
TERM_GRACE_S = 30.0


def actor_name(run: str, role: str) -> str:
    """Name of an actor of a run: ``shoal:<run>:<role>``."""
    return f"shoal:{run}:{role}"


def create_actor(
    cls: type,
    name: str,
    *args: Any,
    num_cpus: float = 0,
    num_gpus: float = 0,
    memory: int | None = None,
    resources: Mapping[str, float] | None = None,
    group: PlacementGroup | None = None,
    is_here: bool = False,
    max_concurrency: int = 4,
    max_restarts: int = 0,
    lifetime: str | None = "detached",
    **kwargs: Any,
) -> Any:
    """Start ``cls(*args, **kwargs)`` as a named actor; returns its handle. Raises ValueError if the name is taken.

    ``is_here``: on the caller's node, as long as that lives; elsewhere when it is restarted after that. Methods marked
    with ``QUICK`` are answered by threads of their own, whatever the others are busy with (F2).
    """
    strategy: Any = PlacementGroupSchedulingStrategy(placement_group=group) if group is not None else None
    place: dict[str, Any] = {}
    if is_here:  # a soft NodeAffinitySchedulingStrategy puts two of three such actors on other nodes (Ray 2.60)
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        place = {"label_selector": here, "fallback_strategy": [{"label_selector": {}}]}
    return (
        ray.remote(concurrency_groups={QUICK: QUICK_THREADS})(cls)  # type: ignore[call-overload]
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime=lifetime,
            max_restarts=max_restarts,
            max_task_retries=0,
            max_concurrency=max_concurrency,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            memory=memory,
            resources=dict(resources or {}),
            scheduling_strategy=strategy,
            **place,
        )
        .remote(*args, **kwargs)
    )


def find_actor(name: str) -> Any | None:
    """The live actor of that name, or None."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def reserve(
    name: str, bundle: Mapping[str, float], node_id: str | None = None, avoid: Collection[str] = ()
) -> PlacementGroup:
    """A detached placement group of one bundle: the unit of elasticity, and the demand an autoscaler sees.

    ``node_id``: the node it should be on if there is room. ``avoid``: nodes it must not be on.
    """
    selector = [{"ray.io/node-id": f"!in({','.join(sorted(avoid))})"}] if avoid else None
    return placement_group(
        [dict(bundle)],
        strategy="STRICT_PACK",
        name=name,
        lifetime="detached",
        _soft_target_node_id=node_id,
        bundle_label_selector=selector,
    )


def release_group(group: PlacementGroup) -> None:
    """Remove a placement group, with whatever runs in it."""
    remove_placement_group(group)


def group_node(group: PlacementGroup) -> str | None:
    """The node a placement group of one bundle is on; None as long as it waits for room."""
    entry = placement_group_table(group)
    if entry.get("state") != "CREATED":
        return None
    return next(iter(entry["bundles_to_node_id"].values()), None)


def find_groups(run: str) -> dict[str, PlacementGroup]:
    """The placement groups of a run that exist, by name."""
    prefix = actor_name(run, "")
    return {
        entry["name"]: PlacementGroup(PlacementGroupID(bytes.fromhex(group_id)))
        for group_id, entry in placement_group_table().items()
        if entry["name"].startswith(prefix) and entry["state"] != "REMOVED"
    }


def list_actors(run: str | None = None) -> list[str]:
    """Names of the live actors of a run, or of all runs."""
    prefix = "shoal:" if run is None else actor_name(run, "")
    found = ray.util.list_named_actors(all_namespaces=True)
    return [a["name"] for a in found if a["namespace"] == NAMESPACE and a["name"].startswith(prefix)]


def reap(run: str, *, with_controller: bool = False) -> list[str]:
    """End every actor and placement group of ``run``, but its controller unless told so; returns their names.

    Whoever holds the controller's name, or has just found it free, may call this: the name is the run's lock.
    """
    ended = []
    for name in list_actors(run):
        handle = find_actor(name) if with_controller or name != actor_name(run, "controller") else None
        if handle is not None:
            ray.kill(handle, no_restart=True)
            ended.append(name)
    for name, group in find_groups(run).items():
        remove_placement_group(group)
        ended.append(name)
    return ended


def kill_process(node_id: str, pid: int) -> Any:
    """SIGKILL process ``pid`` on a node from another process there: a stopped one does not hear Ray. A reference.

    Only a process of Ray's is killed: the number may be another's by now.
    """

    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(kill_here).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)  # type: ignore[attr-defined]
    return task.remote(pid)


def kill_here(pid: int, limit_s: float = 5.0) -> bool:
    """SIGKILL a process of Ray's on this machine and wait until it has ended. False: it had before, or is another's."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"ray::" not in file.read():
                return False
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    deadline = time.monotonic() + limit_s
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not _is_running(pid), f"process {pid} survived SIGKILL for {limit_s:g} s"
    return True


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start_watchdog(
    last_contact: Callable[[], float], limit_s: float, what: str, before_end: Callable[[], Any] = lambda: None
) -> None:
    """End this process, after ``before_end()``, when ``last_contact()`` (monotonic) is older than ``limit_s``."""

    def watch() -> None:
        while time.monotonic() - last_contact() < limit_s:
            time.sleep(min(1.0, limit_s / 4))
        logger.error("%s: nobody has spoken to this process for %.0f s: it ends", what, limit_s)
        # The cluster may be what is gone: then nothing answers, and the process must end all the same.
        last = threading.Thread(target=before_end, name="orphan-release", daemon=True)
        last.start()
        last.join(10.0)
        os._exit(70)

    threading.Thread(target=watch, name="orphan-watchdog", daemon=True).start()


def release_orphan(run: str) -> None:
    """What an orphaned worker does last: its placement group goes; without a controller, all the run has left."""
    if find_actor(actor_name(run, "controller")) is None:
        reap(run)
    group = ray.util.get_current_placement_group()
    if group is not None:
        remove_placement_group(group)


def on_terminate(act: Callable[[], None]) -> None:
    """Call ``act`` in a thread when this process gets a SIGTERM. Only for the main thread; elsewhere nothing happens.

    The main thread of a Ray actor runs no Python, so a Python handler would never run there; the byte that C writes to
    the wake-up descriptor is read by a thread of ours.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while data := reader.recv(64):
            if signal.SIGTERM in data:
                act()
                return

    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    threading.Thread(target=watch, name="terminate-watch", daemon=True).start()


class Packed:
    """A value that may refer to the user's own modules: opened only after the driver's import paths are known.

    Ray unpickles an actor's arguments before its ``__init__`` runs, in a process that knows neither the driver's
    working directory nor what a script put on ``sys.path``.
    """

    def __init__(self, value: Any) -> None:
        self._paths = [path or os.getcwd() for path in sys.path]
        self._data = ray.cloudpickle.dumps(value)

    def open(self) -> Any:
        """The value; the driver's import paths that exist here are searched last."""
        sys.path.extend(path for path in self._paths if path not in sys.path and os.path.isdir(path))
        return ray.cloudpickle.loads(self._data)


def node_host(label: str) -> str:
    """The host of this process: its node, or the value of a label of it. Raises ClusterError where it has none."""
    context = ray.get_runtime_context()
    if not label:
        return context.get_node_id()
    value = context.get_node_labels().get(label)
    if not value:
        raise ClusterError(f"node {context.get_node_id()} has no label {label!r}, which names its host (scaling.hosts)")
    return value


class WorkerActor:
    """A Worker in an actor of its own. Its host is its Ray node."""

    def __init__(self, worker_id: str, packed: Packed, orphan_s: float, host: str | None = None) -> None:
        spec: WorkerSpec = packed.open()
        self._worker = Worker(worker_id, spec)
        self._host = host or node_host(spec.host_label)
        self._info: WorkerInfo | None = None
        self._lock = threading.Lock()
        #: Monotonic time at which this process ends because it got a SIGTERM.
        self._ends_at: float | None = None
        what = f"worker {worker_id} of run {spec.run}"
        start_watchdog(lambda: self._worker.last_contact, orphan_s, what, lambda: release_orphan(spec.run))
        on_terminate(self._begin_drain)
        threading.Thread(target=self._end_when_left, name="leave-watch", daemon=True).start()

    def _end_when_left(self) -> None:
        self._worker.has_left.wait()
        time.sleep(0.2)  # for the answers that are on their way
        os._exit(0)

    def _begin_drain(self) -> None:
        self._ends_at = time.monotonic() + TERM_GRACE_S
        time.sleep(TERM_GRACE_S)
        os._exit(143)

    def prepare(self) -> WorkerInfo:
        """Build the model and describe it; asked again, by a controller that was restarted, the same answer at once."""
        with self._lock:
            if self._info is None:
                self._info = self._worker.prepare(self._host, ray.util.get_node_ip_address())
            return self._info

    def order(self, order: Order | SetBase) -> None:
        """Queue an order; returns at once."""
        self._worker.order(order)

    @ray.method(concurrency_group=QUICK)
    def poll(self) -> WorkerPoll:
        poll = self._worker.poll()
        if self._ends_at is None:
            return poll
        left_s = max(0.0, self._ends_at - time.monotonic())
        return dataclasses.replace(poll, status=dataclasses.replace(poll.status, drain_s=left_s))

    @ray.method(concurrency_group=QUICK)
    def holdings(self) -> Holdings:
        """What this worker can bring into a recovered view."""
        return self._worker.holdings()

    @ray.method(concurrency_group=QUICK)
    def kill_process(self, pid: int) -> bool:
        """End another process of this machine that does not answer (see ``kill_here``)."""
        return kill_here(pid)

    @ray.method(concurrency_group=QUICK)
    def request(self, flags: int) -> None:
        self._worker.request(flags)
