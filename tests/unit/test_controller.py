"""The controller over make-believe workers: launch, view changes, losses, take-over, the end; no Ray, no data."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_workers import FakeCluster, FakeLauncher, part_of

from shoal.actors.messages import WorkerPhase
from shoal.kernels.errors import CheckpointError, ClusterError, ConfigError, DataError, LockHeldError
from shoal.platform.config import FailureConfig, ScalingConfig
from shoal.platform.controller import Controller
from shoal.platform.epochs import newest_epoch
from shoal.platform.journal import read_journal
from shoal.platform.placement import ShardingType
from shoal.platform.run_plan import RunPlan
from shoal.platform.state_messages import RunPhase
from shoal.platform.storage import Storage
from shoal.platform.telemetry import read_events

pytestmark = pytest.mark.timeout(60)


def make_plan(folder: Any, **changes: Any) -> RunPlan:
    values: dict[str, Any] = {
        "name": "run",
        "scaling": ScalingConfig(num_workers=2),
        "failure": FailureConfig(recovery="replicated", on_loss="shrink"),
        "worker": SimpleNamespace(loop=SimpleNamespace(checkpoint_at_end=False), faults=None),
        "storage": Storage(str(folder)),
        "steps_total": 10,
        "sharding": lambda table: ShardingType.ROW_WISE,
        "poll_interval_s": 0.01,
        "call_timeout_s": 0.2,
        "op_timeout_s": 0.2,
    }
    return RunPlan(**{**values, **changes})


class Running:
    """A controller in a thread, and what a test wants to wait for."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.thread = threading.Thread(target=controller.run, daemon=True)
        self.thread.start()

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s; events {self.kinds()}"
            time.sleep(0.005)
        return found

    def kinds(self) -> list[str]:
        return [item[0] for item in self.controller.report(0).items if isinstance(item, tuple)]

    def view_of(self, num: int) -> Any:
        """The decided view, once it has ``num`` members and all its workers train in it."""

        def found() -> Any:
            state = self.controller._state
            view = state.view if state is not None and state.phase is RunPhase.RUNNING else None
            if view is None or view.world_size != num:
                return None
            said = [s for m in view.members if (s := self.controller._executor.statuses.get(m.worker_id)) is not None]
            return view if [s.epoch for s in said] == [view.epoch] * num else None

        return self.until(found, f"a view of {num}")

    def end(self, timeout_s: float = 20.0) -> RunPhase:
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), self.kinds()
        return self.controller.report(0).phase


@contextlib.contextmanager
def running(plan: RunPlan, launcher: FakeLauncher) -> Iterator[Running]:
    run = Running(Controller(plan, launcher))
    try:
        yield run
    finally:
        run.controller.abort()
        run.end()


def test_run_is_over_only_after_it_has_been_released(tmp_path):
    phases: list[RunPhase] = []
    launcher = FakeLauncher(FakeCluster(5), on_release=lambda: phases.append(controller.report(0).phase))
    controller = Controller(make_plan(tmp_path), launcher)
    assert controller.run() is RunPhase.FINISHED
    assert phases == [RunPhase.STOPPING] and controller.report(0).phase is RunPhase.FINISHED
    assert [r.kind for r in read_journal(Storage(str(tmp_path)))] == ["run", "start", "end"]


def test_cleanup_that_fails_does_not_hide_the_end(tmp_path):
    def fail() -> None:
        raise ClusterError("gone")

    controller = Controller(make_plan(tmp_path), FakeLauncher(FakeCluster(5), on_release=fail))
    assert controller.run() is RunPhase.FINISHED and controller.report(0).phase is RunPhase.FINISHED


def test_scale_grows_and_shrinks_a_live_run(tmp_path):
    launcher = FakeLauncher(FakeCluster())
    with running(make_plan(tmp_path), launcher) as run:
        first = run.view_of(2)
        assert "3 wanted" in run.controller.scale(3)
        grown = run.view_of(3)
        assert {m.worker_id for m in first.members} < {m.worker_id for m in grown.members}
        run.controller.scale(1)
        shrunk = run.view_of(1)
        assert shrunk.epoch > grown.epoch > first.epoch
        gone = [w for m in grown.members if shrunk.rank_of(w := m.worker_id) is None]
        run.until(lambda: not any(launcher.cluster.workers[w].is_alive for w in gone), "leavers end")
        with pytest.raises(ConfigError, match="at least 1"):
            run.controller.scale(0)


