"""The worker's protocol: events in, instructions out. Pure: no torch, Ray, clock or I/O.

``WorkerState.handle(event) -> [instruction]`` is the only mutator and is called from the step loop's thread. The events
and what an executor owes to each instruction are in ``shoal.actors.protocol_messages``. Invariants, asserted by number
in the test and by the simulator:

1. An outcome is answered with exactly one blocking instruction, the last; news while one is under way with none; news
   while waiting with exactly one. After Exit nothing is issued.
2. Epochs of views joined rise strictly; an order below the fence is ignored. Parking for an attempt, aborting a
   preparation and accepting a recovery all raise the fence (V1, F7).
3. PerformCutOver is issued only for an epoch that is prepared here and whose number came in the control word of a
   completed step, with Flag.CUTOVER; a member that sees the flag for another epoch parks (S3, V4).
4. Before a worker parks or fails its groups are destroyed (F1).
5. Whether a snapshot is taken at a boundary depends only on what headers said: all ranks do the same (F3).
6. DropOthers is issued only on Release of the view that trains here, or after an aborted preparation (V5).
7. Stop, end of data, loss of the controller and cutover are acted on at the named step, in this order of precedence,
   and only because all ranks saw them (S3).
8. Without contact for the lease a worker asks all to park, and writes nothing; without contact for ``orphan_s`` it
   ends (F7, F8).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shoal.actors.messages import (
    Abort,
    CutOver,
    Leave,
    Order,
    Park,
    Prepare,
    Recover,
    RecoveryPlan,
    Release,
    Start,
    View,
    WorkerPhase,
)
from shoal.actors.protocol_messages import (
    Background,
    BeginPreparing,
    Blocking,
    CancelPreparing,
    ControllerBack,
    ControllerSilent,
    CutOverCalled,
    CutOverDone,
    CutOverFailed,
    DestroyGroups,
    DropOthers,
    Event,
    Exit,
    FinishLoop,
    Instruction,
    Joined,
    JoinFailed,
    JoinView,
    LoopEnded,
    LoopFailed,
    News,
    OrderArrived,
    PerformCutOver,
    PerformRecover,
    PrepareFailed,
    PrepareReady,
    Protect,
    RaiseFlag,
    Recovered,
    RecoverFailed,
    RunStep,
    StepDone,
    StepFailed,
    TakeSnapshot,
    WaitForOrder,
)
from shoal.kernels.frame import Flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerRules:
    """What a worker's protocol needs to know of its job; the same on all workers."""

    #: Applied steps at which training is over.
    total_steps: int
    #: Steps between snapshots of a view with buddies (``replicated`` recovery). Other views take them only while a view
    #: change is prepared; None: so do all.
    snapshot_every_steps: int | None = None
    #: Take them without buddies too (``partial`` recovery).
    has_local_snapshots: bool = False
    #: Silence of the controller after which all ranks park and nothing is written to storage.
    lease_s: float = 60.0
    #: Silence of the controller after which a parked worker ends. Larger than ``lease_s``.
    orphan_s: float = 300.0

    def __post_init__(self) -> None:
        assert self.orphan_s > self.lease_s > 0, "orphan_s must exceed lease_s"
        assert self.snapshot_every_steps is None or self.snapshot_every_steps > 0


