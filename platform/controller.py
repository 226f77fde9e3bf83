"""The controller of a run: gathers events, lets the state machine decide, has the executor carry it out.

Free of Ray: ``launch_ray`` and ``launch_local`` give it workers behind the same ``WorkerHandle``. All communication is
pulled: the controller polls its workers a few times a second, the driver polls the controller; the step loop calls
nobody.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from shoal.kernels import faults
from shoal.kernels.errors import (
    CheckpointError,
    CheckpointMismatchError,
    ClusterError,
    ConfigError,
    FencedError,
    LockLostError,
)
from shoal.platform.clock import Clock, SystemClock
from shoal.platform.executor import Executor, current_members
from shoal.platform.incident import Limits
from shoal.platform.journal import Journal, Record, open_journal
from shoal.platform.journal_record import decode_records
from shoal.platform.launch import WorkerLauncher
from shoal.platform.manifest import CheckpointName
from shoal.platform.membership import ViewSpec
from shoal.platform.run_checkpoints import RunCheckpoints
from shoal.platform.run_guard import RunGuard
from shoal.platform.run_log import RunLog
from shoal.platform.run_plan import RunPlan, RunReport
from shoal.platform.state import ControllerSpec, ControllerState
from shoal.platform.state_messages import (
    Adopted,
    EndRun,
    Event,
    Publish,
    RunPhase,
    ScaleRequested,
    StopOverdue,
    StopRequested,
    Tick,
)

logger = logging.getLogger(__name__)

#: Phases in which somebody waits for what the controller does next.
_URGENT = (RunPhase.STARTING, RunPhase.PREPARING, RunPhase.CUTTING_OVER, RunPhase.RECOVERING, RunPhase.STOPPING)
#: Between two rounds of polls then. Seconds.
URGENT_INTERVAL_S = 0.02


class Controller:
    """Runs one job from launch to release. ``run`` blocks; the other methods may be called from other threads."""

    def __init__(self, plan: RunPlan, launcher: WorkerLauncher, clock: Clock | None = None) -> None:
        self.plan = plan
        #: Set when a later controller has taken the run over: this one must touch nothing any more (F7).
        self.is_fenced = False
        self._launcher = launcher
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._guard: RunGuard | None = None
        self._journal: Journal | None = None
        self._log: RunLog | None = None
        self._state: ControllerState | None = None
        self._executor: Executor | None = None
        self._checkpoints: RunCheckpoints | None = None
        self._requests: list[Callable[[float], Event]] = []
        self._stop_reason: str | None = None
        self._stop_at = 0.0
        #: How the run ends, once that is decided; ``_over`` is set when everything of it has been released as well.
        self._outcome: tuple[RunPhase, str] | None = None
        self._over: tuple[RunPhase, str] | None = None
        self._failure: BaseException | None = None
        self._woken = threading.Event()

    # ---- for the driver -------------------------------------------------------------------------------------------

    def report(self, cursor: int, incarnation: int | None = None) -> RunReport:
        """Everything since ``cursor`` (0 at first); from the start where it counts in another ``incarnation``."""
        with self._lock:
            over, outcome, state, log, journal = self._over, self._outcome, self._state, self._log, self._journal
        mine = -1 if journal is None else journal.incarnation
        if incarnation not in (None, mine):
            cursor = 0
        phase, reason = over or (RunPhase.STARTING if state is None else state.phase, "")
        if over is None and (outcome is not None or phase.is_over):
            phase = RunPhase.STOPPING  # workers are still being released
        items = () if log is None else log.items_since(cursor)
        return RunReport(
            phase=phase,
            reason=reason,
            step=self._step(),
            cursor=cursor + len(items),
            items=items,
            summary=None if state is None else state.summary,
            incarnation=mine,
        )

    def stop(self, reason: str) -> None:
        """Ask for an orderly end: the step in progress is finished and a checkpoint written."""
        with self._lock:
            if self._stop_reason is None:
                self._stop_at, self._stop_reason = self._clock.now_s(), reason
        self._woken.set()

    def scale(self, num_workers: int) -> str:
        """Ask for another number of workers; the answer says what was understood. Raises ConfigError."""
        if num_workers < 1:
            raise ConfigError(f"{num_workers} workers: at least 1 is needed; `shoal stop` ends a run")
        if self._launcher.is_fixed:
            raise ConfigError("this run trains in one process (num_workers=0): it cannot be scaled")
        before = self._state.view.world_size if self._state is not None and self._state.view is not None else 0
        reason = "the operator asked for it"
        self._ask(lambda now_s: ScaleRequested(now_s=now_s, num_workers=num_workers, reason=reason))
        return f"run {self.plan.name}: {before} workers now, {num_workers} wanted"

    def abort(self) -> None:
        """End everything now, without a checkpoint."""
        with self._lock:
            self._outcome = self._outcome or (RunPhase.STOPPED, "aborted")
        self._launcher.release()
        self._woken.set()

    @property
    def failure(self) -> BaseException | None:
        """The typed error that ended the run, where it is known in this process."""
        return self._failure

    def _ask(self, make: Callable[[float], Event]) -> None:
        with self._lock:
            self._requests.append(make)
        self._woken.set()

    def _step(self) -> int:
        executor = self._executor
        return max((status.step for status in executor.statuses.values()), default=0) if executor is not None else 0

    # ---- the run --------------------------------------------------------------------------------------------------

    def run(self) -> RunPhase:
        """Launch, train, release. Returns how the run ended; never raises for a failure of the run itself."""
        if self.plan.worker.faults is not None and not self._launcher.is_fixed:
            faults.install(self.plan.worker.faults, "controller", {faults.CONTROLLER})
        try:
            with self._journalled() as before:
                self._attempts(before)
        except (FencedError, LockLostError) as error:
            logger.error("run=%s %s", self.plan.name, error)
            self.is_fenced = True
            self._failure, self._outcome = error, (RunPhase.FAILED, str(error))
        except Exception as error:
            logger.exception("run=%s failed", self.plan.name)
            self._failure = self._failure or error
            self._outcome = self._outcome or (RunPhase.FAILED, f"{type(error).__name__}: {error}")
        finally:
            outcome = self._outcome or (RunPhase.FAILED, "the controller was interrupted")
            self._clean_up(outcome)
            # Only now: whoever sees the end may end this process.
            with self._lock:
                self._over = outcome
        return outcome[0]

    @contextlib.contextmanager
    def _journalled(self) -> Iterator[tuple[Record, ...]]:
        """A new incarnation of this run's controller; yields what this start of the run has journalled before."""
        guard = RunGuard(self.plan, self._launcher.cluster_address)
        guard.acquire()
        self._guard = guard
        journal, records = open_journal(self.plan.storage, guard.incarnation, token=self.plan.token)
        mine = [i for i, r in enumerate(records) if r.kind == "run" and r.fields.get("token") == self.plan.token]
        log = RunLog(self.plan, journal.incarnation)
        with self._lock:
            self._journal, self._log = journal, log
        yield records[mine[0] :] if mine else ()

    def _attempts(self, before: tuple[Record, ...]) -> None:
        refused: set[CheckpointName] = set()
        policy: str | int = self.plan.resume if not before else "auto"
        while True:
            with self._prepared(policy, frozenset(refused)) as damaged:
                self._begin(before)
                self._loop()
                found = damaged()
                if found is None or policy != "auto":
                    return
            self._publish("checkpoint_damaged", step=found.step, reason=str(self._failure))
            refused.add(found)
            before, self._failure, self._outcome = (), None, None
            self._publish("resume_fallback", reason=f"passed over {', '.join(map(str, sorted(refused)))}")
            self._launcher.release()

    @contextlib.contextmanager
    def _prepared(
        self, policy: str | int, refused: frozenset[CheckpointName]
    ) -> Iterator[Callable[[], CheckpointName | None]]:
        """One attempt's checkpoint, executor and state. Yields: which checkpoint was damaged, if that ended it."""
        assert self._journal is not None and self._log is not None
        checkpoints = RunCheckpoints(self.plan, self._journal.incarnation)
        reason = checkpoints.choose(policy, refused)
        self.plan.record()
        executor = Executor(self.plan, self._launcher, self._journal, checkpoints, self._clock, self._log.record)
        state = ControllerState(self._spec(checkpoints, self._journal.incarnation))
        with self._lock:
            self._checkpoints, self._executor, self._state = checkpoints, executor, state
        if reason is not None:
            self._publish("resume", reason=reason)
        began_with = checkpoints.durable

        def damaged() -> CheckpointName | None:
            is_damaged = isinstance(self._failure, CheckpointError)
            if not is_damaged or isinstance(self._failure, CheckpointMismatchError) or began_with is None:
                return None
            return began_with.name if self._step() <= began_with.name.step else None

        try:
            yield damaged
        finally:
            executor.close()

    def _spec(self, checkpoints: RunCheckpoints, incarnation: int) -> ControllerSpec:
        plan = self.plan
        host, port = self._launcher.open_store()
        return ControllerSpec(
            scaling=plan.scaling if not self._launcher.is_fixed else dataclasses.replace(plan.scaling, num_workers=1),
            failure=plan.failure,
            view_spec=ViewSpec(
                run=plan.name,
                transport=plan.scaling.transport,
                exchange="flat" if plan.scaling.exchange == "auto" else plan.scaling.exchange,
                store_host=host,
                store_port=port,
                sharding=checkpoints.sharding,
                loads=checkpoints.loads,
                codecs=checkpoints.codecs,
                memory_bytes_per_worker=plan.scaling.memory_per_worker,
            ),
            limits=Limits(
                park_timeout_s=plan.op_timeout_s + 5.0,
                saving_timeout_s=plan.checkpoint_timeout_s,
                failed_checkpoints_max=plan.max_failed_checkpoints,
            ),
            incarnation=incarnation,
            first_epoch=checkpoints.epoch_used + 1,
            durable_step=checkpoints.durable_step,
            has_final_checkpoint=plan.worker.loop.checkpoint_at_end,
            make_restore=checkpoints.make_restore,
        )

    def _begin(self, before: tuple[Record, ...]) -> None:
        """Take over the workers there are, after a restart; or begin afresh."""
        assert self._executor is not None and self._checkpoints is not None
        if not before:
            return
        workers, journal = self._executor.take_over(), decode_records(before)
        for record in journal:
            self._executor.note_start(record)
        self._publish("controller_restarted", workers=len(workers))
        self._handle(
            Adopted(
                now_s=self._clock.now_s(),
                workers=workers,
                journal=journal,
                durable_step=self._checkpoints.durable_step,
                epoch_used=self._checkpoints.epoch_used,
            )
        )

    def _loop(self) -> None:
        assert self._executor is not None and self._state is not None and self._log is not None
        executor, state = self._executor, self._state
        while self._outcome is None:
            interval_s = URGENT_INTERVAL_S if state.phase in _URGENT else self.plan.poll_interval_s
            self._clock.wait(self._woken, interval_s)
            self._woken.clear()
            for event in [*self._requested(), *executor.gather(interval_s)]:
                self._handle(event)
            self._handle(Tick(now_s=self._clock.now_s()))
            self._log.view, self._log.members = state.view, current_members(state.view, executor.statuses)
            for problem in (executor.fatal, self._guard.lost if self._guard is not None else None):
                if problem is not None:
                    raise problem

    def _requested(self) -> list[Event]:
        now_s = self._clock.now_s()
        with self._lock:
            requests, self._requests = self._requests, []
            reason, asked_s = self._stop_reason, now_s - self._stop_at
        events = [make(now_s) for make in requests]
        if reason is not None:
            events.append(StopRequested(now_s=now_s, reason=reason))
            # An orderly end takes a step and a checkpoint; beyond that the workers are ended as they are.
            limit_s = self.plan.stop_timeout_s + self.plan.checkpoint_timeout_s
            if asked_s > limit_s:
                events.append(StopOverdue(now_s=now_s, limit_s=limit_s))
        return events

    def _handle(self, event: Event) -> None:
        assert self._executor is not None and self._state is not None
        for instruction in self._state.handle(event):
            match instruction:
                case Publish(kind, fields):
                    self._publish(kind, **dict(fields))
                case EndRun(phase, reason):
                    self._end(phase, reason)
                case _:
                    self._executor.execute(instruction)

    def _end(self, phase: RunPhase, reason: str) -> None:
        assert self._executor is not None
        if phase is RunPhase.FAILED and self._failure is None:
            self._failure = self._executor.failures.cause()
            if self._failure is None:  # all workers finished: a checkpoint is missing
                is_checkpoint = "checkpoint" in reason
                self._failure = CheckpointError(reason) if is_checkpoint else ClusterError(reason)
        self._outcome = self._outcome or (phase, reason)

    def _publish(self, kind: str, **fields: Any) -> None:
        if self._log is not None:
            self._log.publish(kind, **fields)

    def _clean_up(self, outcome: tuple[RunPhase, str]) -> None:
        """Release everything; a step that fails does not keep the next ones from being taken."""
        journal, log = self._journal, self._log
        steps: list[Callable[[], Any]] = []
        if not self.is_fenced:
            steps.append(self._launcher.release)
            if journal is not None:
                steps.append(lambda: journal.append("end", phase=outcome[0].value, reason=outcome[1]))
            if self._guard is not None:
                steps.append(self._guard.release)
        if log is not None:
            steps.append(log.close)
        for step in steps:
            try:
                step()
            except Exception:
                logger.exception("run=%s cannot clean up", self.plan.name)
