"""The only module that makes Ray actors of plain classes.

Everything else is written against the plain classes, which tests build directly. Actors here are detached and named by
run, are never restarted by Ray, and end by themselves when nobody has spoken to them for ``orphan_s``: a killed driver
or controller leaves nothing behind for long (F8).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray._raylet import PlacementGroupID  # Ray 2.60 has no public way from an id to a group
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shoal.actors.messages import WorkerInfo, WorkerPoll
from shoal.actors.worker import Worker, WorkerSpec

logger = logging.getLogger(__name__)

#: Ray namespace of all of Shoal's named actors.
NAMESPACE = "shoal"


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
    max_concurrency: int = 4,
    lifetime: str | None = "detached",
    **kwargs: Any,
) -> Any:
    """Start ``cls(*args, **kwargs)`` as a named actor; returns its handle. Raises ValueError if the name is taken."""
    strategy = PlacementGroupSchedulingStrategy(placement_group=group) if group is not None else None
    return (
        ray.remote(cls)
        .options(  # type: ignore[attr-defined]
            name=name,
            namespace=NAMESPACE,
            lifetime=lifetime,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=max_concurrency,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            memory=memory,
            resources=dict(resources or {}),
            scheduling_strategy=strategy,
        )
        .remote(*args, **kwargs)
    )


def find_actor(name: str) -> Any | None:
    """The live actor of that name, or None."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def reserve(name: str, bundle: Mapping[str, float]) -> PlacementGroup:
    """A detached placement group of one bundle: the unit of elasticity, and the demand an autoscaler sees."""
    return placement_group([dict(bundle)], strategy="PACK", name=name, lifetime="detached")


def release_group(group: PlacementGroup) -> None:
    """Remove a placement group, with whatever runs in it."""
    remove_placement_group(group)


def reap(run: str) -> list[str]:
    """End every actor and placement group of ``run`` but its controller; returns their names.

    Whoever holds the controller's name, or has just found it free, may call this: the name is the run's lock.
    """
    prefix = actor_name(run, "")
    ended = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name = actor["name"]
        if actor["namespace"] != NAMESPACE or not name.startswith(prefix) or name == actor_name(run, "controller"):
            continue
        handle = find_actor(name)
        if handle is not None:
            ray.kill(handle, no_restart=True)
            ended.append(name)
    for group_id, group in placement_group_table().items():
        if group["name"].startswith(prefix) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))
            ended.append(group["name"])
    return ended


def start_watchdog(last_contact: Any, limit_s: float, what: str) -> None:
    """End this process when ``last_contact()`` (a monotonic time) is older than ``limit_s``."""

    def watch() -> None:
        while time.monotonic() - last_contact() < limit_s:
            time.sleep(min(1.0, limit_s / 4))
        logger.error("%s: nobody has spoken to this process for %.0f s: it ends", what, limit_s)
        os._exit(70)

    threading.Thread(target=watch, name="orphan-watchdog", daemon=True).start()


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


class WorkerActor:
    """A Worker in an actor of its own. Its host is its Ray node."""

    def __init__(self, worker_id: str, packed: Packed, orphan_s: float) -> None:
        spec: WorkerSpec = packed.open()
        self._worker = Worker(worker_id, spec)
        start_watchdog(lambda: self._worker.last_contact, orphan_s, f"worker {worker_id} of run {spec.run}")

    def prepare(self) -> WorkerInfo:
        return self._worker.prepare(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())

    def start(self, *args: Any) -> None:
        self._worker.start(*args)

    def poll(self) -> WorkerPoll:
        return self._worker.poll()

    def request(self, flags: int) -> None:
        self._worker.request(flags)
