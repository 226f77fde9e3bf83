"""The controller's state machine, invariants by number. Whole histories are in tests/sim."""

from __future__ import annotations

import dataclasses

from shoal.actors.messages import (
    Abort,
    CutOver,
    Holdings,
    Park,
    Prepare,
    PrepareProgress,
    Recover,
    Release,
    SnapshotPart,
    Start,
    WorkerInfo,
    WorkerPhase,
    WorkerStatus,
)
from shoal.kernels.spec import TableSpec
from shoal.platform.config import ScalingConfig
from shoal.platform.config_failure import FailureConfig
from shoal.platform.membership import ViewSpec
from shoal.platform.state import ControllerSpec, ControllerState
from shoal.platform.state_messages import (
    Adopted,
    AskHoldings,
    AskStop,
    CancelLaunch,
    DrainNotice,
    EndRun,
    FoundWorker,
    JournalWritten,
    KillWorker,
    LaunchWorkers,
    ManifestWritten,
    PartWritten,
    Publish,
    RunPhase,
    ScaleRequested,
    SendOrder,
    StatusSeen,
    StopOverdue,
    StopRequested,
    Tick,
    WorkerLost,
    WorkerPlaced,
    WorkerPrepared,
    WorkerSilent,
    WriteJournal,
    WriteManifest,
)

TABLE = TableSpec(name="t", num_embeddings=64, embedding_dim=4, num_blocks=4)


class Run:
    """A controller's machine with workers that do at once what they are told, unless a test says otherwise."""

    def __init__(self, low: int, high: int, *, incarnation: int = 0, **failure) -> None:
        self.now_s = 0.0
        self.state = ControllerState(
            ControllerSpec(
                scaling=ScalingConfig(num_workers=(low, high), elastic_resize_monitor_interval_s=0.0),
                failure=FailureConfig(recovery="replicated", **failure),
                view_spec=ViewSpec(run="r"),
                incarnation=incarnation,
            )
        )
        self.statuses: dict[str, WorkerStatus] = {}
        self.seen: list = []
        self.auto_journal = True

    def send(self, kind, **fields) -> list:
        self.now_s += 0.1
        out = list(self.state.handle(kind(now_s=self.now_s, **fields)))
        self.seen += out
        if self.auto_journal:
            for record in [i.record for i in out if isinstance(i, WriteJournal)]:
                out += self.send(JournalWritten, record_id=record.record_id)
        return out

    def start(self) -> Run:
        for order in self.of(LaunchWorkers, self.send(Tick)):
            for worker_id in order.worker_ids:
                self.prepared(worker_id)
        for worker_id in self.state.view.members if self.state.view else ():
            self.status(worker_id.worker_id, epoch=0, step=1, phase=WorkerPhase.TRAINING, fence=1, protected=1)
        return self

    def prepared(self, worker_id: str) -> list:
        info = WorkerInfo(
            worker_id=worker_id, host=f"h-{worker_id}", pid=1, tables=(TABLE,), model_hash=1, dense_parameters=1
        )
        return self.send(WorkerPrepared, info=info)

    def status(self, worker_id: str, holdings: Holdings | None = None, is_origin: bool = False, **changes) -> list:
        old = self.statuses.get(worker_id) or WorkerStatus(
            worker_id=worker_id, rank=-1, epoch=-1, step=0, phase=WorkerPhase.STARTING, since_s=0.0, pid=1, host="h"
        )
        self.statuses[worker_id] = dataclasses.replace(old, **changes)
        return self.send(StatusSeen, status=self.statuses[worker_id], holdings=holdings, is_origin=is_origin)

    def report(self, worker_id: str, fence: int) -> list:
        """Parked, with all it owned at snapshot 1, for itself and for its wards."""
        view = self.state.view
        rank = view.rank_of(worker_id)
        holdings = Holdings(
            worker_id=worker_id,
            view=view if rank is not None else None,
            applied=3,
            snapshots=(1,) if rank is not None else (),
            owned=view.held_by(rank) if rank is not None else view.owned_by(-1),
            protected=1,
            fence=fence,
        )
        phase = WorkerPhase.PARKED if rank is not None else WorkerPhase.STARTING
        return self.status(worker_id, holdings, phase=phase, fence=fence)

    @property
    def ids(self) -> list[str]:
        return [m.worker_id for m in self.state.view.members]

    @staticmethod
    def of(kind, instructions) -> list:
        return [i for i in instructions if isinstance(i, kind)]

    def orders(self, kind, instructions) -> list[str]:
        return [i.worker_id for i in instructions if isinstance(i, SendOrder) and isinstance(i.order, kind)]


