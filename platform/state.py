"""The controller's state machine: events in, instructions out. Pure: no Ray, no clock, no I/O, no randomness.

``ControllerState.handle(event) -> [instruction]`` is the only mutator. Events say what is so; after each of them the
machine compares that with what should be (``_advance``) and tells the difference to the executor. Orders are levels,
too: what a worker should have been told by now follows from the phase and its last status, and is repeated until a
status shows the effect. Invariants, asserted by number in the test and in the simulator:

1. Nobody joins, prepares or recovers to a view before a journal record of it is durable; no epoch number is used twice
   (V1, F4).
2. WriteManifest for a checkpoint is issued once, after all ranks of its view have delivered their part of it, never
   after a part failed; checkpoints of a closed epoch beyond the next one's first step are abandoned (K2).
3. EndRun is issued exactly once, and nothing is issued after it.
4. A failure of the user's own code ends the run, with the first such failure as its reason; lost workers are recovered
   from, within the budgets.
5. The run ends as finished only after every worker of the view has finished and no manifest is outstanding.
6. A run whose workers have finished, but whose last checkpoint was not written, ends as failed and names the step.
7. A stop that is overdue ends the run as stopped, whatever the workers do.
8. One view change is in flight. A cause of higher rank abandons one that is being prepared; nothing but a failure
   interrupts a cutover (V6).
9. CutOver is ordered only when every worker that has a part in the change says it is ready, and only of rank 0 (V4).
10. Release and the leavers' end come after the new view is decided, journalled and protected, and all its members are
    in it (V5).
11. A recovery is planned only when every living worker has closed all earlier epochs and has said what it holds, and
    every suspect is known to be gone (F2, F7).
12. The target of a later attempt of the same incident is never lower, except to a checkpoint (F4).
13. A restarted controller adopts the newest view that any worker or the journal knows to be decided (F8).
14. A run whose last ``failed_checkpoints_max`` checkpoints all failed ends, naming the last reason (faults row 28).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.actors.messages import BlockSet, Order, RecoveryPlan, Release, View, WorkerPhase
from shoal.kernels.errors import PlanError
from shoal.platform.config import ScalingConfig
from shoal.platform.config_failure import FailureConfig
from shoal.platform.failure import Loss, Resume, Stop, Wait
from shoal.platform.incident import (
    Attempt,
    Incident,
    Limits,
    Redo,
    Setting,
    decide_members,
    decide_recovery,
    is_collected,
    known_view,
    last_step_s,
    park_order,
    recover_order,
    restoring_problem,
    resumed,
    suspects,
)
from shoal.platform.ledger import CheckpointLedger
from shoal.platform.membership import ViewSpec, needs_rebalance, plan_view
from shoal.platform.roster import Roster, WorkerEntry
from shoal.platform.scaling import (
    ScalingDecision,
    ScalingSnapshot,
    decide_abort,
    decide_checkpoint,
    decide_demand,
    decide_scaling,
    worker_bounds,
)
from shoal.platform.state_messages import (
    Adopted,
    AskCheckpoint,
    AskHoldings,
    AskStop,
    CancelLaunch,
    Cause,
    DrainNotice,
    EndRun,
    Event,
    Instruction,
    JournalRecord,
    JournalWritten,
    KillWorker,
    LaunchFailed,
    LaunchWorkers,
    ManifestWritten,
    PartWritten,
    Publish,
    RebalanceRequested,
    RecordKind,
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
from shoal.platform.view_change import (
    ViewChange,
    abort_order,
    are_all_in,
    cutover_order,
    find_trouble,
    is_decided,
    is_prepared,
    prepare_order,
    preparing_problem,
    start_order,
)

#: Deadline assumed for a drain that names none (Ray: 30 s).
DRAIN_DEFAULT_S = 30.0
#: A pass that changes the phase is followed by another; more than these in a row would be a cycle.
_PASSES_MAX = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControllerSpec:
    """What the controller's state machine needs to know of its run."""

    scaling: ScalingConfig
    failure: FailureConfig
    #: ``replicate`` is decided for each view by the hosts of its members.
    view_spec: ViewSpec
    limits: Limits = dataclasses.field(default_factory=Limits)
    #: Number of this controller process, from 0; in the names of its workers and files (F7).
    incarnation: int = 0
    #: Epoch number to begin with: higher than any on storage (V1).
    first_epoch: int = 0
    #: The checkpoint the run starts from; None: step 0.
    durable_step: int | None = None
    #: The loop takes a checkpoint when it ends.
    has_final_checkpoint: bool = True
    #: (step of a checkpoint, worker id, its blocks) -> what that worker reads of it (``shard_host.Restore``).
    make_restore: Callable[[int, str, BlockSet], Any] = lambda step, worker_id, blocks: None


@dataclasses.dataclass
class _Settling:
    """A decided view whose other rows are not dropped yet (V5), and what to say once they are."""

    view: View
    record_id: int
    #: Snapshot that must be protected under the view first; -1: none.
    protect: int = -1
    incident: Incident | None = None


