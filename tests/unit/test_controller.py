"""The controller over fake workers: how a run starts, ends and is released, without Ray, torch threads or data."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shoal.actors.messages import SnapshotPart, WorkerInfo, WorkerPhase, WorkerPoll, WorkerStatus
from shoal.kernels.errors import CheckpointError, ClusterError
from shoal.platform.controller import Controller, RunPlan
from shoal.platform.epochs import newest_epoch
from shoal.platform.launch import Capacity, LaunchEvent, Ready
from shoal.platform.placement import ShardingType
from shoal.platform.state import RunPhase
from shoal.platform.storage import Storage

pytestmark = pytest.mark.timeout(30)


class FakeHandle:
    """A worker that answers polls with what ``answers`` holds, the last one for ever."""

    def __init__(self, worker_id: str, answers: Sequence[dict[str, Any] | Exception]) -> None:
        self.worker_id = worker_id
        self.answers = list(answers)
        self.requests: list[int] = []
        self.is_killed = False
        self.views: list[Any] = []

    def prepare(self) -> WorkerInfo:
        return WorkerInfo(worker_id=self.worker_id, host="h", pid=1, tables=(), model_hash=7, dense_parameters=0)

    def order(self, order: Any, timeout_s: float) -> None:
        self.views.append(order.view)

    def poll(self, timeout_s: float) -> WorkerPoll:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        status = WorkerStatus(
            worker_id=self.worker_id, rank=0, epoch=0, step=0, phase=WorkerPhase.TRAINING, since_s=0.0, pid=1, host="h"
        )
        return WorkerPoll(status=status, **answer)

    def request(self, flags: int, timeout_s: float) -> None:
        self.requests.append(flags)

    def kill(self) -> None:
        self.is_killed = True


class FakeLauncher:
    """Hands out ready-made handles and records what it was asked."""

    def __init__(self, handles: Sequence[FakeHandle], on_release: Callable[[], None] = lambda: None) -> None:
        self.handles = handles
        self.num_released = 0
        self._on_release = on_release
        self._launched: dict[str, FakeHandle] = {}
        self._waiting: list[str] = []

    def start_feeder(self, start_step: int, num_workers: int) -> None:
        pass

    def forget_ranks(self) -> None:
        pass

    def launch_worker(self, worker_id: str, spec: Any) -> None:
        self._launched[worker_id] = self.handles[len(self._launched)]
        self._launched[worker_id].worker_id = worker_id
        self._waiting.append(worker_id)

    def advance(self) -> Sequence[LaunchEvent]:
        ready, self._waiting = self._waiting, []
        return [Ready(worker_id=worker_id, info=self._launched[worker_id].prepare()) for worker_id in ready]

    def handle(self, worker_id: str) -> FakeHandle | None:
        return self._launched.get(worker_id)

    def capacity(self) -> Capacity:
        return Capacity(free={}, num_waiting=len(self._waiting), text="nothing")

    def open_store(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def release(self) -> None:
        self.num_released += 1
        self._on_release()


def make_plan(folder: Any, **changes: Any) -> RunPlan:
    values: dict[str, Any] = {
        "name": "run",
        "num_workers": 1,
        "worker": None,
        "storage": Storage(str(folder)),
        "steps_total": 10,
        "sharding": lambda table: ShardingType.ROW_WISE,
        "poll_interval_s": 0.01,
    }
    return RunPlan(**{**values, **changes})


RUNNING: dict[str, Any] = {}
FINISHED: dict[str, Any] = {"summary": {"step": 10, "stopped": False}}


def test_run_is_over_only_after_it_has_been_released(tmp_path):
    phases: list[RunPhase] = []
    launcher = FakeLauncher(
        [FakeHandle("0", [RUNNING, FINISHED])], on_release=lambda: phases.append(controller.report(0).phase)
    )
    controller = Controller(make_plan(tmp_path), launcher)
    assert controller.run() is RunPhase.FINISHED
    assert phases == [RunPhase.STOPPING] and controller.report(0).phase is RunPhase.FINISHED


def test_cleanup_that_fails_does_not_hide_the_end(tmp_path):
    def fail() -> None:
        raise ClusterError("gone")

    controller = Controller(make_plan(tmp_path), FakeLauncher([FakeHandle("0", [FINISHED])], on_release=fail))
    assert controller.run() is RunPhase.FINISHED and controller.report(0).phase is RunPhase.FINISHED


def test_dead_worker_ends_the_run_with_its_name(tmp_path):
    handles = [FakeHandle("0", [RUNNING]), FakeHandle("1", [ClusterError("it died")])]
    controller = Controller(make_plan(tmp_path, num_workers=2), FakeLauncher(handles))
    assert controller.run() is RunPhase.FAILED
    assert "worker w1" in controller.report(0).reason and isinstance(controller.failure, ClusterError)


def test_abort_ends_as_stopped_whatever_the_killed_workers_say(tmp_path):
    handle = FakeHandle("0", [RUNNING])
    launcher = FakeLauncher([handle], on_release=lambda: handle.answers.__setitem__(0, ClusterError("killed")))
    controller = Controller(make_plan(tmp_path), launcher)
    thread = threading.Thread(target=controller.run)
    thread.start()
    while not handle.views:
        thread.join(0.01)
    controller.abort()
    thread.join(10.0)
    assert controller.report(0).phase is RunPhase.STOPPED and controller.report(0).reason == "aborted"


def test_last_checkpoint_that_was_not_written_fails_the_run(tmp_path):
    part = SnapshotPart(epoch=0, step=10, rank=0, files=(), error="StorageFullError: disk full")
    controller = Controller(
        make_plan(tmp_path), FakeLauncher([FakeHandle("0", [RUNNING, {"parts": (part,), **FINISHED}])])
    )
    assert controller.run() is RunPhase.FAILED
    assert isinstance(controller.failure, CheckpointError) and "of step 10" in str(controller.failure)


class WaitingLauncher(FakeLauncher):
    """The cluster has no room."""

    def __init__(self) -> None:
        super().__init__([FakeHandle("0", [RUNNING])])
        self.is_waiting = threading.Event()

    def advance(self) -> Sequence[LaunchEvent]:
        self.is_waiting.set()
        return ()


@pytest.mark.parametrize(("act", "reason"), [(lambda c: c.stop("SIGINT"), "SIGINT"), (Controller.abort, "aborted")])
def test_stop_during_launch_is_heard(tmp_path, act, reason):
    launcher = WaitingLauncher()
    controller = Controller(make_plan(tmp_path), launcher)
    thread = threading.Thread(target=controller.run)
    thread.start()
    assert launcher.is_waiting.wait(10.0)
    act(controller)
    thread.join(10.0)
    report = controller.report(0)
    assert (report.phase, report.reason) == (RunPhase.STOPPED, reason) and launcher.num_released > 0


def test_workers_without_room_fail_the_start_saying_what_there_is(tmp_path):
    controller = Controller(make_plan(tmp_path, start_timeout_s=0.05), WaitingLauncher())
    assert controller.run() is RunPhase.FAILED
    assert "1 of 1 workers were not ready within 0.05 s" in controller.report(0).reason


def test_workers_that_do_not_stop_are_ended_after_the_time_allowed(tmp_path):
    handle = FakeHandle("0", [RUNNING])
    controller = Controller(make_plan(tmp_path, stop_timeout_s=0.05, checkpoint_timeout_s=0.05), FakeLauncher([handle]))
    thread = threading.Thread(target=controller.run)
    thread.start()
    while not handle.views:
        thread.join(0.01)
    controller.stop("SIGINT")
    thread.join(10.0)
    report = controller.report(0)
    assert report.phase is RunPhase.STOPPED and "workers did not end within 0.1 s" in report.reason
    assert handle.requests, "they were asked first"


def test_error_of_an_actor_is_told_by_its_first_and_last_line():
    from shoal.platform.launch_ray import told

    text = "The actor died in its creation task\n  Traceback:\n    File x\nModuleNotFoundError: No module named 'm'\n\n"
    said = told(RuntimeError(text))
    assert said == "The actor died in its creation task ... ModuleNotFoundError: No module named 'm'"
    assert told(RuntimeError("one")) == "one" and told(RuntimeError("")) == "RuntimeError"


def test_epoch_number_is_never_reused_though_no_checkpoint_was_written(tmp_path):
    epochs = []
    for _ in range(3):
        handle = FakeHandle("0", [ClusterError("it died")])
        assert Controller(make_plan(tmp_path), FakeLauncher([handle])).run() is RunPhase.FAILED
        epochs.append(handle.views[0].epoch)
    assert epochs == [0, 1, 2]  # V1
    assert newest_epoch(Storage(str(tmp_path))) == 2


def test_run_is_recorded_once_it_is_accepted(tmp_path):
    recorded: list[str] = []
    plan = make_plan(tmp_path, record=lambda: recorded.append("x"), resume="must")
    launcher = FakeLauncher([FakeHandle("0", [FINISHED])])
    assert Controller(plan, launcher).run() is RunPhase.FAILED and not recorded
    assert Controller(dataclasses.replace(plan, resume="auto"), launcher).run() is RunPhase.FINISHED and recorded