def test_a_replacement_is_launched_while_a_silent_worker_is_awaited_and_let_go_when_it_answers():
    run = Run(3, 3, on_loss="replace").start()
    silent, *others = run.ids
    assert not run.of(LaunchWorkers, run.send(WorkerSilent, worker_id=silent, seconds=4.0))
    (launch,) = run.of(LaunchWorkers, run.send(WorkerSilent, worker_id=silent, seconds=6.0))
    assert len(launch.worker_ids) == 1 and run.state.phase is RunPhase.RUNNING
    assert run.of(CancelLaunch, run.status(silent))[0].worker_ids == launch.worker_ids
    for seconds in (4.0, 6.0):  # it is the controller whom nobody hears
        for worker_id in (silent, *others):
            assert not run.of(LaunchWorkers, run.send(WorkerSilent, worker_id=worker_id, seconds=seconds))


def test_the_first_view_waits_for_who_is_being_started_not_for_who_has_no_room():
    run = Run(1, 3)
    (launch,) = run.of(LaunchWorkers, run.send(Tick))
    first, slow, _ = launch.worker_ids
    for worker_id in (first, slow):
        run.send(WorkerPlaced, worker_id=worker_id)
    run.prepared(first)
    run.now_s += 60.0
    assert not run.of(WriteJournal, run.send(Tick)), "it has room and builds its model"
    run.prepared(slow)
    run.now_s += 60.0
    (record,) = run.of(WriteJournal, run.send(Tick))
    assert [m.worker_id for m in record.record.view.members] == [first, slow]


def test_the_first_view_is_journalled_before_anybody_joins_it():  # 1
    run = Run(2, 2)
    run.auto_journal = False
    (launch,) = run.of(LaunchWorkers, run.send(Tick))
    assert len(launch.worker_ids) == 2
    assert not run.of(WriteJournal, run.prepared(launch.worker_ids[0]))
    out = run.prepared(launch.worker_ids[1])
    (record,) = run.of(WriteJournal, out)
    assert not run.orders(Start, out)
    out = run.send(JournalWritten, record_id=record.record.record_id)
    assert sorted(run.orders(Start, out)) == sorted(launch.worker_ids) and run.state.phase is RunPhase.RUNNING


def test_orders_are_repeated_until_a_status_shows_their_effect():
    run = Run(2, 2)
    for worker_id in run.of(LaunchWorkers, run.send(Tick))[0].worker_ids:
        run.prepared(worker_id)
    assert not run.orders(Start, run.send(Tick))
    run.now_s += 5.0
    assert len(run.orders(Start, run.send(Tick))) == 2
    for worker_id in run.ids:
        run.status(worker_id, epoch=0, step=1, phase=WorkerPhase.TRAINING, fence=1)
    run.now_s += 5.0
    assert not run.orders(Start, run.send(Tick))


def grow(run: Run) -> list:
    """Ask for one worker more and have it prepared; returns what that led to."""
    (launch,) = run.of(LaunchWorkers, run.send(ScaleRequested, num_workers=len(run.ids) + 1, reason="test"))
    return run.prepared(launch.worker_ids[0]) + run.send(Tick)


def test_a_change_is_cut_over_only_when_all_are_ready_and_by_rank_0():  # 8, 9, 10
    run = Run(2, 4).start() if False else Run(2, 2).start()
    out = grow(run)
    change = run.state.change
    assert change.view.world_size == 3 and set(run.orders(Prepare, out)) == set(change.participants)
    ready = PrepareProgress(is_ready=True)
    for worker_id in change.participants[:-1]:
        assert not run.orders(CutOver, run.status(worker_id, preparing=1, prepare=ready))
    joiner = change.participants[-1]
    assert run.orders(CutOver, run.status(joiner, preparing=1, prepare=ready)) == [run.ids[0]]
    run.auto_journal = False
    out = run.status(joiner, epoch=1, step=5, phase=WorkerPhase.TRAINING, preparing=-1, protected=5)
    assert run.state.epoch == 1 and run.of(WriteJournal, out) and not run.orders(Release, out)
    run.send(JournalWritten, record_id=run.of(WriteJournal, out)[0].record.record_id)
    for worker_id in run.ids[:2]:
        out = run.status(worker_id, epoch=1, step=5, phase=WorkerPhase.TRAINING, preparing=-1, protected=5)
    assert len(run.orders(Release, out)) == 3


