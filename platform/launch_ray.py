"""Workers of a run on a Ray cluster: one detached placement group and one detached actor each.

A placement group that waits for room is the demand that Ray's autoscaler sees; it waits as long as the controller wants
the worker. Names are ``shoal:<run>:<worker id>`` for both, so that a restarted controller finds them (F8).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from shoal.actors.groups import host_store, run_hash
from shoal.actors.messages import Holdings, Order, SetBase, WorkerInfo, WorkerPoll
from shoal.actors.runtime import (
    Packed,
    WorkerActor,
    actor_name,
    create_actor,
    find_actor,
    find_groups,
    group_node,
    kill_process,
    list_actors,
    reap,
    release_group,
    reserve,
)
from shoal.actors.worker_spec import WorkerSpec
from shoal.kernels.errors import ClusterError
from shoal.platform.host_labels import nodes_without
from shoal.platform.launch import (
    Capacity,
    ClusterSpec,
    LaunchEvent,
    LaunchFailed,
    Placed,
    Ready,
    WorkerGoneError,
    WorkerHandle,
)

logger = logging.getLogger(__name__)


class RayHandle:
    """A worker actor."""

    def __init__(self, worker_id: str, actor: Any, is_node_lost: Callable[[], bool]) -> None:
        self.worker_id = worker_id
        self.actor = actor
        self._is_node_lost = is_node_lost

    def describe(self, timeout_s: float) -> WorkerInfo:
        return self._get(self.actor.prepare.remote(), "prepare", timeout_s)

    def order(self, order: Order | SetBase, timeout_s: float) -> None:
        self._get(self.actor.order.remote(order), type(order).__name__, timeout_s)

    def poll(self, timeout_s: float) -> WorkerPoll:
        return self._get(self.actor.poll.remote(), "poll", timeout_s)

    def holdings(self, timeout_s: float) -> Holdings:
        return self._get(self.actor.holdings.remote(), "holdings", timeout_s)

    def request(self, flags: int, timeout_s: float) -> None:
        self._get(self.actor.request.remote(flags), "request", timeout_s)

    def _get(self, reference: Any, what: str, timeout_s: float) -> Any:
        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.ActorUnavailableError as error:
            # Its process takes no connections. Ray waits 14 s before it says so of all that were on a lost node (2.60).
            kind = WorkerGoneError if self._is_node_lost() else ClusterError
            raise kind(f"worker {self.worker_id} cannot be reached: {told(error)}") from error
        except Exception as error:
            raise worker_error(self.worker_id, what, error, timeout_s) from error


def worker_error(worker_id: str, what: str, error: BaseException, timeout_s: float) -> BaseException:
    """What a call to a worker raised, in our words (see ``WorkerHandle``), or the worker's own error."""
    if isinstance(error, ray.exceptions.GetTimeoutError):
        return ClusterError(f"worker {worker_id} did not answer {what} within {timeout_s:g} s")
    if isinstance(error, ray.exceptions.RayActorError):
        return WorkerGoneError(f"worker {worker_id} died: {told(error)}")
    if isinstance(error, ray.exceptions.RayTaskError):
        return error.as_instanceof_cause()
    return error


@dataclasses.dataclass
class _Launch:
    """A worker on its way: its group waits for room, then its actor builds the model."""

    spec: WorkerSpec
    group: Any
    name: str
    #: The node its group was meant for.
    target: str | None = None
    actor: Any = None
    preparing: Any = None


