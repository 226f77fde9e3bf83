"""The controller of a run: executes what its state machine decides, over workers it reaches through handles.

Free of Ray: ``launch`` gives it Ray actors or a worker of the calling process behind the same ``WorkerHandle``. All
communication is pulled: the controller polls its workers a few times a second, the driver polls the controller; the
step loop calls nobody.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shoal.actors.messages import Member, Progress, Start, View, WorkerInfo, WorkerPoll
from shoal.actors.phases import COUNTER_NAMES
from shoal.actors.shard_host import Restore
from shoal.actors.worker import WorkerSpec
from shoal.kernels.errors import CheckpointError, CheckpointMismatchError, ClusterError, ProtocolError
from shoal.kernels.frame import Flag
from shoal.platform.cause import decide_cause, find_cause
from shoal.platform.checkpoint import CheckpointState, collect, complete, decide_resume, list_checkpoints
from shoal.platform.epochs import claim_epoch, newest_epoch
from shoal.platform.launch import LaunchFailed, Ready, WorkerHandle, WorkerLauncher
from shoal.platform.loadplan import plan_load
from shoal.platform.manifest import CheckpointName, Manifest
from shoal.platform.placement import ShardingType, TableLoad, plan_placement
from shoal.platform.state_fixed import (
    AskStop,
    ControllerState,
    EndRun,
    Event,
    FormView,
    Instruction,
    ManifestWritten,
    PartWritten,
    Publish,
    RunPhase,
    StopOverdue,
    StopRequested,
    WorkerFailed,
    WorkerFinished,
    WorkerReady,
    WriteManifest,
)
from shoal.platform.storage import Storage
from shoal.platform.telemetry import EventLog, MetricWriter, ProgressRecord, RayGauges

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What the controller needs to know of a job; picklable."""

    name: str
    num_workers: int
    worker: WorkerSpec
    storage: Storage
    steps_total: int
    sharding: Callable[[str], ShardingType]
    memory_bytes_per_worker: int | None = None
    transport: str = "auto"
    resume: str | int = "auto"
    #: Called once the run is accepted: its checkpoint is chosen, and its data is what it was.
    record: Callable[[], None] = lambda: None
    num_to_keep: int | None = 2
    #: What identifies the data order (D2), and the check of a stored one against it.
    data_fingerprint: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    check_fingerprint: Callable[[Mapping[str, Any]], None] = lambda stored: None
    start_timeout_s: float = 180.0
    #: A stop is given this long, and a checkpoint's time, before the workers are ended as they are.
    stop_timeout_s: float = 30.0
    checkpoint_timeout_s: float = 3600.0
    poll_interval_s: float = 0.25
    #: A worker that does not answer a poll for this long has failed.
    poll_timeout_s: float = 30.0
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunReport:
    """What the driver learns from one poll: everything since the cursor it gave."""

    phase: RunPhase
    reason: str
    step: int
    cursor: int
    #: ProgressRecord for training, Progress of kind "eval", or an event as (kind, fields).
    items: tuple[Any, ...]
    summary: Mapping[str, Any] | None = None
    #: Of the controller; the cursor counts its items only.
    incarnation: int = 0


