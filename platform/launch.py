"""Launch: where a run's processes come from, and the driver's loop that watches it.

With workers, a detached Controller actor launches one detached Worker actor and one placement group each, and a Feeder
actor; the driver polls the Controller. With ``num_workers=0`` the same Controller drives one Worker in this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from shoal.actors.groups import host_store
from shoal.actors.messages import View, WorkerInfo, WorkerPoll
from shoal.actors.shard_host import Restore
from shoal.actors.worker import Worker, WorkerSpec
from shoal.kernels.errors import ClusterError, ConfigError
from shoal.platform.controller import Controller, RunPlan, RunReport, WorkerHandle
from shoal.platform.state import RunPhase

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """What a run asks of a Ray cluster."""

    #: Resources of one worker's placement group: CPU, GPU, memory and custom ones.
    bundle: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"CPU": 1.0})
    #: Starts the Feeder actor, given the first step and the number of workers.
    start_feeder: Callable[[int, int], Any]
    #: A worker that no controller has polled for this long ends itself.
    orphan_s: float = 120.0
    #: A run whose driver has not polled for this long takes a checkpoint and ends.
    driver_grace_s: float = 120.0


class ControllerClient(Protocol):
    """The Controller as the driver sees it."""

    def report(self, cursor: int) -> RunReport: ...
    def stop(self, reason: str) -> None: ...


# ---- in this process ----------------------------------------------------------------------------------------------


class LocalHandle:
    """A worker of the calling process."""

    def __init__(self, worker_id: str, spec: WorkerSpec) -> None:
        self.worker_id = worker_id
        self._worker = Worker(worker_id, spec)

    def prepare(self, timeout_s: float) -> WorkerInfo:
        return self._worker.prepare("local")

    def start(self, view: View, rank: int, restore: Restore | None, timeout_s: float) -> None:
        self._worker.start(view, rank, restore)

    def poll(self, timeout_s: float) -> WorkerPoll:
        return self._worker.poll()

    def request(self, flags: int, timeout_s: float) -> None:
        self._worker.request(flags)

    def kill(self) -> None:
        self._worker.shut_down()
        self._worker.join(5.0)


class LocalLauncher:
    """One worker, in this process, without Ray."""

    def __init__(self) -> None:
        self._handles: list[LocalHandle] = []

    def launch(
        self, spec: WorkerSpec, num_workers: int, start_step: int, timeout_s: float, should_stop: Callable[[], bool]
    ) -> Sequence[WorkerHandle]:
        assert num_workers == 1
        self._handles = [LocalHandle("local", spec)]
        return self._handles

    def open_store(self) -> tuple[str, int]:
        raise AssertionError("a world of one needs no store")

    def release(self) -> None:
        for handle in self._handles:
            handle.kill()
        self._handles = []


def run_in_process(plan: RunPlan, on_item: Callable[[Any], None], *, poll_interval_s: float = 0.1) -> RunReport:
    """Run ``plan`` with one worker in this process; see ``watch``.

    Whatever happens, no thread of the run goes on afterwards, and torch's thread count and random state are as before.
    """
    controller = Controller(dataclasses.replace(plan, poll_interval_s=0.05), LocalLauncher())
    thread = threading.Thread(target=controller.run, name="controller", daemon=True)
    with _torch_settings_kept():
        thread.start()
        try:
            report = watch(controller, on_item, poll_interval_s=poll_interval_s)
        except BaseException:
            controller.abort()
            raise
        finally:
            thread.join(plan.stop_timeout_s)
    _raise_failure(report, controller.failure)
    return report


@contextlib.contextmanager
def _torch_settings_kept() -> Iterator[None]:
    """Put back what a worker changes for the whole process: torch's thread count and its random generators."""
    num_threads = torch.get_num_threads()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        torch.set_num_threads(num_threads)


# ---- on a Ray cluster ---------------------------------------------------------------------------------------------


class RayHandle:
    """A worker actor."""

    def __init__(self, worker_id: str, actor: Any) -> None:
        self.worker_id = worker_id
        self.actor = actor

    def _get(self, reference: Any, what: str, timeout_s: float) -> Any:
        import ray

        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise ClusterError(f"worker {self.worker_id} did not answer {what} within {timeout_s:g} s") from None
        except ray.exceptions.RayActorError as error:
            raise ClusterError(f"worker {self.worker_id} died: {_told(error)}") from error
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from error

    def prepare(self, timeout_s: float) -> WorkerInfo:
        return self._get(self.actor.prepare.remote(), "prepare", timeout_s)

    def start(self, view: View, rank: int, restore: Restore | None, timeout_s: float) -> None:
        self._get(self.actor.start.remote(view, rank, restore), "start", timeout_s)

    def poll(self, timeout_s: float) -> WorkerPoll:
        return self._get(self.actor.poll.remote(), "poll", timeout_s)

    def request(self, flags: int, timeout_s: float) -> None:
        self._get(self.actor.request.remote(flags), "request", timeout_s)

    def kill(self) -> None:
        import ray

        ray.kill(self.actor, no_restart=True)