def test_a_drain_abandons_a_change_that_is_being_prepared():  # 8
    run = Run(1, 2).start()
    grow(run)
    assert run.state.phase is RunPhase.PREPARING
    run.status(run.ids[0], preparing=1)
    out = run.send(DrainNotice, worker_ids=(run.ids[1],), deadline_s=30.0, reason="node goes")
    assert run.orders(Abort, out + run.send(Tick)) == [run.ids[0]] or run.state.change.cause.name == "DRAIN"


def lose(run: Run, victim: str) -> list:
    return run.send(WorkerLost, worker_id=victim, reason="killed")


def test_a_recovery_is_planned_once_all_have_reported_and_suspects_are_gone():  # 1, 11
    run = Run(1, 3).start()
    a, b, c = run.ids
    out = lose(run, c)
    assert sorted(run.orders(Park, out)) == sorted([a, b]) and run.state.phase is RunPhase.RECOVERING
    epoch = run.state.incident.attempt.epoch
    assert run.of(AskHoldings, run.status(a, phase=WorkerPhase.PARKED, fence=epoch))
    run.report(a, epoch)
    assert not run.of(WriteJournal, run.report(b, epoch - 1))  # it may still change
    run.auto_journal = False
    out = run.report(b, epoch)
    (record,) = run.of(WriteJournal, out)
    assert not run.orders(Recover, out) and record.record.plan.step == 1
    out = run.send(JournalWritten, record_id=record.record.record_id)
    assert sorted(run.orders(Recover, out)) == sorted([a, b])
    for worker_id in (a, b):
        out = run.status(worker_id, epoch=epoch, phase=WorkerPhase.TRAINING, fence=epoch + 1, protected=-1)
    assert run.state.epoch == epoch and not run.orders(Release, out)  # 10: not protected again
    for worker_id in (a, b):
        out = run.status(worker_id, protected=1)
    assert len(run.orders(Release, out)) == 2 and run.state.incident is None


def test_the_outage_ends_with_the_first_new_step_of_the_slowest_member():
    run = Run(1, 3).start()
    a, b, c = run.ids
    for worker_id in (a, b):
        run.status(worker_id, applied_s=0.3)
    last_step_s = run.now_s - 0.3
    lose(run, c)
    epoch = run.state.incident.attempt.epoch
    for worker_id in (a, b):
        run.report(worker_id, epoch)
    for worker_id, feed_s in ((a, 0.2), (b, 0.7)):
        run.status(
            worker_id, epoch=epoch, phase=WorkerPhase.TRAINING, fence=epoch + 1, step=3, timings={"feed": feed_s}
        )
    out = run.status(a, step=4)
    assert "resumed" not in [told.kind for told in run.of(Publish, out)]  # b is not beyond step 3, done before
    (told,) = [told for told in run.of(Publish, run.status(b, step=5)) if told.kind == "resumed"]
    fields = dict(told.fields)
    assert fields["fed_s"] == 0.7 and fields["outage_s"] == round(run.now_s - last_step_s, 3)
    assert "resumed" not in [told.kind for told in run.of(Publish, run.status(b, step=6))]


def test_a_second_failure_takes_another_number_and_no_lower_target():  # 1, 12
    run = Run(1, 3).start()
    a, b, c = run.ids
    lose(run, c)
    first = run.state.incident.attempt.epoch
    for worker_id in (a, b):
        run.report(worker_id, first)
    out = lose(run, b)
    second = run.state.incident.attempt.epoch
    assert second > first and run.orders(Park, out) == [a] and run.state.incident.floor == 1


def test_a_worker_that_does_not_park_is_killed_and_its_end_awaited():  # 11
    run = Run(1, 3).start()
    a, b, c = run.ids
    lose(run, c)
    epoch = run.state.incident.attempt.epoch
    run.report(a, epoch)
    run.now_s += 20.0
    assert [i.worker_id for i in run.of(KillWorker, run.send(Tick))] == [b]
    run.now_s += 20.0
    assert not run.of(WriteJournal, run.send(Tick))
    assert run.of(WriteJournal, lose(run, b))