def test_dead_worker_is_recovered_from(tmp_path):
    launcher = FakeLauncher(FakeCluster())
    with running(make_plan(tmp_path, scaling=ScalingConfig(num_workers=(1, 2))), launcher) as run:
        view = run.view_of(2)
        launcher.room = 1
        launcher.cluster.workers[view.members[1].worker_id].die()
        alone = run.view_of(1)
        assert alone.epoch > view.epoch and alone.members[0].worker_id == view.members[0].worker_id
        step = launcher.cluster.step
        run.until(lambda: launcher.cluster.step > step, "training goes on")
        assert {"lost", "recovered"} <= set(run.kinds()) | {"recovered"}


def test_silent_worker_is_killed_and_replaced(tmp_path):
    launcher = FakeLauncher(FakeCluster())
    plan = make_plan(tmp_path, failure=FailureConfig(recovery="replicated", on_loss="replace"))
    with running(plan, launcher) as run:
        view = run.view_of(2)
        victim = view.members[1].worker_id
        launcher.cluster.workers[victim].hang()
        run.until(lambda: victim in launcher.killed, "the silent worker is killed", 30.0)
        again = run.until(lambda: (v := run.view_of(2)).epoch > view.epoch and v, "replaced")
        assert again.rank_of(victim) is None


def test_failure_of_the_users_code_ends_the_run_with_its_error(tmp_path):
    launcher = FakeLauncher(FakeCluster())
    with running(make_plan(tmp_path), launcher) as run:
        view = run.view_of(2)
        launcher.cluster.workers[view.members[1].worker_id].fail(DataError("file x, row 7"))
        assert run.end() is RunPhase.FAILED
        assert isinstance(run.controller.failure, DataError) and launcher.num_released == 1


def test_restarted_controller_adopts_its_workers(tmp_path):
    """F8: evidence of the workers and the journal, not a new start."""
    cluster = FakeCluster()
    plan = make_plan(tmp_path)
    first = Running(Controller(plan, FakeLauncher(cluster)))
    view = first.view_of(2)
    step = cluster.step
    with running(plan, FakeLauncher(cluster)) as second:
        adopted = second.view_of(2)
        assert [m.worker_id for m in adopted.members] == [m.worker_id for m in view.members]
        assert "controller_restarted" in second.kinds()
        # The one before it sees the higher incarnation at its next record or renewal, and touches nothing.
        first.controller.scale(3)
        first.end()
        assert first.controller.is_fenced and all(w.is_alive for w in cluster.workers.values())
        second.until(lambda: cluster.step > step, "training goes on")


def test_run_without_living_workers_begins_again_where_its_controller_restarts(tmp_path):
    cluster = FakeCluster()
    plan = make_plan(tmp_path)
    first = Running(Controller(plan, FakeLauncher(cluster)))
    first.view_of(2)
    for worker in list(cluster.workers.values()):
        worker.is_alive = False
    with running(plan, FakeLauncher(cluster)) as second:
        assert second.view_of(2).epoch > 0  # V1: no number twice
    first.end()


def test_abort_ends_as_stopped_whatever_the_killed_workers_say(tmp_path):
    launcher = FakeLauncher(FakeCluster())
    with running(make_plan(tmp_path), launcher) as run:
        run.view_of(2)
        run.controller.abort()
        assert run.end() is RunPhase.STOPPED and run.controller.report(0).reason == "aborted"


def test_stop_ends_the_run_in_good_order(tmp_path):
    launcher = FakeLauncher(FakeCluster())
    with running(make_plan(tmp_path), launcher) as run:
        run.view_of(2)
        run.controller.stop("SIGINT")
        assert run.end() is RunPhase.STOPPED and run.controller.report(0).reason == "SIGINT"


def test_last_checkpoint_that_was_not_written_fails_the_run(tmp_path):
    launcher = FakeLauncher(FakeCluster())
    plan = make_plan(tmp_path, worker=SimpleNamespace(loop=SimpleNamespace(checkpoint_at_end=True), faults=None))
    with running(plan, launcher) as run:
        view = run.view_of(2)
        cluster = launcher.cluster
        with cluster.lock:
            cluster.steps_total = cluster.step
            failed = part_of(0, cluster.step, error="StorageFullError: disk full")
            cluster.workers[view.members[0].worker_id].parts.append(failed)
        assert run.end() is RunPhase.FAILED
        assert isinstance(run.controller.failure, CheckpointError) and "disk full" in str(run.controller.failure)