class ControllerState:
    """State of one run, from the first launch to its end."""

    def __init__(self, spec: ControllerSpec) -> None:
        self.spec = spec
        self.phase = RunPhase.STARTING
        self.view: View | None = None
        self.roster = Roster(f"w{spec.incarnation}.")
        self.ledger = CheckpointLedger(spec.durable_step)
        self.change: ViewChange | None = None
        self.incident: Incident | None = None
        #: The operator's number of workers; None: the configuration's.
        self.target: int | None = None
        self.summary: Any = None
        #: Losses counted by the budgets, oldest first.
        self.losses: list[Loss] = []
        self.now_s = 0.0
        self._out: list[Instruction] = []
        self._next_epoch = spec.first_epoch
        self._num_records = 0
        self._written: set[int] = set()
        self._views: dict[int, View] = {}
        self._start: View | None = None
        self._start_record = -1
        self._settling: _Settling | None = None
        self._redo: Redo | None = None
        self._rebalance: RebalanceRequested | None = None
        #: Epoch for which evenness has been looked at, and what was found.
        self._evenness: tuple[int, str | None] = (-1, None)
        self._last_change_s = float("-inf")
        self._lacking: tuple[int, float] | None = None
        self._retry_at_s, self._num_retries = 0.0, 0
        self._stop_reason: str | None = None
        self._stop_asked_s = self._saved_s = float("-inf")
        self._asked_s: dict[str, float] = {}
        self._is_adopted = False
        self._launch_retry_s, self._launch_error = 0.0, ""
        self._began_s: float | None = None

    @property
    def durable_step(self) -> int | None:
        """Newest checkpoint that counts; None: there is none."""
        return self.ledger.durable_step

    @property
    def epoch(self) -> int:
        """Epoch of the decided view; -1 before the first."""
        return -1 if self.view is None else self.view.epoch

    def handle(self, event: Event) -> Sequence[Instruction]:
        """Advance by one event. Events after the end are ignored (invariant 3)."""
        if self.phase.is_over:
            return ()
        self.now_s = max(self.now_s, event.now_s)
        self._out = []
        self._note(event)
        for _ in range(_PASSES_MAX):
            if self.phase.is_over or not self._advance():
                break
        else:
            raise AssertionError(f"the controller goes round in circles: {self.phase}")
        if not self.phase.is_over:
            self._send_orders()
        out, self._out = self._out, []
        return out

    # ---- facts ----------------------------------------------------------------------------------------------------

    def _note(self, event: Event) -> None:
        match event:
            case Tick():
                pass
            case WorkerPrepared():
                self._worker_prepared(event)
            case WorkerPlaced(worker_id=worker_id):
                if worker_id in self.roster.pending:
                    self.roster.starting.add(worker_id)
            case StatusSeen(status=status):
                if (entry := self.roster.living.get(status.worker_id)) is not None:
                    entry.see(event)
                self._tell_resumed()
            case WorkerSilent(worker_id=worker_id, seconds=seconds):
                if (entry := self.roster.living.get(worker_id)) is not None:
                    entry.silent_s = seconds
            case WorkerLost(worker_id=worker_id, reason=reason):
                self._worker_lost(worker_id, reason)
            case LaunchFailed():
                self._launch_failed(event)
            case ScaleRequested(num_workers=number, reason=reason):
                self.target = max(1, number)
                self._retry_at_s = self.now_s
                self._journal(RecordKind.TARGET, None, reason=reason)
                self._publish("scale", workers=number, reason=reason)
            case DrainNotice(worker_ids=worker_ids, deadline_s=deadline_s, reason=reason):
                self._drain(worker_ids, deadline_s, reason)
            case RebalanceRequested():
                self._rebalance = event
            case StopRequested(reason=reason):
                if self._stop_reason is None:
                    self._stop_reason = reason
                    self._publish("stop_requested", reason=reason)
            case StopOverdue(limit_s=limit_s):
                if self._stop_reason is not None:
                    self._end(RunPhase.STOPPED, f"{self._stop_reason}; workers did not end within {limit_s:g} s")
            case PartWritten():
                self._part_written(event)
            case ManifestWritten(epoch=epoch, step=step, error=error):
                self.ledger.written(epoch, step, error)
                if error is None:
                    self._publish("checkpoint", step=step)
                else:
                    self._publish("checkpoint_failed", step=step, error=error)
                    self._check_checkpoints()
            case JournalWritten(record_id=record_id):
                self._written.add(record_id)
            case Adopted():
                self._adopt(event)

    def _worker_prepared(self, event: WorkerPrepared) -> None:
        info = event.info
        known = next((e.info for e in self.roster.living.values()), None)
        if info.worker_id in self.roster.living or info.worker_id in self.roster.lost:
            return
        was_cancelled = info.worker_id not in self.roster.pending
        entry = self.roster.add(info, event.now_s)
        if known is not None and known.model_hash != info.model_hash:
            text = f"workers {known.worker_id} and {info.worker_id} built different models"
            if self.view is None:
                self._end(RunPhase.FAILED, f"{text}. The model factory must be deterministic")
            entry.leave_reason = text
        elif was_cancelled:
            entry.leave_reason = "not needed any more"

    def _worker_lost(self, worker_id: str, reason: str) -> None:
        if worker_id in self.roster.lost:
            return
        was_asked = worker_id in self.roster.living and self.roster.living[worker_id].leave_reason is not None
        entry = self.roster.remove(worker_id, reason)
        if entry is None or was_asked:
            return
        self._publish("lost", worker=worker_id, reason=reason)
        if self.incident is not None and self.view is not None and self.view.rank_of(worker_id) is not None:
            self.incident.lost.append(worker_id)

    def _launch_failed(self, event: LaunchFailed) -> None:
        for worker_id in event.worker_ids:
            self.roster.remove(worker_id, event.reason)
        self._publish("launch_failed", workers=list(event.worker_ids), reason=event.reason)
        if event.is_fatal:
            self._end(RunPhase.FAILED, event.reason)
        self._launch_retry_s, self._launch_error = self.now_s + self.spec.limits.retry_s, event.reason

    def _drain(self, worker_ids: Sequence[str], deadline_s: float | None, reason: str) -> None:
        deadline_s = DRAIN_DEFAULT_S if deadline_s is None else deadline_s
        for worker_id in worker_ids:
            entry = self.roster.living.get(worker_id)
            if entry is not None and entry.drain_at_s is None:
                entry.drain_at_s = self.now_s + deadline_s
                self._publish("drain", worker=worker_id, deadline_s=deadline_s, reason=reason)

    def _part_written(self, event: PartWritten) -> None:
        part = event.part
        parts = self.ledger.add(part, self._views.get(part.epoch))
        if part.error is not None:
            self._publish("checkpoint_failed", step=part.step, rank=part.rank, error=part.error)
            self._check_checkpoints()
        if parts is not None:
            self._out.append(WriteManifest(part.epoch, part.step, parts))

    def _check_checkpoints(self) -> None:
        """Invariant 14."""
        reason = self.ledger.health.stop_reason(self.spec.limits.failed_checkpoints_max)
        if reason is not None:
            self._end(RunPhase.FAILED, reason)

    # ---- what should be -------------------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """One pass; True: something changed that another pass may build on."""
        if self._check_failed():
            return False
        if self._learn_view():
            return True
        match self.phase:
            case RunPhase.STARTING:
                return self._starting()
            case RunPhase.RUNNING | RunPhase.STOPPING:
                return self._running()
            case RunPhase.PREPARING:
                return self._preparing()
            case RunPhase.CUTTING_OVER:
                return self._cutting_over()
        assert self.incident is not None
        return self._collecting() if self.incident.attempt.decision is None else self._restoring()

    def _check_failed(self) -> bool:
        """Invariant 4. A victim's failure waits a moment for its cause, and any for a checkpoint in progress."""
        limits = self.spec.limits
        failed = [e for e in self.roster.living.values() if e.failed_s is not None]
        if not failed:
            return False
        first = min(failed, key=lambda e: (not e.is_origin, e.failed_s or 0.0, e.worker_id))
        waited_s = self.now_s - min(e.failed_s or 0.0 for e in failed)
        is_saving = any(e.is_saving for e in self.roster.living.values())
        if is_saving and waited_s < limits.saving_timeout_s:
            return True
        if first.is_origin or waited_s >= limits.cause_timeout_s or len(failed) == len(self.roster.living):
            error = first.status.error if first.status is not None else None
            self._end(RunPhase.FAILED, error or f"worker {first.worker_id} failed", worker=first.worker_id)
        return True

    def _learn_view(self) -> bool:
        """A change that was abandoned when it took too long was decided after all (V4)."""
        newest = max((e.epoch for e in self.roster.living.values()), default=-1)
        if self.phase not in (RunPhase.RUNNING, RunPhase.STOPPING, RunPhase.PREPARING) or newest <= self.epoch:
            return False
        if self.change is not None:
            self._abandon(f"epoch {newest} was decided", is_fault=False)
        self._adopt_decided(self._views[newest], "decided after it was abandoned")
        return True

    def _starting(self) -> bool:
        limits = self.spec.limits
        if self._start is not None:
            if not self._is_written(self._start_record):
                return False
            self.view, self.phase = self._start, RunPhase.RUNNING
            self._publish("view", epoch=self.epoch, workers=self.view.world_size, reason="start")
            self._settling = _Settling(self.view, self._start_record)
            return True
        if self._stop_reason is not None:
            self._end(RunPhase.STOPPED, self._stop_reason)
            return False
        self._meet_demand()
        least, wanted = worker_bounds(self.spec.scaling, self.target)
        ready = self.roster.spares(None)
        if self._began_s is None:
            self._began_s = self.now_s
        if len(ready) < least and self.now_s - self._began_s > limits.start_timeout_s:
            reason = f"only {len(ready)} of at least {least} workers started within {limits.start_timeout_s:g} s"
            self._end(RunPhase.FAILED, f"{reason}. {self._launch_error}".strip())
            return False
        # Who has room and builds its model comes soon: without it the run would have to grow at once, or in a while.
        is_settled = bool(ready) and self.now_s - ready[-1].ready_s >= limits.start_settle_s
        is_settled = is_settled and not self.roster.starting
        if len(ready) < wanted and not (len(ready) >= least and is_settled):
            return False
        chosen = ready[:wanted]
        try:
            view = self._plan(None, [e.worker_id for e in chosen], {})
        except PlanError as error:
            self._end(RunPhase.FAILED, str(error))
            return False
        self._start, self._start_record = view, self._journal(RecordKind.START, view, step=self.durable_step or 0)
        return False

    def _running(self) -> bool:
        assert self.view is not None
        if self._trouble():
            return True
        if self._finish():
            return self.phase is RunPhase.RECOVERING
        if self._stop_reason is not None:
            self.phase = RunPhase.STOPPING
            self._ask_stop()
        self._settle()
        if self.phase is RunPhase.STOPPING or any(e.phase is WorkerPhase.FINISHED for e in self.roster.living.values()):
            return False
        self._meet_demand()
        self._save_before_drain()
        if self._settling is not None or self.now_s < self._retry_at_s or not are_all_in(self.view, self.roster):
            return False
        decision = self._decide_scaling()
        if decision is not None:
            keep = [m.worker_id for m in self.view.members if m.worker_id not in decision.leavers]
            return self._begin_change(decision.cause, [*keep, *decision.joiners], decision.replaced, decision.reason)
        if self._rebalance is not None:
            wish, self._rebalance = self._rebalance, None
            members = [m.worker_id for m in self.view.members]
            if any(owner >= len(members) for owners in wish.placement.values() for owner in owners):
                self._publish("refused", cause="rebalance", reason="the number of workers has changed")
                return False
            return self._begin_change(Cause.REBALANCE, members, {}, wish.reason, wish.placement)
        return False

    def _preparing(self) -> bool:
        change = self.change
        assert change is not None and self.view is not None
        if self._trouble():
            return True
        if any(e.phase is WorkerPhase.FINISHED for e in self.roster.members(self.view)):
            return self._abandon("training ends", is_fault=False)
        if self._stop_reason is not None:
            return self._abandon(f"the run is to stop: {self._stop_reason}", is_fault=False)
        self._meet_demand()
        problem = preparing_problem(
            change, self.roster, self.spec.limits, self.spec.failure.prepare_timeout_s, self.now_s
        )
        if problem is not None:
            return self._abandon(problem)
        unwanted = decide_abort(self._snapshot(), self.spec.scaling)
        if unwanted is not None:
            return self._abandon(unwanted, is_fault=False)
        higher = self._decide_scaling()
        if higher is not None:
            return self._abandon(f"{higher.cause.name.lower()} goes first: {higher.reason}", is_fault=False)
        if self._is_written(change.record_id) and is_prepared(change, self.roster):
            self.phase, change.cut_over_s = RunPhase.CUTTING_OVER, self.now_s
            return True
        return False

    def _cutting_over(self) -> bool:
        change = self.change
        assert change is not None and change.cut_over_s is not None and self.view is not None
        if is_decided(change.view, self.roster):
            self._decided(change)
            return True
        if self._trouble() or self._trouble(change.view):
            return True
        if all(e.phase is WorkerPhase.FINISHED for e in self.roster.members(self.view)):
            return self._abandon("training ends", is_fault=False)
        if self.now_s - change.cut_over_s > self.spec.limits.cutover_timeout_s:
            return self._abandon(f"not cut over after {self.spec.limits.cutover_timeout_s:g} s")
        return False

    def _decided(self, change: ViewChange) -> None:
        cut_over_s = change.cut_over_s or self.now_s
        self._adopt_decided(
            change.view,
            change.reason,
            cause=change.cause.name.lower(),
            prepare_s=round(cut_over_s - change.began_s, 3),
            cutover_s=round(self.now_s - cut_over_s, 3),
        )
        self.change = None
        self._num_retries = 0

    def _adopt_decided(self, view: View, reason: str, **fields: Any) -> None:
        """``view`` was decided by its members; it is journalled before anybody drops anything (V5)."""
        step = max(e.step for e in self.roster.living.values() if e.epoch == view.epoch)
        self._enter_view(view, step)
        self._settling = _Settling(view, self._journal(RecordKind.DECIDED, view, step=step, reason=reason))
        self._publish("view", epoch=view.epoch, workers=view.world_size, step=step, reason=reason, **fields)
        self.phase = RunPhase.RUNNING

    def _enter_view(self, view: View, step: int) -> None:
        assert view.epoch > self.epoch, "epochs rise (V1)"
        self.ledger.close(self.epoch, step)
        self.view, self._views[view.epoch] = view, view
        self._last_change_s = self.now_s

    def _tell_resumed(self) -> None:
        redo = self._redo
        fields = None if redo is None else resumed(redo, self.roster, self.now_s)
        if redo is not None and fields is not None:
            self._publish("resumed", epoch=redo.view.epoch, step=redo.step, **fields)
            self._redo = None

    def _settle(self) -> None:
        """Invariant 10."""
        settling = self._settling
        if settling is None or not self._is_written(settling.record_id) or not are_all_in(settling.view, self.roster):
            return
        members = self.roster.members(settling.view)
        if any(e.status is None or e.status.protected < settling.protect for e in members):
            return
        self._settling, self._start = None, None
        if self.incident is not None:
            self._publish("protected", epoch=settling.view.epoch, seconds=round(self.now_s - self.incident.began_s, 3))
            self.incident = None
        for entry in self.roster.usable():
            if settling.view.rank_of(entry.worker_id) is not None:
                entry.released = settling.view.epoch
                self._out.append(SendOrder(entry.worker_id, Release(epoch=settling.view.epoch)))
            elif entry.epoch >= 0 or entry.phase in (WorkerPhase.LEFT, WorkerPhase.PARKED):
                entry.leave_reason = f"not in epoch {settling.view.epoch}"

    # ---- the end --------------------------------------------------------------------------------------------------

    def _ask_stop(self) -> None:
        assert self.view is not None
        if self.now_s - self._stop_asked_s < self.spec.limits.resend_s:
            return
        busy = [e for e in self.roster.members(self.view) if e.phase is not WorkerPhase.FINISHED]
        if busy:
            self._stop_asked_s = self.now_s
            self._out.append(AskStop(busy[0].worker_id, self._stop_reason or ""))

    def _finish(self) -> bool:
        """End once all have finished and no complete checkpoint waits for its manifest (5, 6)."""
        assert self.view is not None
        members = self.roster.members(self.view)
        if not members or any(e.phase is not WorkerPhase.FINISHED for e in members):
            return False
        living = [e.worker_id for e in members]
        if self.ledger.waits_for(self.epoch, living):
            return True
        self.summary = next((e.summary for e in members if e.summary is not None), None)
        step = members[0].step
        why = self.ledger.not_written.get(step)
        if why is not None:
            self._end(RunPhase.FAILED, f"the last checkpoint, of step {step}, was not written: {why}")
        elif self._stop_reason is not None and not self._lacks_checkpoint(step):
            self._end(RunPhase.STOPPED, self._stop_reason)
        elif not self._lacks_checkpoint(step):
            self._end(RunPhase.FINISHED, "all steps done")
        elif len(members) < self.view.world_size or self._is_adopted:
            # A part of the last checkpoint died with its worker, or with the controller that had been given it.
            self._is_adopted = False
            self._begin_incident(f"a part of the last checkpoint, of step {step}, is lost", None)
        elif self._lacks_since(step) + self.spec.limits.answer_timeout_s < self.now_s:
            self._end(RunPhase.FAILED, f"the last checkpoint, of step {step}, was not written")
        # Else its parts may be in an answer to a poll that a later one has overtaken.
        return True

    def _lacks_since(self, step: int) -> float:
        """When it was first seen that all have finished, but the checkpoint of ``step`` is not there."""
        if self._lacking is None or self._lacking[0] != step:
            self._lacking = (step, self.now_s)
        return self._lacking[1]

    def _lacks_checkpoint(self, step: int) -> bool:
        return self.spec.has_final_checkpoint and self.durable_step != step

    def _end(self, phase: RunPhase, reason: str, **fields: Any) -> None:
        if self.phase.is_over:
            return
        self.phase = phase
        self._publish("end", phase=phase.value, reason=reason, **fields)
        self._out.append(EndRun(phase, reason))

    # ---- planned changes ------------------------------------------------------------------------------------------

    def _decide_scaling(self) -> ScalingDecision | None:
        return decide_scaling(self._snapshot(), self.now_s, self.spec.scaling, self.spec.failure)

    def _snapshot(self) -> ScalingSnapshot:
        """What scaling is decided from. Standbys are what is left once the view has its number of workers."""
        spec, roster = self.spec, self.roster
        members = [] if self.view is None else [e for e in roster.members(self.view) if e.is_usable]
        spares = roster.spares(self.view)
        has_standby = spec.failure.on_loss == "standby"
        _, wanted = worker_bounds(spec.scaling, self.target)
        gap = max(0, wanted - sum(e.drain_at_s is None for e in members))
        ready = spares[:gap] if has_standby else spares
        # Who starts already comes before who waits for room.
        coming = sorted(roster.pending, key=lambda w: w not in roster.starting)
        num_coming = max(0, gap - len(ready)) if has_standby else len(coming)
        standby = [e.worker_id for e in spares[len(ready) :]] + coming[num_coming:]
        coming = coming[:num_coming]
        change = self.change
        return ScalingSnapshot(
            members=tuple(e.as_placed() for e in members),
            ready=tuple(e.as_placed() for e in ready),
            ready_since_s=min((e.ready_s for e in ready), default=0.0),
            starting=tuple(w for w in coming if w in roster.starting),
            pending=tuple(w for w in coming if w not in roster.starting),
            standby=tuple(standby),
            target=self.target,
            draining={e.worker_id: e.drain_at_s for e in roster.usable() if e.drain_at_s is not None},
            rebalance=self._unevenness(),
            in_flight=None if change is None else change.cause,
            in_flight_members=() if change is None else tuple(m.worker_id for m in change.view.members),
            is_cutting_over=self.phase is RunPhase.CUTTING_OVER,
            last_change_s=self._last_change_s,
        )

    def _expected(self) -> ScalingSnapshot:
        """The snapshot without members that have been silent for a while, where lost ones are replaced: a new process
        takes seconds to start, and does so while it is awaited that an exchange with the silent one fails (F1). One
        that answers again after all makes the new one superfluous. If all are silent, the network is."""
        snapshot = self._snapshot()
        silent_s = {m: self.roster.living[m.worker_id].silent_s for m in snapshot.members}
        if not self._replaces_lost or 0.0 not in silent_s.values():
            return snapshot
        limit_s = self.spec.limits.answer_timeout_s
        return dataclasses.replace(snapshot, members=tuple(m for m in snapshot.members if silent_s[m] <= limit_s))

    @property
    def _replaces_lost(self) -> bool:
        return self.spec.failure.loss_policy(is_elastic=self.spec.scaling.is_elastic) == "replace"

    def _unevenness(self) -> str | None:
        """Looked at once per view: it depends on nothing else."""
        if self.view is None:
            return None
        if self._evenness[0] != self.epoch:
            spec = self._setting().spec_for(self.view.hosts)
            self._evenness = (self.epoch, needs_rebalance(self.view, self._tables(), spec))
        return self._evenness[1]

    def _save_before_drain(self) -> None:
        """A checkpoint at once where all workers will be gone before a new one can take over (V6)."""
        if self.now_s - self._saved_s < self.spec.limits.saving_timeout_s:
            return
        reason = decide_checkpoint(self._snapshot(), self.now_s)
        if reason is not None and self.view is not None:
            self._saved_s = self.now_s
            self._publish("checkpoint_asked", reason=reason)
            self._out.append(AskCheckpoint(self.view.members[0].worker_id, reason))

    def _meet_demand(self) -> None:
        """Open as many placement groups as workers are wanted, and let go of those that are not."""
        if self._stop_reason is not None:
            return
        demand = decide_demand(self._expected(), self.now_s, self.spec.scaling, self.spec.failure)
        num_open = demand.num_open + demand.num_open_standby
        if num_open and self.now_s >= self._launch_retry_s:
            self._publish("launch", workers=num_open, reason=demand.reason)
            self._out.append(LaunchWorkers(self.roster.name_new(num_open, self.now_s), demand.reason))
        busy = () if self.change is None else self.change.participants
        cancelled = [w for w in demand.cancel if w in self.roster.pending]
        for worker_id in cancelled:
            self.roster.drop_pending(worker_id)
        if cancelled:
            self._out.append(CancelLaunch(tuple(cancelled), demand.reason))
        for worker_id in demand.cancel:
            entry = self.roster.get(worker_id)
            if entry is not None and worker_id not in busy:
                entry.leave_reason = f"not needed: {demand.reason}"

    def _begin_change(
        self,
        cause: Cause,
        members: Sequence[str],
        replaced: Mapping[str, str],
        reason: str,
        placement: Mapping[str, tuple[int, ...]] | None = None,
    ) -> bool:
        assert self.view is not None and self.change is None
        try:
            view = self._plan(self.view, members, replaced)
        except PlanError as error:
            self._back_off()
            self._publish("refused", cause=cause.name.lower(), reason=str(error))
            return False
        if placement is not None:
            view = dataclasses.replace(view, placement=placement)
        record = self._journal(RecordKind.PREPARE, view, reason=reason)
        self.change = ViewChange(view, self.view, cause, reason, self.now_s, record)
        self.phase = RunPhase.PREPARING
        self._publish("prepare", epoch=view.epoch, workers=view.world_size, cause=cause.name.lower(), reason=reason)
        return True

    def _abandon(self, reason: str, *, is_fault: bool = True) -> bool:
        """The change will not be: whoever prepares it is told so (V2, V6)."""
        assert self.change is not None
        self._publish("abort", epoch=self.change.epoch, cause=self.change.cause.name.lower(), reason=reason)
        self.change, self.phase = None, RunPhase.RUNNING
        if is_fault:
            self._back_off()
        return True

    def _back_off(self) -> None:
        limits = self.spec.limits
        self._retry_at_s = self.now_s + min(limits.retry_max_s, limits.retry_s * 2.0**self._num_retries)
        self._num_retries = min(self._num_retries + 1, 30)

    def _plan(self, base: View | None, members: Sequence[str], replaced: Mapping[str, str]) -> View:
        """A view with the next epoch number. Raises PlanError."""
        chosen = [self.roster.living[worker_id] for worker_id in members]
        spec = self._setting().spec_for([e.info.host for e in chosen])
        candidates = [e.as_member() for e in chosen]
        plan = plan_view(base, self._next_epoch, candidates, self._tables(), spec, replaced=replaced)
        self._next_epoch += 1
        return plan.view

    # ---- failures -------------------------------------------------------------------------------------------------

    def _trouble(self, view: View | None = None) -> bool:
        """Begin an incident if the present view, or ``view``, cannot go on."""
        view = view or self.view
        assert view is not None
        found = find_trouble(view, self.roster, self.spec.limits)
        if found is None or self._is_all_finished(view):
            return False
        reason, witness = found
        self._begin_incident(reason, witness)
        return True

    def _is_all_finished(self, view: View) -> bool:
        """The living members are done: the end is decided by what is on storage, not by who is gone."""
        members = self.roster.members(view)
        return bool(members) and all(e.phase is WorkerPhase.FINISHED for e in members)

    def _begin_incident(self, reason: str, witness: WorkerEntry | None) -> None:
        """Failure goes before everything (V6): whatever was prepared is void, since its number is below the fence."""
        attempt = Attempt(self._take_epoch(), self.now_s)
        well_s = last_step_s(self.roster)
        if well_s is None:
            status = None if witness is None else witness.status
            well_s = self.now_s if witness is None or status is None else witness.seen_s - status.since_s
        if self.change is not None:
            self._publish("abort", epoch=self.change.epoch, cause=self.change.cause.name.lower(), reason=reason)
        earlier = self.incident
        self.incident = Incident(reason, self.now_s, min(well_s, self.now_s), attempt)
        if earlier is not None:  # its view was decided but not protected yet
            self.incident.floor = earlier.floor
            self.incident.num_attempts = earlier.num_attempts + 1
        if self.view is not None:
            gone = [m.worker_id for m in self.view.members if m.worker_id not in self.roster.living]
            self.incident.lost.extend(gone)
        self.change, self._settling, self._start, self._redo = None, None, None, None
        self.phase = RunPhase.RECOVERING
        self._publish("failure", epoch=self.epoch, attempt=attempt.epoch, reason=reason)

    def _retry(self, reason: str) -> bool:
        """Another attempt, with another number (F4)."""
        incident = self.incident
        assert incident is not None
        incident.attempt = Attempt(self._take_epoch(), self.now_s)
        incident.num_attempts += 1
        incident.num_counted = -1
        self.phase = RunPhase.RECOVERING
        self._publish("retry", attempt=incident.attempt.epoch, number=incident.num_attempts, reason=reason)
        return True

    def _collecting(self) -> bool:
        incident = self.incident
        assert incident is not None and incident.attempt.decision is None
        decision = suspects(incident, self.roster, self.spec.limits, self.now_s)
        for worker_id in decision.suspects:
            self._kill(worker_id, decision.reason)
        if self._replaces_lost:
            # A new process takes seconds to start: it does so while the end of the old one is awaited.
            self._meet_demand()
        self._ask_holdings(incident.attempt)
        if not is_collected(incident.attempt, self.roster):
            return False
        base = known_view(self.view, self.roster)
        assert base is not None
        if self.view is None or base.epoch > self.view.epoch:
            self.view, self._views[base.epoch] = base, base
        self._count_loss(incident, base)
        choice = decide_members(incident, base, self.roster, self._setting(), self.losses, self.now_s)
        match choice:
            case Stop(reason=reason):
                phase = RunPhase.FAILED if self._stop_reason is None else RunPhase.STOPPED
                self._end(phase, reason or self._stop_reason or "no worker is left")
                return False
            case Wait():
                self._wait(incident, choice)
                return False
        return self._begin_recovery(incident, base, choice)

    def _begin_recovery(self, incident: Incident, base: View, choice: Resume) -> bool:
        try:
            decision = decide_recovery(incident, base, choice, self.roster, self._setting())
        except PlanError as error:
            self._end(RunPhase.FAILED, str(error))
            return False
        attempt, plan = incident.attempt, decision.plan
        floor = -1 if incident.floor is None else incident.floor
        assert plan.from_checkpoint or plan.step >= floor, "the target never falls (12)"
        attempt.decision, attempt.decided_s = decision, self.now_s
        incident.floor = None if plan.from_checkpoint else plan.step
        attempt.record_id = self._journal(
            RecordKind.RECOVER, decision.view, plan=plan, step=plan.step, reason=decision.reason
        )
        incident.is_waiting, self.phase = False, RunPhase.RECOVERING
        return True

    def _count_loss(self, incident: Incident, base: View) -> None:
        """Once per attempt (budgets of F9)."""
        if incident.num_counted == incident.num_attempts:
            return
        incident.num_counted = incident.num_attempts
        lost = tuple(m.worker_id for m in base.members if m.worker_id not in self.roster.living)
        step = max((e.holdings.applied for e in self.roster.living.values() if e.holdings is not None), default=0)
        is_announced = bool(lost) and all(w in self.roster.announced for w in lost)
        self.losses.append(Loss(step=step, workers=lost, is_announced=is_announced))

    def _wait(self, incident: Incident, wait: Wait) -> None:
        self._meet_demand()
        self.phase = RunPhase.WAITING if wait.is_below_min else RunPhase.RECOVERING
        if not incident.is_waiting or incident.wait_reason != wait.reason:
            self._publish("waiting", reason=wait.reason, is_below_min=wait.is_below_min)
        incident.is_waiting, incident.wait_reason = True, wait.reason

    def _restoring(self) -> bool:
        incident = self.incident
        assert incident is not None and incident.attempt.decision is not None
        attempt, decision = incident.attempt, incident.attempt.decision
        attempt.is_ordered = attempt.is_ordered or self._is_written(attempt.record_id)
        if attempt.formed_s is None and is_decided(decision.view, self.roster):
            attempt.formed_s = self.now_s
        if are_all_in(decision.view, self.roster):
            self._recovered(incident)
            return True
        problem = restoring_problem(attempt, self.roster, self.spec.limits, self.now_s)
        return False if problem is None else self._retry(problem)

    def _recovered(self, incident: Incident) -> None:
        attempt, decision = incident.attempt, incident.attempt.decision
        assert decision is not None
        self._enter_view(decision.view, decision.plan.step)
        # With copies, what earlier attempts may need is kept until the view is protected (F4).
        protect = decision.plan.step if decision.view.buddies else -1
        self._settling = _Settling(decision.view, attempt.record_id, protect, incident)
        self._redo = Redo(incident, decision.view, decision.plan.step + decision.redone_steps, self.now_s)
        self.phase = RunPhase.RUNNING
        timings: dict[str, float] = {}
        for entry in self.roster.members(decision.view):
            for part, seconds in (entry.status.timings if entry.status is not None else {}).items():
                timings[part] = max(timings.get(part, 0.0), seconds)
        timings.pop("feed", None)  # told with the first new step
        self._publish(
            "recovered",
            epoch=decision.view.epoch,
            workers=decision.view.world_size,
            step=decision.plan.step,
            lost=sorted(set(incident.lost)),
            attempts=incident.num_attempts,
            detected_after_s=round(incident.began_s - incident.last_well_s, 3),
            decided_after_s=round(attempt.decided_s - incident.began_s, 3),
            restored_after_s=round(self.now_s - incident.began_s, 3),
            redone_steps=decision.redone_steps,
            rows_lost=decision.rows_lost,
            cause=incident.reason,
            reason=decision.reason,
            **{f"{part}_s": round(seconds, 3) for part, seconds in timings.items()},
        )

    def _kill(self, worker_id: str, reason: str) -> None:
        entry = self.roster.living.get(worker_id)
        if entry is None or entry.kill_reason is not None:
            return
        entry.kill_reason = reason
        self._publish("suspect", worker=worker_id, reason=reason)
        self._out.append(KillWorker(worker_id, reason))

    def _ask_holdings(self, attempt: Attempt) -> None:
        due = []
        for entry in self.roster.usable():
            is_at_rest = entry.phase in (
                WorkerPhase.PARKED,
                WorkerPhase.LEFT,
                WorkerPhase.FINISHED,
                WorkerPhase.STARTING,
            )
            if entry.fence < attempt.epoch or not is_at_rest or entry.has_reported(attempt.epoch):
                continue
            if self.now_s - self._asked_s.get(entry.worker_id, float("-inf")) >= self.spec.limits.resend_s / 4:
                self._asked_s[entry.worker_id] = self.now_s
                due.append(entry.worker_id)
        if due:
            self._out.append(AskHoldings(tuple(due)))

    # ---- a restarted controller -----------------------------------------------------------------------------------

    def _adopt(self, event: Adopted) -> None:
        """Invariant 13. Workers' evidence comes before the journal; what was being prepared is abandoned."""
        assert self.view is None and not self.roster.living, "adoption is the first event"
        self._is_adopted = True
        views = [r.view for r in event.journal if r.view is not None]
        self._num_records = max((r.record_id + 1 for r in event.journal), default=0)
        self.target = next((r.target for r in reversed(event.journal)), None)
        self.ledger.durable_step = event.durable_step
        for record in event.journal:
            if record.kind in (RecordKind.DECIDED, RecordKind.RECOVER) and record.view and record.step is not None:
                self.ledger.close(record.view.epoch - 1, record.step)
        for found in event.workers:
            entry = self.roster.add(found.info, event.now_s)
            entry.status, entry.holdings = found.status, found.holdings
            if found.holdings.view is not None:
                views.append(found.holdings.view)
        self._views = {view.epoch: view for view in views}
        used = [event.epoch_used, self._next_epoch - 1, *self._views]
        used += [max(f.status.epoch, f.status.fence, f.status.preparing) for f in event.workers]
        self._next_epoch = max(used) + 1
        seen = [f.holdings.view for f in event.workers if f.holdings.view is not None]
        journalled = [r.view for r in event.journal if r.view is not None and r.kind is not RecordKind.PREPARE]
        base = max(seen or journalled, key=lambda view: view.epoch, default=None)
        self._publish("adopted", workers=len(event.workers), epoch=-1 if base is None else base.epoch)
        if base is None or not event.workers:
            return  # nobody is left, or nobody was in a view yet: the run begins anew, from its newest checkpoint
        self.view = base
        self.phase = RunPhase.RUNNING
        restless = [e for e in self.roster.members(base) if e.epoch != base.epoch or not _is_at_work(e)]
        if len(self.roster.members(base)) < base.world_size or restless:
            names = ", ".join(e.worker_id for e in restless) or "a member is missing"
            self._begin_incident(f"the controller was restarted and the view is not whole: {names}", None)
            return
        # The old controller may not have journalled this view, or not have told workers to drop what they owe nobody.
        number = self._journal(RecordKind.DECIDED, base, reason="adopted")
        self._settling = _Settling(base, number, 0 if base.buddies else -1)

    # ---- small things ---------------------------------------------------------------------------------------------

    def _send_orders(self) -> None:
        due = self.roster.due_orders(self.now_s, self.spec.limits.resend_s, self._desired)
        self._out.extend(SendOrder(worker_id, order) for worker_id, order in due)

    def _desired(self, entry: WorkerEntry) -> Order | None:
        """What ``entry`` should have been told by now and does not show the effect of."""
        incident, change = self.incident, self.change
        if self.phase in (RunPhase.RECOVERING, RunPhase.WAITING):
            assert incident is not None
            if incident.attempt.decision is None:
                return park_order(incident.attempt, entry, incident.reason)
            return recover_order(incident.attempt, entry)
        if change is not None and self.phase is RunPhase.PREPARING and self._is_written(change.record_id):
            return prepare_order(change, entry)
        if change is not None and self.phase is RunPhase.CUTTING_OVER:
            return cutover_order(change, entry)
        if self._start is not None:
            return start_order(self._start, entry) if self._is_written(self._start_record) else None
        current = self._settling.view.epoch if self._settling is not None else None
        return abort_order(entry, current if change is None else change.epoch, "abandoned")

    def _setting(self) -> Setting:
        spec = self.spec
        return Setting(
            scaling=spec.scaling,
            failure=spec.failure,
            limits=spec.limits,
            view_spec=spec.view_spec,
            tables=self._tables(),
            durable_step=self.durable_step,
            target=self.target,
            is_stopping=self._stop_reason is not None,
            controller_restarts=spec.incarnation,
            make_restore=spec.make_restore,
        )

    def _tables(self) -> Sequence[Any]:
        return next((e.info.tables for e in self.roster.living.values()), ())

    def _take_epoch(self) -> int:
        self._next_epoch += 1
        return self._next_epoch - 1

    def _journal(
        self,
        kind: RecordKind,
        view: View | None,
        *,
        plan: RecoveryPlan | None = None,
        step: int | None = None,
        reason: str = "",
    ) -> int:
        record_id, self._num_records = self._num_records, self._num_records + 1
        record = JournalRecord(
            record_id=record_id, kind=kind, view=view, plan=plan, step=step, target=self.target, reason=reason
        )
        if view is not None:
            self._views[view.epoch] = view
        self._out.append(WriteJournal(record))
        return record_id

    def _is_written(self, record_id: int) -> bool:
        return record_id in self._written

    def _publish(self, kind: str, **fields: Any) -> None:
        self._out.append(Publish(kind, tuple(fields.items())))


def _is_at_work(entry: WorkerEntry) -> bool:
    return entry.phase in (
        WorkerPhase.TRAINING,
        WorkerPhase.EVALUATING,
        WorkerPhase.CHECKPOINTING,
        WorkerPhase.FINISHED,
    )