class Controller:
    """Runs one job from launch to release. ``run`` blocks; the other methods may be called from other threads."""

    def __init__(self, plan: RunPlan, launcher: WorkerLauncher) -> None:
        self.plan = plan
        self.placement: tuple[TableLoad, ...] = ()
        self._launcher = launcher
        self._state = ControllerState(max(1, plan.num_workers))
        self._handles: Sequence[WorkerHandle] = ()
        self._infos: Sequence[WorkerInfo] = ()
        self._view: View | None = None
        self._manifest: Manifest | None = None
        self._items: list[Any] = []
        self._lock = threading.Lock()
        self._stop_reason: str | None = None
        self._stop_asked = 0.0  # monotonic
        #: How the run ends, once that is decided; ``_over`` is set when everything of it has been released as well.
        self._outcome: tuple[RunPhase, str] | None = None
        self._over: tuple[RunPhase, str] | None = None
        self._failure: BaseException | None = None
        #: Monotonic time of the first poll that saw a failure not acted on yet.
        self._failed_at: float | None = None
        self._restored = threading.Event()
        self._step, self._samples = 0, 0
        self._incarnation, self._next_worker = time.time_ns(), 0
        self._epoch = -1
        self._events = EventLog(plan.storage, "c0")
        self._metrics: MetricWriter | None = None
        self._gauges: RayGauges | None = None
        self._pool = ThreadPoolExecutor(max_workers=min(32, max(2, plan.num_workers)), thread_name_prefix="controller")

    # ---- for the driver -------------------------------------------------------------------------------------------

    def report(self, cursor: int, incarnation: int | None = None) -> RunReport:
        """Everything since ``cursor`` (0 at first); from the start where it counts in another ``incarnation``."""
        if incarnation not in (None, self._incarnation):
            cursor = 0
        with self._lock:
            items = tuple(self._items[cursor:])
            phase, reason = self._over or (self._state.phase, "")
            if self._over is None and (self._outcome is not None or phase.is_over):
                phase = RunPhase.STOPPING  # workers are still being released
            return RunReport(
                phase=phase,
                reason=reason,
                step=self._step,
                cursor=cursor + len(items),
                items=items,
                summary=self._state.summary,
                incarnation=self._incarnation,
            )

    def stop(self, reason: str) -> None:
        """Ask for an orderly end: the step in progress is finished and a checkpoint written."""
        if self._stop_reason is None:
            self._stop_asked, self._stop_reason = time.monotonic(), reason

    def abort(self) -> None:
        """End everything now, without a checkpoint."""
        self._outcome = self._outcome or (RunPhase.STOPPED, "aborted")
        self._launcher.release()

    @property
    def failure(self) -> BaseException | None:
        """The typed error that ended the run, where it is known in this process."""
        return self._failure

    # ---- the run --------------------------------------------------------------------------------------------------

    def run(self) -> RunPhase:
        """Launch, train, release. Returns how the run ended; never raises for a failure of the run itself."""
        refused: set[CheckpointName] = set()
        try:
            while not self._try_run(refused):
                self._publish("resume_fallback", reason=f"passed over {', '.join(map(str, refused))}")
                self._launcher.release()
        except Exception as error:
            logger.exception("run=%s failed", self.plan.name)
            self._failure = self._failure or error
            self._outcome = self._outcome or (RunPhase.FAILED, f"{type(error).__name__}: {error}")
        finally:
            outcome = self._outcome or (RunPhase.FAILED, "the controller was interrupted")
            self._clean_up()
            # Only now: whoever sees the end may end this process.
            self._over = outcome
        return outcome[0]

    def _clean_up(self) -> None:
        """Release everything; a step that fails does not keep the next ones from being taken."""
        steps: list[Callable[[], Any]] = [
            self._launcher.release,
            lambda: self._pool.shutdown(wait=False, cancel_futures=True),
            self._events.flush,
        ]
        if self._metrics is not None:
            steps.append(self._metrics.close)
        for step in steps:
            try:
                step()
            except Exception:
                logger.exception("run=%s cannot clean up", self.plan.name)

    def _try_run(self, refused: set[CheckpointName]) -> bool:
        """One attempt. False: the checkpoint is damaged and another is to be tried; ``refused`` has grown."""
        self._choose_checkpoint(refused)
        self.plan.record()
        claim_epoch(self.plan.storage, self._epoch, self._first_step)
        self._state = ControllerState(max(1, self.plan.num_workers), self._epoch)
        self._launch()
        if self._stop_reason is not None:
            self._handle(StopRequested(self._stop_reason))
        for rank in range(len(self._handles)):
            self._handle(WorkerReady(rank))
        while self._outcome is None:
            if self._stop_reason is not None:
                self._handle(StopRequested(self._stop_reason))
                self._enforce_stop()
            events = self._poll_workers()
            failed = next((event for event in events if isinstance(event, WorkerFailed)), None)
            damaged = isinstance(self._failure, CheckpointError) and self._step == self._first_step
            damaged = damaged and not isinstance(self._failure, CheckpointMismatchError)
            if failed and damaged and self.plan.resume == "auto" and self._manifest is not None:
                self._publish("checkpoint_damaged", step=self._manifest.name.step, reason=str(self._failure))
                refused.add(self._manifest.name)
                self._failure = None
                return False
            for event in events:
                self._handle(event)
            if self._outcome is None:
                time.sleep(self.plan.poll_interval_s)
        return True

    def _enforce_stop(self) -> None:
        """An orderly end takes a step and a checkpoint; beyond that the workers are ended as they are."""
        limit_s = self.plan.stop_timeout_s + self.plan.checkpoint_timeout_s
        if time.monotonic() - self._stop_asked > limit_s:
            self._handle(StopOverdue(limit_s))

    def _should_stop(self) -> bool:
        return self._stop_reason is not None or self._outcome is not None

    @property
    def _first_step(self) -> int:
        return self._manifest.name.step if self._manifest is not None else 0

    def _choose_checkpoint(self, refused: set[CheckpointName]) -> None:
        infos = list_checkpoints(self.plan.storage)
        decision = decide_resume(infos, self.plan.resume, exclude=refused, where=f"run {self.plan.name!r}")
        self._manifest = decision.manifest
        # V1: an attempt that wrote no checkpoint has used its number all the same.
        used = (self._epoch, newest_epoch(self.plan.storage), *(info.name.epoch for info in infos))
        self._epoch = max(used) + 1
        if decision.manifest is not None:
            self.plan.check_fingerprint(decision.manifest.cursor.get("order", {}))
        if infos:
            self._publish("resume", reason=decision.reason, epoch=self._epoch)
        self._step = self._first_step
        newer = [i for i in infos if i.state is CheckpointState.NEWER_FORMAT]
        if newer and decision.manifest is None and self.plan.resume == "auto":
            raise CheckpointError(newer[-1].reason)

    def _launch(self) -> None:
        """Workers started, their models built and compared, tables placed; or less, once a stop is asked."""
        plan = self.plan
        started = time.monotonic()
        self._publish("launch", workers=max(1, plan.num_workers))
        self._launcher.start_feeder(self._first_step, max(1, plan.num_workers))
        ids = [f"w{self._next_worker + index}" for index in range(max(1, plan.num_workers))]
        self._next_worker += len(ids)
        for worker_id in ids:
            self._launcher.launch_worker(worker_id, plan.worker)
        infos = self._await_ready(ids, started + plan.start_timeout_s)
        if self._should_stop():
            return
        self._handles = [handle for handle in map(self._launcher.handle, ids) if handle is not None]
        self._infos = [infos[worker_id] for worker_id in ids]
        first = self._infos[0]
        for info in self._infos[1:]:
            if info.model_hash != first.model_hash:
                raise ProtocolError(
                    f"workers {first.worker_id} and {info.worker_id} built different models; "
                    f"{_first_difference(first, info)}. The model factory must be deterministic"
                )
        self.placement = plan_placement(
            first.tables,
            len(self._handles),
            sharding={spec.name: plan.sharding(spec.name) for spec in first.tables},
            memory_bytes_per_worker=plan.memory_bytes_per_worker,
        )
        self._publish("launched", seconds=round(time.monotonic() - started, 3))

    def _await_ready(self, ids: Sequence[str], deadline: float) -> Mapping[str, WorkerInfo]:
        """What the workers say once ready; less, soon after a stop is asked. Raises what one of them raised."""
        infos: dict[str, WorkerInfo] = {}
        while len(infos) < len(ids) and not self._should_stop():
            for event in self._launcher.advance():
                if isinstance(event, LaunchFailed):
                    raise event.error
                if isinstance(event, Ready):
                    infos[event.worker_id] = event.info
            if len(infos) < len(ids) and time.monotonic() > deadline:
                capacity = self._launcher.capacity()
                raise ClusterError(
                    f"{len(ids) - len(infos)} of {len(ids)} workers were not ready within "
                    f"{self.plan.start_timeout_s:g} s (run.timeouts.start_timeout_s), {capacity.num_waiting} of them "
                    f"for want of room: {capacity.text}"
                )
            time.sleep(self.plan.poll_interval_s / 4)
        return infos

    # ---- events and instructions ----------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        for instruction in self._state.handle(event):
            self._execute(instruction)

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case FormView():
                self._form_view()
            case AskStop(rank):
                self._handles[rank].request(int(Flag.STOP), self.plan.poll_timeout_s)
            case WriteManifest():
                self._handle(self._write_manifest(instruction))
            case Publish(kind, fields):
                self._publish(kind, **dict(fields))
            case EndRun(phase, reason):
                if phase is RunPhase.FAILED and self._failure is None:  # all workers finished: a checkpoint is missing
                    self._failure = CheckpointError(reason)
                self._outcome = self._outcome or (phase, reason)

    def _form_view(self) -> None:
        world = len(self._handles)
        host, port = ("", 0) if world == 1 else self._launcher.open_store()
        self._view = view = View(
            run=self.plan.name,
            epoch=self._epoch,
            members=tuple(
                Member(rank=rank, worker_id=info.worker_id, host=info.host, share=1.0 / world)
                for rank, info in enumerate(self._infos)
            ),
            placement={load.table: load.owners for load in self.placement},
            transport=self.plan.transport,
            store_host=host,
            store_port=port,
        )
        for rank, handle in enumerate(self._handles):
            handle.order(Start(view=view, restore=self._restore_of(rank)), self.plan.poll_timeout_s)

    def _restore_of(self, rank: int) -> Restore | None:
        manifest = self._manifest
        if manifest is None:
            return None
        owned = {
            load.table: [block for block, owner in enumerate(load.owners) if owner == rank] for load in self.placement
        }
        dense = manifest.find("dense")
        if dense is None:
            raise CheckpointError(f"{manifest.name}: its manifest names no dense state")
        return Restore(
            step=manifest.name.step,
            directory=manifest.name.directory,
            parts=tuple(plan_load(manifest, self._infos[0].tables, owned)),
            dense=dense,
        )

    def _poll_workers(self) -> list[Event]:
        """One round of polls, in parallel; the most telling failure first."""
        events: list[Event] = []
        answers = list(self._pool.map(self._poll_one, self._handles))
        for rank, answer in enumerate(answers):
            if isinstance(answer, BaseException):
                continue
            self._step = max(self._step, answer.status.step)
            for record in answer.records:
                self._record(record)
            events.extend(PartWritten(part) for part in answer.parts)
            if answer.failure is None and answer.summary is not None:
                events.append(WorkerFinished(rank, answer.summary if rank == 0 else None))
        self._failed_at = self._failed_at or (time.monotonic() if find_cause(answers) is not None else None)
        if self._failed_at is not None:
            waited_s = time.monotonic() - self._failed_at
            cause = decide_cause(answers, waited_s, saving_timeout_s=self.plan.checkpoint_timeout_s)
            if cause is not None:
                self._failed_at = None
                found = answers[cause]
                if isinstance(found, BaseException):
                    self._failure, reason = found, f"worker {self._handles[cause].worker_id}: {found}"
                else:
                    self._failure, reason = found.failure, found.status.error or ""
                events.append(WorkerFailed(cause, reason))
        return events

    def _poll_one(self, handle: WorkerHandle) -> WorkerPoll | BaseException:
        try:
            return handle.poll(self.plan.poll_timeout_s)
        except Exception as error:  # a dead or silent worker is an event, not an exception of ours
            return error

    def _write_manifest(self, order: WriteManifest) -> ManifestWritten:
        summary: Mapping[str, Any] = next((part.summary for part in order.parts if part.summary is not None), {})
        try:
            complete(
                self.plan.storage,
                CheckpointName(self._epoch, order.step),
                order.parts,
                self._infos[0].tables,
                run=self.plan.name,
                world_size=len(self._handles),
                cursor={"step": order.step, "order": dict(self.plan.data_fingerprint)},
                epoch_first_step=self._first_step,
                data_fingerprint=str(self.plan.data_fingerprint.get("digest", "")) or None,
                versions=self.plan.versions,
                summary=dict(summary or {}),
            )
            if self.plan.num_to_keep is not None:
                collect(self.plan.storage, self.plan.num_to_keep)
        except Exception as error:  # training goes on without this checkpoint; the event says so
            return ManifestWritten(order.step, f"{type(error).__name__}: {error}")
        return ManifestWritten(order.step)

    # ---- telemetry ------------------------------------------------------------------------------------------------

    def _publish(self, kind: str, **fields: Any) -> None:
        self._events.write(kind, **fields)
        with self._lock:
            self._items.append((kind, fields))

    def _record(self, record: Progress) -> None:
        if self._metrics is None:
            self._metrics = MetricWriter(self.plan.storage, "c0")
            self._gauges = RayGauges.connect(self.plan.name)
        if record.kind != "train":
            self._metrics.write_scalars(record.step, record.values)
            item: Any = record
        else:
            item = self._progress(record)
            self._metrics.write(item)
            if self._gauges is not None:
                self._gauges.write(item)
        self._metrics.flush()
        with self._lock:
            self._items.append(item)

    def _progress(self, record: Progress) -> ProgressRecord:
        values = record.values
        left = self.plan.steps_total - record.step
        self._samples = int(values.get("samples", self._samples))
        return ProgressRecord(
            step=record.step,
            epoch=self._epoch,
            steps_total=self.plan.steps_total,
            samples=self._samples,
            samples_per_s=values["samples_per_s"],
            loss=values["loss"],
            ne=values["ne"],
            auc=values["auc"],
            calibration=values["calibration"],
            exchange_ms=values["exchange_ms"],
            workers=len(self._handles),
            eta_s=left * values["step_ms"] / 1e3,
            phases_ms={k.split("/", 1)[1]: v for k, v in values.items() if k.startswith("phase_ms/")},
            counters={name: values.get(name, 0.0) for name in ("rows", "skipped_steps", *COUNTER_NAMES)},
        )


def _first_difference(a: WorkerInfo, b: WorkerInfo) -> str:
    for mine, other in zip(a.tables, b.tables):
        if mine != other:
            return f"table {mine.name!r}: {mine} against {other}"
    if len(a.tables) != len(b.tables):
        return f"{len(a.tables)} tables against {len(b.tables)}"
    if a.dense_parameters != b.dense_parameters:
        return f"{a.dense_parameters} dense parameters against {b.dense_parameters}"
    return "their features, the shapes of dense parameters or their initial values differ"