class RayLauncher:
    """Worker actors with a placement group each; the TCPStore lives in the process that uses this (the Controller)."""

    def __init__(self, run: str, cluster: ClusterSpec) -> None:
        self._run = run
        self._cluster = cluster
        self._groups: list[Any] = []
        self._handles: list[RayHandle] = []
        self._feeder: Any = None
        self._store: Any = None

    def launch(
        self, spec: WorkerSpec, num_workers: int, start_step: int, timeout_s: float, should_stop: Callable[[], bool]
    ) -> Sequence[WorkerHandle]:
        from shoal.actors.runtime import Packed, WorkerActor, actor_name, create_actor, reserve

        deadline = time.monotonic() + timeout_s
        cluster = self._cluster
        self._feeder = cluster.start_feeder(start_step, num_workers)
        token = uuid.uuid4().hex[:8]
        names = [actor_name(self._run, f"worker-{index}-{token}") for index in range(num_workers)]
        self._groups = [reserve(name, cluster.bundle) for name in names]
        if not self._wait_for_groups(deadline, timeout_s, should_stop):
            return ()
        packed = Packed(spec)
        for index, (name, group) in enumerate(zip(names, self._groups)):
            actor = create_actor(
                WorkerActor,
                name,
                str(index),
                packed,
                # Until its first poll a worker waits for the slowest one to build its model.
                max(cluster.orphan_s, timeout_s + 30.0),
                num_cpus=cluster.bundle.get("CPU", 0),
                num_gpus=cluster.bundle.get("GPU", 0),
                group=group,
                max_concurrency=4,
            )
            self._handles.append(RayHandle(str(index), actor))
        return self._handles

    def _wait_for_groups(self, deadline: float, timeout_s: float, should_stop: Callable[[], bool]) -> bool:
        """True: every placement group is placed. False: ``should_stop`` said so first.

        Raises ClusterError at the deadline, saying what was asked and what the cluster has.
        """
        import ray

        ready = [group.ready() for group in self._groups]
        waiting = ready
        while waiting and time.monotonic() < deadline:
            if should_stop():
                return False
            slice_s = min(1.0, max(0.0, deadline - time.monotonic()))
            _, waiting = ray.wait(ready, num_returns=len(ready), timeout=slice_s)
        if waiting:
            have = {k: v for k, v in ray.cluster_resources().items() if not k.startswith("node:")}
            raise ClusterError(
                f"{len(waiting)} of {len(ready)} workers could not be placed within {timeout_s:g} s "
                f"(run.timeouts.start_timeout_s): each needs {dict(self._cluster.bundle)}, the cluster has {have}, "
                f"free: {ray.available_resources()}. Add nodes or ask for fewer workers"
            )
        return True

    def open_store(self) -> tuple[str, int]:
        import ray

        self._store, host, port = host_store(ray.util.get_node_ip_address())
        return host, port

    def release(self) -> None:
        from shoal.actors.runtime import release_group

        for handle in self._handles:
            _quietly(handle.kill)
        if self._feeder is not None:
            import ray

            _quietly(lambda: ray.kill(self._feeder, no_restart=True))
        for group in self._groups:
            _quietly(lambda group=group: release_group(group))
        self._handles, self._groups, self._feeder, self._store = [], [], None, None


class ControllerActor:
    """The Controller in an actor of its own. It ends the run when the driver has gone."""

    def __init__(self, packed: Any) -> None:
        plan, cluster = packed.open()
        self._controller = Controller(plan, RayLauncher(plan.name, cluster))
        self._grace_s = cluster.driver_grace_s
        self._last_contact = time.monotonic()
        threading.Thread(target=self._run, name="controller", daemon=True).start()
        threading.Thread(target=self._watch_driver, name="driver-watch", daemon=True).start()

    def _run(self) -> None:
        self._controller.run()

    def _watch_driver(self) -> None:
        while time.monotonic() - self._last_contact < self._grace_s:
            time.sleep(1.0)
        self._controller.stop(f"the driver has not been heard of for {self._grace_s:g} s")
        while not self._controller.report(0).phase.is_over:
            time.sleep(1.0)
        os._exit(0)

    def report(self, cursor: int) -> tuple[RunReport, BaseException | None]:
        self._last_contact = time.monotonic()
        report = self._controller.report(cursor)
        return report, self._controller.failure if report.phase.is_over else None

    def stop(self, reason: str) -> None:
        self._controller.stop(reason)

    def abort(self) -> None:
        """End workers and placement groups now."""
        self._controller.abort()


