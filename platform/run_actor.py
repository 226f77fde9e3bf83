"""A run's Controller as a Ray actor, and how drivers start it, watch it, find it again and speak to it (F8).

The actor is detached and Ray restarts it (``max_restarts=-1``): it then takes its workers over. It lives on when its
driver is killed, for ``driver_grace_s``, in which ``attach`` may take the driver's place.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from shoal.actors.runtime import Packed, actor_name, create_actor, find_actor, list_actors, reap
from shoal.kernels.errors import ClusterError, ConfigError
from shoal.platform.controller import Controller
from shoal.platform.driver import raise_failure, watch
from shoal.platform.launch import ClusterSpec
from shoal.platform.launch_ray import RayLauncher, quietly, told
from shoal.platform.run_plan import RunPlan, RunReport

logger = logging.getLogger(__name__)

#: How long the outcome of a run is kept for a driver that went away.
OUTCOME_KEPT_S = 15.0
#: How long a driver waits for a controller that Ray is restarting.
RESTART_TIMEOUT_S = 120.0
_CALL_TIMEOUT_S = 60.0


class ControllerActor:
    """The Controller in an actor of its own. It ends the run when the driver has gone, and then itself."""

    def __init__(self, packed: Packed) -> None:
        plan, cluster = packed.open()
        self._name = actor_name(plan.name, "controller")
        self._grace_s = cluster.driver_grace_s
        self._controller = Controller(plan, RayLauncher(plan.name, cluster))
        self._last_contact = time.monotonic()
        threading.Thread(target=self._run, name="controller", daemon=True).start()
        threading.Thread(target=self._watch_driver, name="driver-watch", daemon=True).start()

    def _run(self) -> None:
        self._controller.run()
        if self._controller.is_fenced:
            os._exit(71)  # another one has the run; Ray does not restart a process that it no longer counts as ours

    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self._is_over()

    def _silent_s(self) -> float:
        return time.monotonic() - self._last_contact

    def _is_over(self) -> bool:
        return self._controller.report(0).phase.is_over

    def _watch_driver(self) -> None:
        while not self._is_over() and self._silent_s() < self._grace_s:
            time.sleep(0.5)
        if not self._is_over():
            self._controller.stop(f"the driver has not been heard of for {self._grace_s:g} s")
        while not self._is_over() or self._silent_s() < OUTCOME_KEPT_S:
            time.sleep(0.5)
        # An exit of the process would only make Ray restart it.
        ray.kill(find_actor(self._name), no_restart=True)

    def report(self, cursor: int, incarnation: int) -> tuple[RunReport, BaseException | None]:
        """Everything since ``cursor``, which counts in ``incarnation`` of the controller; from the start of another."""
        self._last_contact = time.monotonic()
        report = self._controller.report(cursor, incarnation)
        return report, self._controller.failure if report.phase.is_over else None

    def pid(self) -> int:
        """Number of this process, on its node."""
        return os.getpid()

    def run_dir(self) -> str:
        """The run's folder."""
        return self._controller.plan.storage.uri

    def stop(self, reason: str) -> None:
        self._controller.stop(reason)

    def scale(self, num_workers: int) -> str:
        """Ask for another number of workers; what was understood."""
        return self._controller.scale(num_workers)

    def abort(self) -> None:
        """End workers and placement groups now."""
        self._controller.abort()


