"""A run without Ray: its one worker lives in the calling process, and so does its controller."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from shoal.actors.messages import Holdings, Order, SetBase, WorkerInfo, WorkerPoll
from shoal.actors.worker import Worker
from shoal.actors.worker_spec import WorkerSpec
from shoal.platform.controller import Controller
from shoal.platform.driver import raise_failure, watch
from shoal.platform.launch import Capacity, LaunchEvent, LaunchFailed, Ready, WorkerHandle
from shoal.platform.run_plan import RunPlan, RunReport

#: Host of a worker of the calling process.
HOST = "local"


class LocalHandle:
    """A worker of the calling process."""

    def __init__(self, worker_id: str, spec: WorkerSpec) -> None:
        self.worker_id = worker_id
        self._worker = Worker(worker_id, spec)

    def prepare(self) -> WorkerInfo:
        return self._worker.prepare(HOST)

    def describe(self, timeout_s: float) -> WorkerInfo:
        return self.prepare()

    def order(self, order: Order | SetBase, timeout_s: float) -> None:
        self._worker.order(order)

    def poll(self, timeout_s: float) -> WorkerPoll:
        return self._worker.poll()

    def holdings(self, timeout_s: float) -> Holdings:
        return self._worker.holdings()

    def request(self, flags: int, timeout_s: float) -> None:
        self._worker.request(flags)

    def kill(self) -> None:
        self._worker.shut_down()
        self._worker.join(5.0)


class LocalLauncher:
    """One worker at a time, in this process, without Ray."""

    is_fixed = True
    cluster_address = ""

    def __init__(self) -> None:
        self._handles: dict[str, LocalHandle] = {}
        self._preparing: dict[str, Future[WorkerInfo]] = {}

    def start_feeder(self, start_step: int, num_workers: int) -> None:
        """A world of one reads its own files."""

    def forget_ranks(self) -> None:
        """There is no feeder."""

    def launch_worker(self, worker_id: str, spec: WorkerSpec) -> None:
        handle = self._handles[worker_id] = LocalHandle(worker_id, spec)
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare")
        self._preparing[worker_id] = pool.submit(handle.prepare)
        pool.shutdown(wait=False)

    def advance(self) -> Sequence[LaunchEvent]:
        events: list[LaunchEvent] = []
        for worker_id, future in list(self._preparing.items()):
            if not future.done():
                continue
            del self._preparing[worker_id]
            error = future.exception()
            if error is None:
                events.append(Ready(worker_id=worker_id, info=future.result()))
            else:
                events.append(LaunchFailed(worker_id=worker_id, error=error))
        return events

    def handle(self, worker_id: str) -> WorkerHandle | None:
        return None if worker_id in self._preparing else self._handles.get(worker_id)

    def release_worker(self, worker_id: str) -> None:
        future = self._preparing.pop(worker_id, None)
        if future is not None:
            future.cancel()
        handle = self._handles.pop(worker_id, None)
        if handle is not None:
            handle.kill()

    def kill_worker(self, worker_id: str, pid: int, host: str) -> bool:
        self.release_worker(worker_id)
        return True

    def adopt(self) -> Mapping[str, WorkerHandle]:
        return {}

    def capacity(self) -> Capacity:
        return Capacity(free={HOST: 0 if self._handles else 1}, num_waiting=0)

    def draining(self) -> Mapping[str, float | None]:
        return {}

    def open_store(self) -> tuple[str, int]:
        return "", 0  # a world of one needs none

    def forget_epochs(self, run: str, before: int) -> None:
        """There is no store."""

    def release(self) -> None:
        for worker_id in list(self._handles):
            self.release_worker(worker_id)


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
    raise_failure(report, controller.failure)
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