class RayLauncher:
    """Worker actors with a placement group each; the TCPStore lives in the process that uses this (the Controller)."""

    is_fixed = False

    def __init__(self, run: str, cluster: ClusterSpec) -> None:
        self._run = run
        self.cluster_address = ray.get_runtime_context().gcs_address
        self._cluster = cluster
        self._launching: dict[str, _Launch] = {}
        self._handles: dict[str, RayHandle] = {}
        self._groups: dict[str, Any] = {}
        #: Worker id -> the node its group is on, as far as that is known.
        self._nodes: dict[str, str] = {}
        self._kills: dict[str, Any] = {}
        #: Nodes found lost before Ray has noticed.
        self._lost_nodes: set[str] = set()
        #: Worker id -> a call to it made before it was given up.
        self._probes: dict[str, Any] = {}
        self._feeder: Any = None
        self._store: Any = None
        self._address = ("", 0)
        self._packed: tuple[WorkerSpec, Packed] | None = None

    # ---- workers --------------------------------------------------------------------------------------------------

    def launch_worker(self, worker_id: str, spec: WorkerSpec) -> None:
        name = actor_name(self._run, worker_id)
        target = self._quietest_node()
        # Ray would put a group on a lost node that it still believes in, and lets all other groups wait for it (2.60).
        avoid = self._lost_nodes | nodes_without(self._cluster.host_label, ray.nodes())
        group = reserve(name, self._cluster.bundle, target, avoid)
        self._groups[worker_id] = group
        self._launching[worker_id] = _Launch(spec=spec, group=group, name=name, target=target)

    def advance(self) -> Sequence[LaunchEvent]:
        events: list[LaunchEvent] = []
        for worker_id, launch in list(self._launching.items()):
            event = self._advance(worker_id, launch)
            if event is not None:
                events.append(event)
        return events

    def _advance(self, worker_id: str, launch: _Launch) -> LaunchEvent | None:
        if launch.actor is None:
            node = group_node(launch.group)
            if node is None:
                return None
            self._nodes[worker_id] = node
            launch.actor = self._create(worker_id, launch)
            launch.preparing = launch.actor.prepare.remote()
            return Placed(worker_id=worker_id, host=node)
        done, _ = ray.wait([launch.preparing], timeout=0)
        if not done:
            return None
        del self._launching[worker_id]
        try:
            info: WorkerInfo = ray.get(launch.preparing, timeout=10.0)
        except Exception as error:
            return LaunchFailed(worker_id=worker_id, error=worker_error(worker_id, "prepare", error, 10.0))
        self._handles[worker_id] = self._make_handle(worker_id, launch.actor)
        return Ready(worker_id=worker_id, info=info)

    def _create(self, worker_id: str, launch: _Launch) -> Any:
        if self._packed is None or self._packed[0] is not launch.spec:
            self._packed = (launch.spec, Packed(launch.spec))
        bundle = self._cluster.bundle
        return create_actor(
            WorkerActor,
            launch.name,
            worker_id,
            self._packed[1],
            # Until its first poll a worker waits for the slowest one to build its model.
            max(self._cluster.orphan_s, launch.spec.start_timeout_s + 30.0),
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            group=launch.group,
            max_concurrency=4,
        )

    def _make_handle(self, worker_id: str, actor: Any) -> RayHandle:
        return RayHandle(worker_id, actor, lambda: self._is_node_lost(self._nodes.get(worker_id, "")))

    def _quietest_node(self) -> str | None:
        """Of the nodes with room, the one with the fewest workers of this run: hosts are used evenly."""
        coming = Counter(launch.target for launch in self._launching.values() if launch.actor is None)
        free = {node: left for node, room in self._room().items() if (left := room - coming[node]) > 0}
        used = Counter(self._nodes.values()) + coming
        return min(free, key=lambda node: (used[node], -free[node], node), default=None)

    def handle(self, worker_id: str) -> WorkerHandle | None:
        return self._handles.get(worker_id)

    def release_worker(self, worker_id: str) -> None:
        launch = self._launching.pop(worker_id, None)
        handle = self._handles.pop(worker_id, None)
        actor = handle.actor if handle is not None else launch.actor if launch is not None else None
        group = self._groups.pop(worker_id, None)
        self._nodes.pop(worker_id, None)
        self._kills.pop(worker_id, None)
        self._probes.pop(worker_id, None)
        if actor is not None:
            quietly(lambda: ray.kill(actor, no_restart=True))
        if group is not None:
            quietly(lambda: release_group(group))

    def kill_worker(self, worker_id: str, pid: int, host: str) -> bool:
        handle = self._handles.get(worker_id)
        if handle is None:
            return True
        node = self._nodes.get(worker_id, host)
        if worker_id not in self._kills:
            self._probes[worker_id] = handle.actor.poll.remote()
            # A process that was stopped (SIGSTOP) does not hear Ray, whose handles call it dead all the same: another
            # process on its node ends it, and says so.
            self._kills[worker_id] = self._order_kill(worker_id, node, pid)
            quietly(lambda: ray.kill(handle.actor, no_restart=True))
        reference = self._kills[worker_id]
        if not any(entry["NodeID"] == node and entry["Alive"] for entry in ray.nodes()):
            return True
        if self._is_node_lost(node) and self._has_failed(worker_id):
            return True
        if not ray.wait([reference], timeout=0)[0]:
            return False
        try:
            ray.get(reference, timeout=1.0)
            return True
        except Exception as error:  # who was asked died with it: somebody else has to look
            logger.debug("worker=%s action=kill error=%s", worker_id, error)
            self._kills[worker_id] = kill_process(node, pid)
            return False

    def _is_node_lost(self, node: str) -> bool:
        """Whether Ray has given the node up, or nothing listens where its raylet did: Ray notices after 14 s (2.60)."""
        entry = next((entry for entry in ray.nodes() if entry["NodeID"] == node and entry["Alive"]), None)
        if entry is None:
            return bool(node)
        try:
            address = (entry["NodeManagerAddress"], entry["NodeManagerPort"])
            socket.create_connection(address, timeout=0.2).close()
        except ConnectionRefusedError:
            self._lost_nodes.add(node)
            return True
        except OSError:  # no answer proves nothing: the network may be down
            return False
        return False

    def _has_failed(self, worker_id: str) -> bool:
        """Whether the process no longer takes connections either. A raylet takes its workers along, but a worker that
        was stopped would outlive it."""
        probe = self._probes.get(worker_id)
        if probe is None:
            return True
        if not ray.wait([probe], timeout=0)[0]:
            return False
        try:
            ray.get(probe, timeout=1.0)
        except ray.exceptions.RayActorError:
            return True
        except Exception as error:
            logger.debug("worker=%s probe=%s", worker_id, error)
        return False

    def _order_kill(self, worker_id: str, node: str, pid: int) -> Any:
        """Through a worker on the same node, which answers in milliseconds, or else a new process there."""
        for other, handle in self._handles.items():
            if other != worker_id and other not in self._kills and self._nodes.get(other) == node:
                return handle.actor.kill_process.remote(pid)
        return kill_process(node, pid)

    def adopt(self) -> Mapping[str, WorkerHandle]:
        prefix, groups = actor_name(self._run, ""), find_groups(self._run)
        for name in list_actors(self._run):
            worker_id = name.removeprefix(prefix)
            actor = find_actor(name) if is_worker_id(worker_id) else None
            if actor is not None:
                self._handles[worker_id] = self._make_handle(worker_id, actor)
        for name, group in groups.items():
            worker_id = name.removeprefix(prefix)
            if worker_id in self._handles:
                self._groups[worker_id] = group
                node = group_node(group)
                if node is not None:
                    self._nodes[worker_id] = node
            else:  # asked for by the controller before this one, which nobody waits for any more
                quietly(lambda group=group: release_group(group))
        self._feeder = find_actor(actor_name(self._run, "feeder"))
        return dict(self._handles)

    # ---- the cluster ----------------------------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        waiting = sum(1 for launch in self._launching.values() if launch.actor is None)
        return Capacity(free=self._room(), num_waiting=waiting, text=self._resources_text())

    def _room(self) -> dict[str, int]:
        """Node -> how many more workers fit, by what is free there now."""
        bundle = {name: need for name, need in self._cluster.bundle.items() if need > 0}
        leaving = ray._private.state.state.get_draining_nodes()
        nodes = ray.nodes()
        alive = {node["NodeID"] for node in nodes if node["Alive"]} - set(leaving) - self._lost_nodes
        alive -= nodes_without(self._cluster.host_label, nodes)
        return {
            node: math.floor(min((free.get(name, 0.0) / need + 1e-9 for name, need in bundle.items()), default=1e6))
            for node, free in ray._private.state.available_resources_per_node().items()
            if node in alive
        }

    def _resources_text(self) -> str:
        have = {k: v for k, v in ray.cluster_resources().items() if not k.startswith("node:")}
        return (
            f"each needs {dict(self._cluster.bundle)}, the cluster has {have}, free: {ray.available_resources()}. "
            "Add nodes or ask for fewer workers"
        )

    def draining(self) -> Mapping[str, float | None]:
        # Internal, but what Ray Train polls too (Ray 2.60); a deadline of 0 means none.
        now_ms = time.time() * 1e3
        found = ray._private.state.state.get_draining_nodes()
        left_s = {node: max(0.0, (at_ms - now_ms) / 1e3) if at_ms else None for node, at_ms in found.items()}
        return {worker_id: left_s[node] for worker_id, node in self._nodes.items() if node in left_s}

    def start_feeder(self, start_step: int, num_workers: int) -> None:
        if self._feeder is None:
            self._feeder = self._cluster.start_feeder(start_step, num_workers)

    def forget_ranks(self) -> None:
        if self._feeder is not None:
            self._feeder.forget_ranks.remote()

    def open_store(self) -> tuple[str, int]:
        if self._store is None:
            self._store, *address = host_store(ray.util.get_node_ip_address())
            self._address = (address[0], address[1])
        return self._address

    def forget_epochs(self, run: str, before: int) -> None:
        if self._store is None:
            return
        prefix = f"{run_hash(run):016x}/"
        for key in self._store.list_keys():
            epoch = key.removeprefix(prefix).partition("/")[0]
            if key.startswith(prefix) and epoch.isdecimal() and int(epoch) < before:
                self._store.delete_key(key)

    def release(self) -> None:
        for worker_id in [*self._launching, *self._handles, *self._groups]:
            self.release_worker(worker_id)
        if self._feeder is not None:
            quietly(lambda: ray.kill(self._feeder, no_restart=True))
        # Whatever a worker or a controller before this one has left.
        quietly(lambda: reap(self._run))
        self._feeder, self._store = None, None


def is_worker_id(text: str) -> bool:
    """Whether the last part of an actor's name is a worker's id."""
    return text not in ("controller", "feeder")


def told(error: BaseException) -> str:
    """First and last line of an error: of a traceback in between, the last one is the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


def quietly(action: Callable[[], Any]) -> None:
    """Release something that may be gone already."""
    try:
        action()
    except Exception as error:
        logger.debug("release failed: %s", error)