class RayController:
    """The driver's end of a controller actor (``ControllerClient``). Waits for one that Ray restarts."""

    def __init__(self, actor: Any, restart_timeout_s: float = RESTART_TIMEOUT_S) -> None:
        self.actor = actor
        self.failure: BaseException | None = None
        self._incarnation = -1
        self._restart_timeout_s = restart_timeout_s

    def report(self, cursor: int) -> RunReport:
        report, self.failure = self._call(lambda: self.actor.report.remote(cursor, self._incarnation))
        self._incarnation = report.incarnation
        return report

    def stop(self, reason: str) -> None:
        self._call(lambda: self.actor.stop.remote(reason))

    def run_dir(self) -> str:
        return self._call(lambda: self.actor.run_dir.remote())

    def scale(self, num_workers: int) -> str:
        return self._call(lambda: self.actor.scale.remote(num_workers))

    def _call(self, call: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + self._restart_timeout_s
        while True:
            try:
                return ray.get(call(), timeout=_CALL_TIMEOUT_S)
            except ray.exceptions.ActorUnavailableError as error:
                if time.monotonic() > deadline:
                    text = f"the controller did not come back within {self._restart_timeout_s:g} s: {told(error)}"
                    raise ClusterError(text) from error
                time.sleep(0.2)
            except ray.exceptions.RayActorError as error:
                raise ClusterError(f"the controller died: {told(error)}") from error
            except ray.exceptions.GetTimeoutError:
                raise ClusterError(f"the controller did not answer within {_CALL_TIMEOUT_S:g} s") from None
            except ray.exceptions.RayTaskError as error:
                raise error.as_instanceof_cause() from error


def run_on_ray(plan: RunPlan, cluster: ClusterSpec, on_item: Callable[[Any], None]) -> RunReport:
    """Run ``plan`` on the connected Ray cluster; see ``watch``. Whatever happens, nothing of the run is left behind."""
    name = actor_name(plan.name, "controller")
    taken = f"run {plan.name!r} is already running on this cluster (actor {name!r}): `shoal attach {plan.name}` shows "
    taken += f"it, `shoal stop {plan.name}` ends it; or change run.name"
    if _is_taken(name):
        raise ConfigError(taken)
    if left := reap(plan.name):  # by a controller that was killed
        logger.warning("run=%s ended what an earlier attempt had left: %s", plan.name, ", ".join(left))
    try:
        packed = Packed((plan, cluster))
        # With its driver, on the head as a rule: the loss of a node with workers then spares who deals with it.
        actor = create_actor(ControllerActor, name, packed, max_concurrency=8, max_restarts=-1, is_here=True)
    except ValueError as error:
        raise ConfigError(taken) from error
    return _watch(actor, plan.name, on_item, plan.stop_timeout_s)


def attach(run: str, on_item: Callable[[Any], None], *, stop_timeout_s: float = 30.0) -> RunReport:
    """Take the place of a run's driver: as ``run_on_ray`` goes on. Raises ConfigError where no such run is alive."""
    return _watch(find_controller(run), run, on_item, stop_timeout_s)


def find_controller(run: str) -> Any:
    """The controller actor of a live run. Raises ConfigError, naming the runs there are."""
    actor = find_actor(actor_name(run, "controller"))
    if actor is None:
        live = sorted(list_runs())
        there = f"running here: {', '.join(live)}" if live else "none is running here"
        raise ConfigError(f"no run {run!r} is running on this cluster; {there}")
    return actor


def find_live(run: str) -> bool:
    """Whether the run is alive: it has a controller, and has not ended."""
    actor = find_actor(actor_name(run, "controller"))
    return actor is not None and not _has_ended(actor)


def list_runs() -> list[str]:
    """Names of the runs whose controllers live in the connected cluster."""
    prefix, end = "shoal:", ":controller"
    return [name[len(prefix) : -len(end)] for name in list_actors() if name.endswith(end)]


def _is_taken(name: str) -> bool:
    """Whether a controller of that name has a run in progress; one that only keeps an outcome is ended."""
    actor = find_actor(name)
    if actor is None:
        return False
    if not _has_ended(actor):
        return find_actor(name) is not None
    quietly(lambda: ray.kill(actor, no_restart=True))
    _wait_until_gone(name)
    return False


def _has_ended(actor: Any) -> bool:
    """Whether a controller only keeps an outcome; False where it does not answer: it may be restarting."""
    try:
        return ray.get(actor.is_over.remote(), timeout=10.0)
    except ray.exceptions.RayError:
        return False


def _watch(actor: Any, run: str, on_item: Callable[[Any], None], stop_timeout_s: float) -> RunReport:
    client = RayController(actor)
    try:
        report = watch(client, on_item)
    except BaseException:
        quietly(lambda: ray.get(actor.abort.remote(), timeout=stop_timeout_s))
        raise
    finally:
        quietly(lambda: ray.kill(actor, no_restart=True))
        quietly(lambda: _wait_until_gone(actor_name(run, "controller")))
        # A controller that was killed, or died, may have been in the middle of a launch or a release.
        quietly(lambda: reap(run))
    raise_failure(report, client.failure)
    return report


def _wait_until_gone(name: str, limit_s: float = 10.0) -> None:
    """Ray ends an actor some time after ``ray.kill``: until then it may still create others."""
    deadline = time.monotonic() + limit_s
    while find_actor(name) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
