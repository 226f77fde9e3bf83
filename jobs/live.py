"""Runs that are alive in a Ray cluster: find one by its name, change its number of workers, watch it, stop it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shoal.jobs.connection import connected_to_live
from shoal.jobs.progress import Progress
from shoal.jobs.result import Collector, Result, make_result
from shoal.kernels.errors import ClusterError


def scale(name: str, num_workers: int, *, address: str | None = None) -> str:
    """Change the number of workers of a live run; it trains on meanwhile.

    Returns at once, saying what was understood; the run's events tell when the change is made. The number holds until
    the next call and across restarts of the controller; more than the cluster has room for is waited for.

    Args:
        name: the run's name.
        address: the Ray cluster; by default RAY_ADDRESS, else the one on this machine.

    Raises ConfigError where no such run is alive or the number is not possible, ClusterError without a cluster.
    """
    from shoal.platform.run_actor import RayController, find_controller

    with connected_to_live(address):
        return RayController(find_controller(name)).scale(num_workers)


def stop(name: str, *, address: str | None = None, timeout_s: float = 600.0) -> None:
    """End a live run in good order: its step is finished, a checkpoint written. Returns when it has ended.

    Raises ConfigError where no such run is alive, ClusterError when it has not ended after ``timeout_s``.
    """
    from shoal.platform.run_actor import RayController, find_controller, find_live

    with connected_to_live(address):
        actor = find_controller(name)
        RayController(actor).stop("shoal stop")
        deadline = time.monotonic() + timeout_s
        while find_live(name):
            if time.monotonic() > deadline:
                raise ClusterError(f"run {name!r} has not ended {timeout_s:g} s after it was asked to")
            time.sleep(0.2)


def attach(
    name: str,
    *,
    address: str | None = None,
    progress: Progress | None = None,
    on_record: Callable[[Any], None] | None = None,
) -> Result:
    """Take the place of a run's driver: show its progress, wait for its end, as ``ElasticTrainer.fit`` does."""
    from shoal.platform.run_actor import RayController, find_controller
    from shoal.platform.run_actor import attach as watch_run

    collector = Collector(progress or Progress(), on_record)
    with connected_to_live(address), collector.progress:
        run_dir = RayController(find_controller(name)).run_dir()
        report = watch_run(name, collector)
    return make_result(run_dir, report, collector)
