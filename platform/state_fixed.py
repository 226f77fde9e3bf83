"""The controller's state machine: events in, instructions out. Pure: no Ray, no clock, no I/O, no randomness.

``ControllerState.handle(event) -> [instruction]`` is the only mutator; one module (``controller``) executes the
instructions and turns their completion into events. Invariants, asserted by number in the test:

1. FormView is issued once per epoch, after every worker of the view has said it is ready.
2. WriteManifest for a step is issued once, after all ranks have delivered their part of it, never after a part failed.
3. EndRun is issued exactly once, and nothing is issued after it.
4. A failure of any worker ends the run with the first failure as its reason (recovery is a later capability).
5. The run ends as finished only after every worker has finished and no manifest is outstanding.
6. A run whose workers have finished, but whose last checkpoint was not written, ends as failed and names the step.
7. A stop that is overdue ends the run as stopped, whatever the workers do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.actors.messages import SnapshotPart
from shoal.platform.state_messages import RunPhase

# ---- events -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class WorkerReady:
    """A worker has built its model and store and waits for a view."""

    rank: int


@dataclasses.dataclass(frozen=True)
class WorkerFinished:
    """A worker's step loop returned; rank 0 brings the run's final summary."""

    rank: int
    summary: Any = None


@dataclasses.dataclass(frozen=True)
class WorkerFailed:
    """A worker raised or died."""

    rank: int
    reason: str


@dataclasses.dataclass(frozen=True)
class PartWritten:
    """One rank's part of a checkpoint is on storage (or failed to get there)."""

    part: SnapshotPart


@dataclasses.dataclass(frozen=True)
class ManifestWritten:
    """A checkpoint became visible, or ``error`` says why not."""

    step: int
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class StopRequested:
    """The user, a signal or the loss of the driver asks the run to end at the next step boundary."""

    reason: str


@dataclasses.dataclass(frozen=True)
class StopOverdue:
    """The workers have not ended in the time that an orderly end may take."""

    limit_s: float


Event = WorkerReady | WorkerFinished | WorkerFailed | PartWritten | ManifestWritten | StopRequested | StopOverdue


# ---- instructions -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FormView:
    """Send the first view to all workers and start their step loops."""

    epoch: int


@dataclasses.dataclass(frozen=True)
class AskStop:
    """Ask one rank to raise the stop flag in its header (S3); all ranks then stop at the same step."""

    rank: int
    reason: str


@dataclasses.dataclass(frozen=True)
class WriteManifest:
    """All data files of a checkpoint are written: make it visible (K1)."""

    step: int
    parts: tuple[SnapshotPart, ...]


@dataclasses.dataclass(frozen=True)
class Publish:
    """Append a line to the run's event log."""

    kind: str
    fields: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class EndRun:
    """Release workers and placement groups; the run is over."""

    phase: RunPhase
    reason: str


Instruction = FormView | AskStop | WriteManifest | Publish | EndRun


class ControllerState:
    """State of one run with a fixed set of workers (view 0)."""

    def __init__(self, world_size: int, epoch: int = 0) -> None:
        self.world_size = world_size
        self.phase = RunPhase.STARTING
        self.epoch = epoch
        self.durable_step: int | None = None
        self.summary: Any = None
        self._ready: set[int] = set()
        self._finished: set[int] = set()
        self._parts: dict[int, dict[int, SnapshotPart]] = {}
        self._writing: set[int] = set()
        self._stop_reason: str | None = None
        #: Step -> why the newest attempt at a checkpoint of it failed.
        self._not_written: dict[int, str] = {}

    def handle(self, event: Event) -> Sequence[Instruction]:
        """Advance by one event. Events after the end are ignored (invariant 3)."""
        if self.phase.is_over:
            return ()
        match event:
            case WorkerReady():
                return self._worker_ready(event)
            case WorkerFinished():
                return self._worker_finished(event)
            case WorkerFailed():
                return self._end(RunPhase.FAILED, event.reason, (("rank", event.rank),))
            case PartWritten():
                return self._part_written(event.part)
            case ManifestWritten():
                return self._manifest_written(event)
            case StopRequested():
                return self._stop_requested(event)
            case StopOverdue():
                if self._stop_reason is None:
                    return ()
                reason = f"{self._stop_reason}; workers did not end within {event.limit_s:g} s"
                return self._end(RunPhase.STOPPED, reason)
        raise AssertionError(f"unknown event {event!r}")

    def _worker_ready(self, event: WorkerReady) -> Sequence[Instruction]:
        self._ready.add(event.rank)
        if len(self._ready) < self.world_size or self.phase is not RunPhase.STARTING:
            return ()
        self.phase = RunPhase.RUNNING
        return (FormView(self.epoch), Publish("view", (("epoch", self.epoch), ("workers", self.world_size))))

    def _stop_requested(self, event: StopRequested) -> Sequence[Instruction]:
        if self._stop_reason is not None:
            return ()
        self._stop_reason = event.reason
        if self.phase is RunPhase.STARTING:
            return self._end(RunPhase.STOPPED, event.reason)
        self.phase = RunPhase.STOPPING
        return (Publish("stop_requested", (("reason", event.reason),)), AskStop(0, event.reason))

    def _part_written(self, part: SnapshotPart) -> Sequence[Instruction]:
        parts = self._parts.setdefault(part.step, {})
        parts[part.rank] = part
        if part.error is not None:
            self._not_written[part.step] = f"rank {part.rank}: {part.error}"
            fields = (("step", part.step), ("rank", part.rank), ("error", part.error))
            return (Publish("checkpoint_failed", fields), *self._maybe_finish())
        complete = len(parts) == self.world_size and not any(p.error for p in parts.values())
        if not complete or part.step in self._writing:
            return ()
        self._writing.add(part.step)
        ordered = tuple(parts[rank] for rank in sorted(parts))
        return (WriteManifest(part.step, ordered),)

    def _manifest_written(self, event: ManifestWritten) -> Sequence[Instruction]:
        self._writing.discard(event.step)
        self._parts.pop(event.step, None)
        if event.error is not None:
            self._not_written[event.step] = event.error
            publish = Publish("checkpoint_failed", (("step", event.step), ("error", event.error)))
        else:
            self.durable_step = max(event.step, self.durable_step or 0)
            self._not_written.pop(event.step, None)
            publish = Publish("checkpoint", (("step", event.step),))
        return (publish, *self._maybe_finish())

    def _worker_finished(self, event: WorkerFinished) -> Sequence[Instruction]:
        self._finished.add(event.rank)
        if event.summary is not None:
            self.summary = event.summary
        return self._maybe_finish()

    def _maybe_finish(self) -> Sequence[Instruction]:
        """End once all have finished and no complete checkpoint waits for its manifest (invariant 5)."""
        waiting = any(not any(p.error for p in parts.values()) for parts in self._parts.values())
        if len(self._finished) < self.world_size or self._writing or waiting:
            return ()
        last_step = self.summary.get("step") if isinstance(self.summary, Mapping) else None
        if last_step in self._not_written:
            reason = f"the last checkpoint, of step {last_step}, was not written: {self._not_written[last_step]}"
            return self._end(RunPhase.FAILED, reason)
        if self._stop_reason is not None:
            return self._end(RunPhase.STOPPED, self._stop_reason)
        return self._end(RunPhase.FINISHED, "all steps done")

    def _end(self, phase: RunPhase, reason: str, fields: tuple[tuple[str, Any], ...] = ()) -> Sequence[Instruction]:
        self.phase = phase
        return (Publish("end", (("phase", phase.value), ("reason", reason), *fields)), EndRun(phase, reason))