class _RayController:
    """ControllerClient over the actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.failure: BaseException | None = None

    def report(self, cursor: int) -> RunReport:
        import ray

        try:
            report, self.failure = ray.get(self.actor.report.remote(cursor), timeout=60.0)
            return report
        except ray.exceptions.RayActorError as error:
            raise ClusterError(f"the controller died: {_told(error)}") from error
        except ray.exceptions.GetTimeoutError:
            raise ClusterError("the controller did not answer within 60 s") from None

    def stop(self, reason: str) -> None:
        import ray

        ray.get(self.actor.stop.remote(reason), timeout=60.0)


def run_on_ray(plan: RunPlan, cluster: ClusterSpec, on_item: Callable[[Any], None]) -> RunReport:
    """Run ``plan`` on the connected Ray cluster; see ``watch``. Whatever happens, nothing of the run is left behind."""
    import ray

    from shoal.actors.runtime import Packed, actor_name, create_actor, find_actor, reap

    name = actor_name(plan.name, "controller")
    taken = f"run {plan.name!r} is already running on this cluster (actor {name!r}); stop it first or change run.name"
    if find_actor(name) is not None:
        raise ConfigError(taken)
    if left := reap(plan.name):  # by a controller that was killed
        logger.warning("run=%s ended what an earlier attempt had left: %s", plan.name, ", ".join(left))
    try:
        actor = create_actor(ControllerActor, name, Packed((plan, cluster)), max_concurrency=8)
    except ValueError as error:
        raise ConfigError(taken) from error
    client = _RayController(actor)
    try:
        report = watch(client, on_item)
    except BaseException:
        _quietly(lambda: ray.get(actor.abort.remote(), timeout=plan.stop_timeout_s))
        raise
    finally:
        _quietly(lambda: ray.kill(actor, no_restart=True))
        _quietly(lambda: _wait_until_gone(name, find_actor))
        # A controller that was killed, or died, may have been in the middle of a launch or a release.
        _quietly(lambda: reap(plan.name))
    _raise_failure(report, client.failure)
    return report


def _wait_until_gone(name: str, find: Callable[[str], Any], limit_s: float = 10.0) -> None:
    """Ray ends an actor some time after ``ray.kill``: until then it may still create others."""
    deadline = time.monotonic() + limit_s
    while find(name) is not None and time.monotonic() < deadline:
        time.sleep(0.05)


def watch(client: ControllerClient, on_item: Callable[[Any], None], *, poll_interval_s: float = 0.25) -> RunReport:
    """The driver's loop: hand every item of the run to ``on_item`` until it is over.

    Ctrl-C or SIGTERM once asks for an orderly end (the step in progress, a checkpoint); twice raises KeyboardInterrupt.
    """
    cursor = 0
    with _stop_signals() as signals:
        asked = False
        while True:
            report = client.report(cursor)
            cursor = report.cursor
            for item in report.items:
                on_item(item)
            if report.phase.is_over:
                return report
            if signals and not asked:
                asked = True
                on_item(("stopping", {"reason": signals[0], "hint": "once more to end now"}))
                client.stop(signals[0])
            if len(signals) > 1:
                raise KeyboardInterrupt
            time.sleep(poll_interval_s)


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[str]]:
    """The names of SIGINT and SIGTERM received inside, in order. Outside the main thread: none."""
    received: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def receive(number: int, frame: Any) -> None:
        received.append(signal.Signals(number).name)

    previous = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _raise_failure(report: RunReport, failure: BaseException | None) -> None:
    if report.phase is RunPhase.FAILED:
        raise failure if failure is not None else ClusterError(report.reason)


def _told(error: BaseException) -> str:
    """First and last line of an error: of a traceback in between, the last one is the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


def _quietly(action: Callable[[], Any]) -> None:
    """Release something that may be gone already."""
    try:
        action()
    except Exception as error:
        logger.debug("release failed: %s", error)