class WorkerState:
    """State of one worker. Attributes may be read from other threads, which see some recent value."""

    def __init__(self, worker_id: str, rules: WorkerRules) -> None:
        self.worker_id = worker_id
        self.rules = rules
        self.phase = WorkerPhase.STARTING
        #: The newest view this worker knows to be decided and is, or was, a member of.
        self.view: View | None = None
        #: Steps applied.
        self.step = 0
        #: Orders of epochs below this are void here.
        self.fence = 0
        #: The view being prepared, and whether this worker's part of that is done.
        self.preparing: View | None = None
        self.is_prepared = False
        #: Why ``preparing`` cannot be prepared here.
        self.prepare_error: str | None = None
        #: Highest snapshot known to be complete on all ranks; -1: none.
        self.protected = -1
        #: The snapshot that all ranks took last in this view; None: none that matters.
        self.newest_snapshot: int | None = None
        #: Snapshots not taken because the one before was not complete.
        self.skipped_snapshots = 0
        #: Why the worker parked, failed or left; "" otherwise.
        self.reason = ""
        #: Workers that did not answer when this one parked.
        self.unreachable: tuple[str, ...] = ()
        #: False: the controller has been silent for the lease, and nothing may be written to storage (F7).
        self.may_write = True
        self._is_over = False
        self._blocking: type = WaitForOrder
        #: The view that the blocking instruction under way leads to.
        self._target: View | None = None
        self._has_groups = False
        # Wishes that take effect when the blocking instruction under way has ended.
        self._park: Park | None = None
        self._recover: Recover | None = None
        self._leave: Leave | None = None
        self._cutover_epoch: int | None = None

    # ---- what other threads ask -----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epoch of the decided view; -1 before the first."""
        return -1 if self.view is None else self.view.epoch

    @property
    def rank(self) -> int:
        """Rank in the decided view; -1: none."""
        found = None if self.view is None else self.view.rank_of(self.worker_id)
        return -1 if found is None else found

    @property
    def is_resting(self) -> bool:
        """Whether it waits for orders: its holdings stay what they are until it gets one."""
        return self._blocking is WaitForOrder

    def is_urgent(self, order: Order) -> bool:
        """Whether ``order`` must not wait for the end of what is under way: the receiver aborts the groups at once."""
        if self._blocking is WaitForOrder:
            return False
        target = max(self.epoch, -1 if self._target is None else self._target.epoch)
        match order:
            case Leave():
                return True
            case Park(epoch=epoch):
                return epoch >= self.fence and epoch > target
            case Recover(view=view):
                return view.epoch >= self.fence and view.epoch > target
        return False

    # ---- the only mutator -----------------------------------------------------------------------------------------

    def handle(self, event: Event) -> Sequence[Instruction]:
        """Advance by one event."""
        if self._is_over:
            return ()
        if isinstance(event, News):
            answer, follow = self._handle_news(event)
            if self._blocking is not WaitForOrder:
                assert follow is None, f"{follow} while {self._blocking} is under way"
                return answer
            return self._block(answer, follow or WaitForOrder())
        assert self._blocking is not WaitForOrder, f"{event} while nothing was under way"
        return self._handle_outcome(event)

    def _block(self, background: Sequence[Background], blocking: Blocking) -> Sequence[Instruction]:
        self._blocking = type(blocking)
        self._is_over = isinstance(blocking, Exit)
        if isinstance(blocking, (JoinView, PerformCutOver, PerformRecover)):
            self._target = blocking.view
            self._has_groups = True
        elif isinstance(blocking, WaitForOrder):
            self._target = None
        return (*background, blocking)

    # ---- news -----------------------------------------------------------------------------------------------------

    def _handle_news(self, event: News) -> tuple[list[Background], Blocking | None]:
        waiting = self._blocking is WaitForOrder
        match event:
            case OrderArrived(order):
                return self._handle_order(order, waiting)
            case PrepareReady(epoch):
                self.is_prepared = self.is_prepared or self._is_preparing(epoch)
            case PrepareFailed(epoch, reason):
                if self._is_preparing(epoch):
                    self.is_prepared, self.prepare_error = False, reason
            case CutOverCalled(epoch, step):
                if waiting and self.view is None and self.is_prepared and self._is_preparing(epoch):
                    return [], self._cut_over(step)
            case ControllerSilent(seconds):
                self.may_write = self.may_write and seconds < self.rules.lease_s
                if waiting and seconds >= self.rules.orphan_s:
                    return self._destroy("orphan"), Exit(f"no controller for {seconds:.0f} s")
            case ControllerBack():
                self.may_write = True
        return [], None

    def _handle_order(self, order: Order, waiting: bool) -> tuple[list[Background], Blocking | None]:
        match order:
            case Start(view=view, restore=restore):
                is_new = self.view is None and view.epoch >= self.fence
                if waiting and is_new and view.rank_of(self.worker_id) is not None:
                    self.fence = view.epoch + 1
                    return self._cancel_preparing("the run starts"), JoinView(view, restore)
            case Prepare(view=view):
                return self._prepare(view, waiting), None
            case CutOver(epoch=epoch):
                if self.rank == 0 and self.is_prepared and self._is_preparing(epoch) and epoch >= self.fence:
                    self._cutover_epoch = epoch
            case Abort(epoch=epoch, reason=reason):
                return self._abort(epoch, reason), None
            case Release(epoch=epoch):
                if self.view is not None and epoch == self.epoch and self.phase is WorkerPhase.TRAINING:
                    return [DropOthers(self.view, self.preparing)], None
            case Park(epoch=epoch):
                if epoch > self.epoch and epoch >= self.fence:
                    self.fence = epoch
                    if waiting:
                        return self._cancel_preparing(order.reason), None
                    self._park = order
            case Recover(view=view):
                if self._accepts(order):
                    self.fence = view.epoch + 1
                    if waiting:
                        return self._recover_now(order)
                    self._recover = order
            case Leave(reason=reason):
                if waiting:
                    return self._leave_now(reason)
                self._leave = order
        return [], None

    def _prepare(self, view: View, waiting: bool) -> list[Background]:
        is_new = view.epoch >= self.fence and view.epoch > self.epoch
        is_new = is_new and (self.preparing is None or view.epoch > self.preparing.epoch)
        is_joiner = self.view is None and waiting and self.phase in (WorkerPhase.STARTING, WorkerPhase.PARKED)
        is_member = self.phase is WorkerPhase.TRAINING and self._park is None and self._recover is None
        concerned = is_member or view.rank_of(self.worker_id) is not None
        if not is_new or not concerned or not (is_joiner or is_member):
            return []
        cancelled = self._cancel_preparing(f"epoch {view.epoch} is prepared instead")
        self.preparing, self.is_prepared, self.prepare_error = view, False, None
        if is_joiner:
            self.phase, self.reason = WorkerPhase.STARTING, ""
        return [*cancelled, BeginPreparing(view)]

    def _abort(self, epoch: int, reason: str) -> list[Background]:
        if self._target is not None and self._target.epoch == epoch:
            return []  # it is being decided at this moment, by all ranks together
        if epoch > self.epoch:
            self.fence = max(self.fence, epoch + 1)
        if self.preparing is None or self.preparing.epoch > epoch:
            return []
        cancelled = self._cancel_preparing(reason)
        if self.phase is WorkerPhase.TRAINING and self.view is not None:
            return [*cancelled, DropOthers(self.view)]
        return cancelled

    def _accepts(self, order: Recover) -> bool:
        """Whether a recovery is newer than all this worker has accepted, and has a part for it."""
        if self.phase is WorkerPhase.FAILED or order.view.epoch < self.fence or order.view.epoch <= self.epoch:
            return False
        return order.view.rank_of(self.worker_id) is not None or _is_source(self.worker_id, order.plan)

    def _is_preparing(self, epoch: int) -> bool:
        return self.preparing is not None and self.preparing.epoch == epoch and self.prepare_error is None

    # ---- outcomes -------------------------------------------------------------------------------------------------

    def _handle_outcome(self, event: Event) -> Sequence[Instruction]:
        match event:
            case Joined(step=step):
                assert self._target is not None
                self._enter(self._target, step, step if self._every(self._target) is not None else None, -1)
                return self._go_on([])
            case StepDone():
                return self._step_done(event)
            case LoopEnded(step=step):
                self.phase, self.step = WorkerPhase.FINISHED, step
                return self._go_on([])
            case LoopFailed(reason=reason):
                self.phase, self.reason = WorkerPhase.FAILED, reason
                self._recover = None
                return self._go_on(self._destroy(reason))
            case CutOverDone(step=step):
                return self._cut_over_done(step)
            case Recovered(step=step):
                return self._recovered(step)
            case StepFailed(reason=reason, missing_ranks=missing):
                self._blame(self.view, missing)
                return self._park_now([], reason)
            case (
                JoinFailed(reason=reason, missing_ranks=missing)
                | CutOverFailed(reason=reason, missing_ranks=missing)
                | RecoverFailed(reason=reason, missing_ranks=missing)
            ):
                self._blame(self._target, missing)
                return self._park_now([], reason)
        raise AssertionError(f"unknown event {event!r}")

    def _step_done(self, event: StepDone) -> Sequence[Instruction]:
        """The boundary after a step: wishes of all ranks, in the order of their precedence (7)."""
        assert self.view is not None
        self.step = event.step
        first: list[Background] = []
        if event.protected > self.protected:
            self.protected = event.protected
            first.append(Protect(event.protected))
        if self._is_interrupted():
            return self._go_on(first)
        if Flag.STOP in event.flags or event.step >= self.rules.total_steps:
            return self._finish(first, Flag.STOP in event.flags)
        if Flag.CONTROLLER_LOST in event.flags:
            # Owners that all live can come back to this very boundary if it has a snapshot.
            if self._may_snapshot(event.protected):
                first.append(self._snapshot(event.step))
            return self._park_now(first, "the controller is silent")
        if Flag.CUTOVER in event.flags:
            if not self.is_prepared or not self._is_preparing(event.control):
                return self._park_now(first, f"cutover to epoch {event.control}, which is not prepared here")
            return self._block(first, self._cut_over(event.step))
        if self._is_snapshot_due(event):
            first.append(self._snapshot(event.step))
        return self._go_on(first)

    def _is_snapshot_due(self, event: StepDone) -> bool:
        """The cadence that all ranks agree on, from header data alone (5)."""
        every = None if self.view is None else self._every(self.view)
        is_due = Flag.HASTE in event.flags or (every is not None and event.step % every == 0)
        if is_due and not self._may_snapshot(event.protected):
            self.skipped_snapshots += 1
            return False
        return is_due

    def _every(self, view: View) -> int | None:
        is_periodic = bool(view.buddies) or self.rules.has_local_snapshots
        return self.rules.snapshot_every_steps if is_periodic else None

    def _may_snapshot(self, protected: int) -> bool:
        return self.newest_snapshot is None or protected == self.newest_snapshot

    def _snapshot(self, step: int) -> TakeSnapshot:
        self.newest_snapshot = step
        return TakeSnapshot(step)

    def _cut_over(self, step: int) -> PerformCutOver:
        assert self.preparing is not None
        self.phase = WorkerPhase.CUTTING_OVER
        return PerformCutOver(self.preparing, self.view, step)

    def _cut_over_done(self, step: int) -> Sequence[Instruction]:
        view = self._target
        assert view is not None
        if view.rank_of(self.worker_id) is None:
            self.phase, self.reason, self.step = WorkerPhase.LEFT, f"not in epoch {view.epoch}", step
            self._forget_preparing()
            return self._go_on([])
        self._enter(view, step, step, step)
        return self._go_on([])

    def _recovered(self, step: int) -> Sequence[Instruction]:
        view = self._target
        assert view is not None
        if view.rank_of(self.worker_id) is None:  # it only supplied rows
            self.phase = WorkerPhase.LEFT if self.view is not None else WorkerPhase.PARKED
            return self._go_on([])
        self._enter(view, step, step if self._every(view) is not None else None, -1)
        return self._go_on([])

    def _blame(self, view: View | None, missing: Sequence[int]) -> None:
        """``missing`` are ranks of ``view``. A number it does not have blames nobody."""
        known = [] if view is None else [member.worker_id for member in view.members]
        self.unreachable = tuple(known[rank] for rank in missing if rank < len(known))

    def _enter(self, view: View, step: int, snapshot: int | None, protected: int) -> None:
        """``view`` is decided, and this worker trains in it from ``step`` on."""
        assert view.epoch > self.epoch, "epochs rise (2)"
        self.view, self.step, self.phase, self.reason = view, step, WorkerPhase.TRAINING, ""
        self.fence = max(self.fence, view.epoch + 1)
        self.newest_snapshot, self.protected, self.unreachable = snapshot, protected, ()
        self._forget_preparing()

    # ---- what comes next ------------------------------------------------------------------------------------------

    def _is_interrupted(self) -> bool:
        parks = self._park is not None and self._park.epoch > self.epoch
        return parks or self._recover is not None or self._leave is not None

    def _go_on(self, first: list[Background]) -> Sequence[Instruction]:
        """The next blocking instruction, after wishes that have waited for this moment."""
        park, self._park = self._park, None
        if self._leave is not None:
            background, blocking = self._leave_now(self._leave.reason)
            return self._block([*first, *background], blocking)
        if self._recover is not None:
            order, self._recover = self._recover, None
            if order.view.epoch > self.epoch:
                background, recover = self._recover_now(order)
                return self._block([*first, *background], recover)
        if self.phase is not WorkerPhase.TRAINING:
            return self._block(first, WaitForOrder())
        if park is not None and park.epoch > self.epoch:
            return self._park_now(first, park.reason)
        if self.step >= self.rules.total_steps:
            return self._finish(first, False)
        return self._block([*first, *self._flags()], RunStep())

    def _flags(self) -> list[Background]:
        """This rank's wishes for the next header."""
        flags: list[Background] = []
        if self.preparing is not None and self.prepare_error is None:
            flags.append(RaiseFlag(Flag.HASTE))
        if self._cutover_epoch is not None and self._is_preparing(self._cutover_epoch):
            # Raised once: it counts for the step it was raised in, or not at all (S3).
            flags.append(RaiseFlag(Flag.CUTOVER, self._cutover_epoch))
        self._cutover_epoch = None
        if not self.may_write:
            flags.append(RaiseFlag(Flag.CONTROLLER_LOST))
        return flags

    def _finish(self, first: list[Background], is_stopped: bool) -> Sequence[Instruction]:
        return self._block([*first, *self._cancel_preparing("training ends")], FinishLoop(is_stopped))

    def _park_now(self, first: list[Background], reason: str) -> Sequence[Instruction]:
        self.phase, self.reason = WorkerPhase.PARKED, reason
        return self._go_on([*first, *self._cancel_preparing(reason), *self._destroy(reason)])

    def _recover_now(self, order: Recover) -> tuple[list[Background], Blocking]:
        cancelled = self._cancel_preparing(f"recovery to epoch {order.view.epoch}")
        first = [*cancelled, *self._destroy(order.plan.reason)]
        self.phase, self.reason = WorkerPhase.RECOVERING, order.plan.reason
        return first, PerformRecover(order.view, order.plan)

    def _leave_now(self, reason: str) -> tuple[list[Background], Blocking]:
        self.reason = reason
        return [*self._cancel_preparing(reason), *self._destroy(reason)], Exit(reason)

    def _destroy(self, reason: str) -> list[Background]:
        """F1. Nothing where it has been done since the last view was formed or tried."""
        had, self._has_groups = self._has_groups, False
        return [DestroyGroups(reason)] if had else []

    def _cancel_preparing(self, reason: str) -> list[Background]:
        view = self.preparing
        self._forget_preparing()
        return [] if view is None else [CancelPreparing(view.epoch, reason)]

    def _forget_preparing(self) -> None:
        self.preparing, self.is_prepared, self.prepare_error, self._cutover_epoch = None, False, None, None


def _is_source(worker_id: str, plan: RecoveryPlan) -> bool:
    return any(shipment.source == worker_id for shipment in plan.shipments)
