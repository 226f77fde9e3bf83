"""The executor: carries out what the controller's state machine decides, and turns the outcome into events.

The only place that calls workers, the launcher and the journal. ``execute`` never waits: what takes time runs in a
thread and its outcome is an event of a later ``gather``. Events may come late or twice; the machine allows for both.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from shoal.actors.messages import Order, Prepare, Progress, SetBase, Start, View, WorkerInfo, WorkerPhase, WorkerStatus
from shoal.kernels import facts, faults
from shoal.kernels.errors import ClusterError, ProtocolError, ShoalError
from shoal.kernels.frame import Flag
from shoal.platform import launch
from shoal.platform.clock import Clock
from shoal.platform.failure_log import FailureLog
from shoal.platform.journal import Journal
from shoal.platform.journal_record import encode_record
from shoal.platform.launch import WorkerHandle, WorkerLauncher
from shoal.platform.poller import Answer, Poller
from shoal.platform.run_checkpoints import RunCheckpoints
from shoal.platform.run_plan import RunPlan
from shoal.platform.state_messages import (
    AskCheckpoint,
    AskHoldings,
    AskStop,
    CancelLaunch,
    DrainNotice,
    Event,
    FoundWorker,
    Instruction,
    JournalRecord,
    JournalWritten,
    KillWorker,
    LaunchFailed,
    LaunchWorkers,
    ManifestWritten,
    PartWritten,
    RecordKind,
    SendOrder,
    StatusSeen,
    WorkerLost,
    WorkerPlaced,
    WorkerPrepared,
    WorkerSilent,
    WriteJournal,
    WriteManifest,
)

logger = logging.getLogger(__name__)

#: Between two looks at the cluster (room, draining nodes). Seconds.
CLUSTER_INTERVAL_S = 0.5
#: A worker that has not answered for this long is reported as silent. Seconds.
SILENT_S = 1.0


@dataclasses.dataclass
class _Kill:
    """A worker that is being ended for certain."""

    reason: str
    since_s: float


class Executor:
    """Effects of one controller. ``execute`` and ``gather`` are called by its one thread."""

    def __init__(
        self,
        plan: RunPlan,
        launcher: WorkerLauncher,
        journal: Journal,
        checkpoints: RunCheckpoints,
        clock: Clock,
        on_record: Callable[[Progress], None],
    ) -> None:
        self.plan = plan
        #: Worker id -> what it last said.
        self.statuses: dict[str, WorkerStatus] = {}
        self.failures = FailureLog()
        #: Something failed that only ends the run: the journal cannot be written, a checkpoint cannot be read.
        self.fatal: BaseException | None = None
        self._launcher = launcher
        self._journal = journal
        self._checkpoints = checkpoints
        self._clock = clock
        self._on_record = on_record
        self._handles: dict[str, WorkerHandle] = {}
        self._launching: dict[str, float] = {}
        self._placed: dict[str, float] = {}
        self._first_info: WorkerInfo | None = None
        self._ask: set[str] = set()
        self._has_view = False
        #: Step that the run's first view begins with.
        self._start_step = 0
        self._kills: dict[str, _Kill] = {}
        self._events: queue.SimpleQueue[Callable[[float], Event]] = queue.SimpleQueue()
        self._cluster_at = float("-inf")
        self._calls = ThreadPoolExecutor(max_workers=16, thread_name_prefix="calls")
        self._polls = ThreadPoolExecutor(max_workers=64, thread_name_prefix="polls")
        # Each writes in order; a slow checkpoint does not hold up the journal.
        self._journal_writes = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._manifest_writes = ThreadPoolExecutor(max_workers=1, thread_name_prefix="manifests")
        self._poller = Poller(self._polls, clock, plan.call_timeout_s)

    def close(self) -> None:
        """Let go of the threads; workers are the launcher's to release."""
        for pool in (self._calls, self._polls, self._journal_writes, self._manifest_writes):
            pool.shutdown(wait=False, cancel_futures=True)

    # ---- instructions ---------------------------------------------------------------------------------------------

    def execute(self, instruction: Instruction) -> None:
        """Begin what ``instruction`` says."""
        match instruction:
            case LaunchWorkers(worker_ids):
                self._launch(worker_ids)
            case CancelLaunch(worker_ids):
                self._cancel(worker_ids)
            case SendOrder(worker_id, order):
                self._in_background(self._calls, lambda: self._send(worker_id, order))
            case AskHoldings(worker_ids):
                self._ask.update(worker_ids)
            case AskStop(worker_id):
                self._in_background(self._calls, lambda: self._request(worker_id, Flag.STOP))
            case AskCheckpoint(worker_id):
                self._in_background(self._calls, lambda: self._request(worker_id, Flag.CHECKPOINT))
            case KillWorker(worker_id, reason):
                self._kills.setdefault(worker_id, _Kill(reason, self._clock.now_s()))
            case WriteJournal(record):
                self.note_start(record)
                self._in_background(self._journal_writes, lambda: self._write_journal(record))
            case WriteManifest():
                self._in_background(self._manifest_writes, lambda: self._write_manifest(instruction))
            case _:
                raise AssertionError(f"not for the executor: {instruction!r}")

    def note_start(self, record: JournalRecord) -> None:
        """Take in the record of a first view: what it begins with is restored by its members."""
        if record.kind is RecordKind.START:
            self._has_view, self._start_step = True, record.step or 0

    def _in_background(self, pool: ThreadPoolExecutor, action: Callable[[], None]) -> None:
        def act() -> None:
            try:
                action()
            except Exception as error:
                logger.exception("run=%s action failed", self.plan.name)
                self.fatal = self.fatal or error

        pool.submit(act)

    def _launch(self, worker_ids: Sequence[str]) -> None:
        # The feeder holds nothing that cannot be made again, so it may start before it is known where training begins.
        self._launcher.start_feeder(self._checkpoints.durable_step or 0, self.plan.num_workers)
        for worker_id in worker_ids:
            self._launching[worker_id] = self._clock.now_s()
            self._launcher.launch_worker(worker_id, self.plan.worker)

    def _cancel(self, worker_ids: Sequence[str]) -> None:
        for worker_id in worker_ids:
            if worker_id in self._launching:
                self._forget(worker_id)
                self._launcher.release_worker(worker_id)

    def _forget(self, worker_id: str) -> None:
        for known in (self._handles, self._launching, self._placed, self._kills):
            known.pop(worker_id, None)
        self._ask.discard(worker_id)

    def _send(self, worker_id: str, order: Order | SetBase) -> None:
        handle = self._handles.get(worker_id)
        if handle is None:
            return
        if isinstance(order, Start):
            rank = order.view.rank_of(worker_id)
            assert rank is not None
            restore = self._checkpoints.make_restore(self._start_step, worker_id, order.view.owned_by(rank))
            order = dataclasses.replace(order, restore=restore)
        elif isinstance(order, Prepare):  # a joiner's feed looks ahead from about here
            step = max((status.step for status in list(self.statuses.values())), default=0)
            order = dataclasses.replace(order, step=step)
        if faults.reach("controller.order"):
            return
        try:
            handle.order(order, self.plan.call_timeout_s)
        except ClusterError as error:  # sent again until a status shows its effect
            logger.debug("worker=%s order=%s error=%s", worker_id, type(order).__name__, error)

    def _request(self, worker_id: str, flags: Flag) -> None:
        handle = self._handles.get(worker_id)
        if handle is None:
            return
        try:
            handle.request(int(flags), self.plan.call_timeout_s)
        except ClusterError as error:
            logger.debug("worker=%s flags=%s error=%s", worker_id, flags, error)

    def _write_journal(self, record: JournalRecord) -> None:
        faults.reach("controller.journal")
        self._journal.append(record.kind.value, **encode_record(record))
        if record.kind in (RecordKind.START, RecordKind.DECIDED, RecordKind.RECOVER):
            self._checkpoints.begin_epoch(record)
        faults.reach("controller.journalled")
        self._put(lambda now_s: JournalWritten(now_s=now_s, record_id=record.record_id))
        if record.kind is RecordKind.DECIDED and record.view is not None:
            self._launcher.forget_ranks()
            self._launcher.forget_epochs(record.view.run, record.view.epoch)

    def _write_manifest(self, order: WriteManifest) -> None:
        error = self._checkpoints.write(order.epoch, order.step, order.parts)
        if error is None:
            base = SetBase(step=self._checkpoints.base_step)
            for worker_id in list(self._handles):
                self._in_background(self._calls, lambda worker_id=worker_id: self._send(worker_id, base))
        written = (order.epoch, order.step, error)
        self._put(lambda now_s: ManifestWritten(now_s=now_s, epoch=written[0], step=written[1], error=written[2]))

    def _put(self, make: Callable[[float], Event]) -> None:
        self._events.put(make)

    # ---- events ---------------------------------------------------------------------------------------------------

    def gather(self, wait_s: float) -> list[Event]:
        """What has happened since the last call; polls every worker and waits up to ``wait_s`` for their answers."""
        ready = {w: handle for w, handle in self._handles.items() if w not in self._kills}
        round_ = self._poller.round(ready, frozenset(self._ask), wait_s)
        now_s = self._clock.now_s()
        events: list[Event] = []
        while not self._events.empty():
            events.append(self._events.get()(now_s))
        events += self._launched(now_s)
        for answer in round_.answers:
            events += self._answered(answer, now_s)
        for worker_id, silent_s in round_.silent_s.items():
            if silent_s >= SILENT_S:
                events.append(WorkerSilent(now_s=now_s, worker_id=worker_id, seconds=silent_s))
        events += self._killed(now_s)
        if now_s - self._cluster_at >= CLUSTER_INTERVAL_S:
            self._cluster_at = now_s
            events += self._look_at_cluster(now_s)
        return events

    def _launched(self, now_s: float) -> list[Event]:
        events: list[Event] = []
        for event in self._launcher.advance():
            match event:
                case launch.Placed(worker_id=worker_id):
                    self._placed[worker_id] = now_s
                    events.append(WorkerPlaced(now_s=now_s, worker_id=worker_id))
                case launch.Ready(worker_id=worker_id, info=info):
                    handle = self._launcher.handle(worker_id)
                    if worker_id in self._launching and handle is not None:
                        events.append(self._ready(handle, info, now_s))
                case launch.LaunchFailed(worker_id=worker_id, error=error):
                    is_fatal = not isinstance(error, ClusterError)
                    events.append(self._launch_failed(worker_id, error, is_fatal, now_s))
        limit_s = self.plan.start_timeout_s
        if not self._has_view and any(now_s - since_s > limit_s for since_s in self._launching.values()):
            events.append(self._start_overdue(now_s))
        for worker_id, since_s in list(self._placed.items()):
            if now_s - since_s > limit_s:
                error = ClusterError(
                    f"worker {worker_id} was not ready {limit_s:g} s after it was placed (run.timeouts.start_timeout_s)"
                )
                events.append(self._launch_failed(worker_id, error, False, now_s))
        return events

    def _start_overdue(self, now_s: float) -> Event:
        capacity = self._launcher.capacity()
        num_asked = len(self._launching) + len(self._handles)
        error = ClusterError(
            f"{len(self._launching)} of {num_asked} workers were not ready within {self.plan.start_timeout_s:g} s "
            f"(run.timeouts.start_timeout_s), {capacity.num_waiting} of them for want of room: {capacity.text}"
        )
        worker_ids = tuple(self._launching)
        for worker_id in worker_ids:
            self._launch_failed(worker_id, error, True, now_s)
        return LaunchFailed(now_s=now_s, worker_ids=worker_ids, reason=str(error), is_fatal=True)

    def _ready(self, handle: WorkerHandle, info: WorkerInfo, now_s: float) -> Event:
        first = self._first_info = self._first_info or info
        if info.model_hash != first.model_hash:
            error = ProtocolError(
                f"workers {first.worker_id} and {info.worker_id} differ; {first_difference(first, info)}. All workers "
                "need the same job, code, model and library versions, and the model factory must be deterministic"
            )
            return self._launch_failed(info.worker_id, error, True, now_s)
        self._launching.pop(info.worker_id)
        self._placed.pop(info.worker_id, None)
        self._handles[info.worker_id] = handle
        self._checkpoints.tables = info.tables
        return WorkerPrepared(now_s=now_s, info=info)

    def _launch_failed(self, worker_id: str, error: BaseException, is_fatal: bool, now_s: float) -> Event:
        self.failures.note_launch(worker_id, error)
        self._forget(worker_id)
        self._launcher.release_worker(worker_id)
        reason = str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
        return LaunchFailed(now_s=now_s, worker_ids=(worker_id,), reason=reason, is_fatal=is_fatal)

    def _answered(self, answer: Answer, now_s: float) -> list[Event]:
        worker_id, poll = answer.worker_id, answer.poll
        if poll is None:
            assert answer.gone is not None
            return self._lost(worker_id, answer.gone, now_s)
        status = poll.status
        known = self.statuses.get(worker_id)
        if status.phase is WorkerPhase.EVALUATING and known is not None:
            # An evaluation counts its own batches.
            status = dataclasses.replace(status, step=known.step)
        elif poll.summary is not None:
            status = dataclasses.replace(status, step=int(poll.summary.get("step", status.step)))
        self.statuses[worker_id] = status
        for record in poll.records:
            self._on_record(record)
        if poll.failure is not None:
            self.failures.note(worker_id, poll.failure, poll.is_origin)
        if answer.holdings is not None:
            self._ask.discard(worker_id)
        events: list[Event] = [PartWritten(now_s=now_s, part=part) for part in poll.parts]
        if poll.status.drain_s is not None:  # before the status, which says it too, but without a reason
            reason = f"worker {worker_id} got a SIGTERM"
            events.append(
                DrainNotice(now_s=now_s, worker_ids=(worker_id,), deadline_s=poll.status.drain_s, reason=reason)
            )
        events.append(
            StatusSeen(
                now_s=now_s,
                status=status,
                holdings=answer.holdings,
                is_origin=poll.is_origin,
                is_saving=poll.is_saving,
                summary=poll.summary if poll.status.phase is not WorkerPhase.FAILED else None,
            )
        )
        return events

    def _lost(self, worker_id: str, reason: str, now_s: float) -> list[Event]:
        self.failures.note_gone(worker_id, reason)
        self._forget(worker_id)
        self.statuses.pop(worker_id, None)
        self._launcher.release_worker(worker_id)
        return [WorkerLost(now_s=now_s, worker_id=worker_id, reason=reason)]

    def _killed(self, now_s: float) -> list[Event]:
        events: list[Event] = []
        for worker_id, kill in list(self._kills.items()):
            status = self.statuses.get(worker_id)
            pid, host = (status.pid, status.host) if status is not None else (0, "")
            if self._launcher.kill_worker(worker_id, pid, host):
                events += self._lost(worker_id, f"ended: {kill.reason}", now_s)
            elif now_s - kill.since_s >= self.plan.failure.lease_s:
                reason = f"given up after its lease of {self.plan.failure.lease_s:g} s: {kill.reason}"
                events += self._lost(worker_id, reason, now_s)
        return events

    def _look_at_cluster(self, now_s: float) -> list[Event]:
        try:
            draining = self._launcher.draining()
        except Exception as error:  # the cluster's control service may be away for a while
            logger.warning("run=%s cluster=%s", self.plan.name, error)
            return []
        return [
            DrainNotice(
                now_s=now_s,
                worker_ids=(worker_id,),
                deadline_s=left_s,
                reason=f"the node of worker {worker_id} is being drained",
            )
            for worker_id, left_s in draining.items()
            if worker_id in self._handles
        ]

    # ---- taking over ----------------------------------------------------------------------------------------------

    def take_over(self) -> tuple[FoundWorker, ...]:
        """Find the workers of the controller before this one and go on with those that answer; the others are ended."""
        handles = self._launcher.adopt()
        limit_s = self.plan.call_timeout_s

        def ask(handle: WorkerHandle) -> FoundWorker:
            info = handle.describe(limit_s)
            return FoundWorker(info=info, status=handle.poll(limit_s).status, holdings=handle.holdings(limit_s))

        asked = {worker_id: self._calls.submit(ask, handle) for worker_id, handle in handles.items()}
        found: list[FoundWorker] = []
        for worker_id, call in asked.items():
            try:
                found.append(call.result(timeout=4 * limit_s))
            except Exception as error:  # it is dead, was not ready yet, or hangs: nothing of it is needed
                logger.warning("run=%s worker=%s action=adopt error=%s", self.plan.name, worker_id, error)
                self._launcher.release_worker(worker_id)
                continue
            self._handles[worker_id] = handles[worker_id]
            self.statuses[worker_id] = found[-1].status
            self._first_info = self._first_info or found[-1].info
            self._checkpoints.tables = found[-1].info.tables
            self._has_view = self._has_view or found[-1].holdings.view is not None
        return tuple(found)


def current_members(view: View | None, statuses: Mapping[str, WorkerStatus]) -> list[WorkerStatus]:
    """What the members of ``view`` last said."""
    return [] if view is None else [statuses[m.worker_id] for m in view.members if m.worker_id in statuses]


def first_difference(a: WorkerInfo, b: WorkerInfo) -> str:
    """The first fact in which two workers differ, with the value of each."""
    at = facts.first_difference(a.facts, b.facts)
    mine, other = (dict(enumerate(info.facts)).get(at, ("nothing", "nothing")) for info in (a, b))
    if mine[0] == other[0]:
        return f"{mine[0]}: {facts.shown(mine[1])} against {facts.shown(other[1])}"
    return f"{mine[0]} {facts.shown(mine[1])} against {other[0]} {facts.shown(other[1])}"