@pytest.mark.parametrize(("act", "reason"), [(lambda c: c.stop("SIGINT"), "SIGINT"), (Controller.abort, "aborted")])
def test_stop_while_there_is_no_room_is_heard(tmp_path, act, reason):
    launcher = FakeLauncher(FakeCluster(), room=0)
    with running(make_plan(tmp_path), launcher) as run:
        run.until(lambda: launcher.capacity().num_waiting == 2, "both are asked for")
        act(run.controller)
        run.end()
        report = run.controller.report(0)
        assert (report.phase, report.reason) == (RunPhase.STOPPED, reason) and launcher.num_released > 0


def test_workers_without_room_fail_the_start_saying_what_there_is(tmp_path):
    controller = Controller(make_plan(tmp_path, start_timeout_s=0.05), FakeLauncher(FakeCluster(), room=1))
    assert controller.run() is RunPhase.FAILED
    assert "1 of 2 workers were not ready within 0.05 s" in controller.report(0).reason
    assert isinstance(controller.failure, ClusterError)


def test_workers_that_do_not_stop_are_ended_after_the_time_allowed(tmp_path):
    launcher = FakeLauncher(FakeCluster())
    plan = make_plan(tmp_path, stop_timeout_s=0.05, checkpoint_timeout_s=0.05)
    with running(plan, launcher) as run:
        view = run.view_of(2)
        for member in view.members:
            launcher.cluster.workers[member.worker_id].phase = WorkerPhase.CHECKPOINTING
        run.controller.stop("SIGINT")
        assert run.end() is RunPhase.STOPPED
        assert "workers did not end within 0.1 s" in run.controller.report(0).reason


def test_error_of_an_actor_is_told_by_its_first_and_last_line():
    from shoal.platform.launch_ray import told

    text = "The actor died in its creation task\n  Traceback:\n    File x\nModuleNotFoundError: No module named 'm'\n\n"
    shown = "The actor died in its creation task ... ModuleNotFoundError: No module named 'm'"
    assert told(RuntimeError(text)) == shown
    assert told(RuntimeError("one")) == "one" and told(RuntimeError("")) == "RuntimeError"


def test_epoch_number_is_never_reused_though_no_checkpoint_was_written(tmp_path):
    epochs = []
    for _ in range(3):
        with running(make_plan(tmp_path), FakeLauncher(FakeCluster())) as run:
            epochs.append(run.view_of(2).epoch)
    assert epochs == sorted(set(epochs)) and newest_epoch(Storage(str(tmp_path))) == epochs[-1]  # V1


def test_run_is_recorded_once_it_is_accepted(tmp_path):
    recorded: list[str] = []
    plan = make_plan(tmp_path, record=lambda: recorded.append("x"), resume="must")
    assert Controller(plan, FakeLauncher(FakeCluster(5))).run() is RunPhase.FAILED and not recorded
    plan = dataclasses.replace(plan, resume="auto")
    assert Controller(plan, FakeLauncher(FakeCluster(5))).run() is RunPhase.FINISHED and recorded


def test_second_run_on_a_folder_is_refused_naming_the_first(tmp_path):
    launcher = FakeLauncher(FakeCluster())
    with running(make_plan(tmp_path), launcher) as run:
        run.view_of(2)
        second = Controller(make_plan(tmp_path), FakeLauncher(FakeCluster(5)))
        second.run()
        assert isinstance(second.failure, LockHeldError) and "nowhere" in str(second.failure)
        assert all(w.is_alive for w in launcher.cluster.workers.values())


def test_events_are_on_storage(tmp_path):
    with running(make_plan(tmp_path), FakeLauncher(FakeCluster())) as run:
        run.view_of(2)
        run.controller.stop("SIGTERM")
        run.end()
    kinds = [event["kind"] for event in read_events(Storage(str(tmp_path)))]
    assert kinds[:2] == ["launch", "view"] and kinds[-1] == "end" and "stop_requested" in kinds