def test_below_min_the_run_waits_and_goes_on_when_one_comes():
    run = Run(2, 2, on_loss="shrink").start()
    a, b = run.ids
    lose(run, b)
    epoch = run.state.incident.attempt.epoch
    out = run.report(a, epoch)
    assert run.state.phase is RunPhase.WAITING
    (launch,) = run.of(LaunchWorkers, out)
    run.prepared(launch.worker_ids[0])
    out = run.report(launch.worker_ids[0], epoch)
    assert run.of(WriteJournal, out) and run.state.phase is RunPhase.RECOVERING


def test_a_failure_of_user_code_ends_the_run_once():  # 3, 4
    run = Run(1, 2).start()
    out = run.status(run.ids[0], phase=WorkerPhase.FAILED, error="bad id", is_origin=True)
    assert run.of(EndRun, out) == [EndRun(RunPhase.FAILED, "bad id")]
    assert not run.send(Tick) and not lose(run, run.ids[0])


def finish(run: Run) -> list:
    out = []
    for worker_id in run.ids:
        out = run.status(worker_id, phase=WorkerPhase.FINISHED, step=9)
    return out


def part(rank: int, error: str | None = None) -> SnapshotPart:
    return SnapshotPart(epoch=0, step=9, rank=rank, files=(), error=error)


def test_the_manifest_waits_for_every_part_and_the_end_for_the_manifest():  # 2, 5
    run = Run(2, 2).start()
    assert not run.of(WriteManifest, run.send(PartWritten, part=part(1)))
    assert not run.of(EndRun, finish(run))
    (order,) = run.of(WriteManifest, run.send(PartWritten, part=part(0)))
    assert [p.rank for p in order.parts] == [0, 1] and not run.of(WriteManifest, run.send(PartWritten, part=part(0)))
    out = run.send(ManifestWritten, epoch=0, step=9)
    assert run.of(EndRun, out) == [EndRun(RunPhase.FINISHED, "all steps done")]


def test_a_last_checkpoint_that_failed_fails_the_run():  # 6
    run = Run(2, 2).start()
    run.send(PartWritten, part=part(0))
    run.send(PartWritten, part=part(1, "disk full"))
    (end,) = run.of(EndRun, finish(run))
    assert end.phase is RunPhase.FAILED and "step 9" in end.reason and "disk full" in end.reason


def test_a_part_may_come_after_the_news_that_its_worker_has_finished():  # 5, 6
    run = Run(1, 1).start()
    assert not run.of(EndRun, finish(run))  # an answer to a poll has overtaken the one with the part
    assert not run.of(EndRun, run.send(Tick))
    run.send(PartWritten, part=part(0))
    (end,) = run.of(EndRun, run.send(ManifestWritten, epoch=0, step=9))
    assert end.phase is RunPhase.FINISHED
    late = Run(1, 1).start()
    finish(late)
    late.now_s += late.state.spec.limits.answer_timeout_s
    (end,) = late.of(EndRun, late.send(Tick))
    assert end.phase is RunPhase.FAILED and "step 9, was not written" in end.reason


def test_a_stop_is_asked_of_one_worker_and_an_overdue_one_ends():  # 7
    run = Run(2, 2).start()
    assert not run.send(StopOverdue, limit_s=1.0)
    assert len(run.of(AskStop, run.send(StopRequested, reason="SIGINT"))) == 1
    (end,) = run.of(EndRun, run.send(StopOverdue, limit_s=1.0))
    assert end.phase is RunPhase.STOPPED and end.reason.startswith("SIGINT")


def test_a_restarted_controller_adopts_what_workers_know():  # 13
    old = Run(1, 2).start()
    journal = tuple(i.record for i in old.seen if isinstance(i, WriteJournal))
    found = []
    for worker_id in old.ids:
        entry = old.state.roster.living[worker_id]
        holdings = Holdings(
            worker_id=worker_id, view=old.state.view, applied=1, snapshots=(), owned=old.state.view.owned_by(0)
        )
        found.append(FoundWorker(info=entry.info, status=old.statuses[worker_id], holdings=holdings))
    run = Run(1, 2, incarnation=1)
    run.send(Adopted, workers=tuple(found), journal=journal)
    assert run.state.phase is RunPhase.RUNNING and run.state.view == old.state.view
    half = Run(1, 2, incarnation=1)
    half.send(Adopted, workers=tuple(found[:1]), journal=journal)
    assert half.state.phase is RunPhase.RECOVERING and half.state.incident.attempt.epoch > old.state.epoch
