"""What goes into the controller's state machine and what comes out: events and instructions. Pure values.

Every event carries ``now_s``, a clock that only rises within one controller process. Statuses are levels, not edges:
an event may be lost, repeated or late without harm, since the next poll says the same again.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from shoal.actors.messages import Holdings, Order, RecoveryPlan, SnapshotPart, View, WorkerInfo, WorkerStatus


class RunPhase(enum.Enum):
    """Where a run stands."""

    #: Workers start; no view yet.
    STARTING = "starting"
    RUNNING = "running"
    #: A view change is being prepared; training goes on.
    PREPARING = "preparing"
    #: Rank 0 has been told to cut over; decided within a step, or a failure.
    CUTTING_OVER = "cutting over"
    #: Workers park, report what they hold, and come to a common step in a new view.
    RECOVERING = "recovering"
    #: Fewer workers than ``min``: the others are parked until more come.
    WAITING = "waiting"
    #: The run was asked to end; workers finish a step and a checkpoint.
    STOPPING = "stopping"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return self in (RunPhase.FINISHED, RunPhase.STOPPED, RunPhase.FAILED)


class Cause(enum.IntEnum):
    """Why a view changes; the lower number goes first (V6)."""

    FAILURE = 0
    DRAIN = 1
    REPLACE = 2
    SCALE = 3
    CAPACITY = 4
    REBALANCE = 5


class RecordKind(enum.Enum):
    """Kinds of journal records."""

    #: The run's first view, or its first one after all workers were lost, before any worker joins it.
    START = "start"
    #: A view's number and content, before anybody prepares it. The number is used up (V1).
    PREPARE = "prepare"
    #: A view is decided.
    DECIDED = "decided"
    #: A recovery's view and plan, before any rank acts (F4).
    RECOVER = "recover"
    #: The operator's number of workers.
    TARGET = "target"


@dataclasses.dataclass(frozen=True, kw_only=True)
class JournalRecord:
    """One numbered record of the run's journal."""

    record_id: int
    kind: RecordKind
    view: View | None = None
    #: Of a recovery: the target and where it comes from.
    plan: RecoveryPlan | None = None
    #: First step of the view, where it is known: steps applied when it was decided (K2).
    step: int | None = None
    #: The operator's number of workers; None: the configuration's. In every record.
    target: int | None = None
    reason: str = ""


# ---- events -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """Base of all events."""

    now_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tick(Timed):
    """Time has passed. Handed in after every round of polls, at least once a second."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerPlaced(Timed):
    """A worker that was asked for has room, and its process starts."""

    worker_id: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerPrepared(Timed):
    """A launched worker has built its model and waits for its first order."""

    info: WorkerInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchFailed(Timed):
    """Workers that were asked for will not come: no capacity in time, a node died, a model was not built.

    ``is_fatal``: the job's own fault (its model cannot be built); another attempt would fail as well.
    """

    worker_ids: tuple[str, ...]
    reason: str
    is_fatal: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatusSeen(Timed):
    """A worker has answered a poll. ``holdings`` where it was asked for them (AskHoldings) and has parked."""

    status: WorkerStatus
    holdings: Holdings | None = None
    #: Of a failed worker: the failure arose in its own model, feed or restore.
    is_origin: bool = False
    #: A checkpoint is still being written there.
    is_saving: bool = False
    #: Of a finished worker.
    summary: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSilent(Timed):
    """A worker has not answered polls for ``seconds``; it may be stopped, cut off or dead."""

    worker_id: str
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerLost(Timed):
    """A worker's process is known to be gone: it ended, or KillWorker was confirmed, or its lease is over (F7)."""

    worker_id: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleRequested(Timed):
    """The operator wants ``num_workers`` workers, within min and max."""

    num_workers: int
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrainNotice(Timed):
    """Workers will be gone in ``deadline_s``: their node is drained or they got a SIGTERM. Infinity: they stay until
    new ones can replace them, as was asked. None: no deadline is known."""

    worker_ids: tuple[str, ...]
    deadline_s: float | None
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RebalanceRequested(Timed):
    """Move row blocks among the present members: table name -> owner rank of each block."""

    placement: Mapping[str, tuple[int, ...]]
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopRequested(Timed):
    """The user, a signal or the loss of the driver asks the run to end at the next step boundary."""

    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopOverdue(Timed):
    """The workers have not ended in the time that an orderly end may take."""

    limit_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartWritten(Timed):
    """One rank's part of a checkpoint is on storage (or failed to get there)."""

    part: SnapshotPart


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManifestWritten(Timed):
    """A checkpoint became visible, or ``error`` says why not."""

    epoch: int
    step: int
    error: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JournalWritten(Timed):
    """A record is durable. A journal that cannot be written ends the run, so there is no other outcome."""

    record_id: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundWorker:
    """A worker that a restarted controller found alive. ``holdings`` also where it has not parked: they name its
    view."""

    info: WorkerInfo
    status: WorkerStatus
    holdings: Holdings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adopted(Timed):
    """The first event of a restarted controller: all workers it found, and its journal, oldest record first."""

    workers: tuple[FoundWorker, ...]
    journal: tuple[JournalRecord, ...]
    #: Newest visible checkpoint of the run's lineage.
    durable_step: int | None = None
    #: Highest epoch number found anywhere on storage.
    epoch_used: int = -1


Event = (
    Tick
    | WorkerPlaced
    | WorkerPrepared
    | LaunchFailed
    | StatusSeen
    | WorkerSilent
    | WorkerLost
    | ScaleRequested
    | DrainNotice
    | RebalanceRequested
    | StopRequested
    | StopOverdue
    | PartWritten
    | ManifestWritten
    | JournalWritten
    | Adopted
)

# ---- instructions -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LaunchWorkers:
    """Open one placement group for each of these new workers, and start it once there is room, however long that takes.
    -> WorkerPrepared or LaunchFailed for each."""

    worker_ids: tuple[str, ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class CancelLaunch:
    """Withdraw these requests. A worker that comes nevertheless is told to leave by the state machine. -> nothing."""

    worker_ids: tuple[str, ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class SendOrder:
    """Deliver ``order`` soon; losing it is no harm, since it is sent again until a status shows its effect.

    Of an order that has no lasting effect to show (Release, Leave) a lost one is not missed for correctness.
    """

    worker_id: str
    order: Order


@dataclasses.dataclass(frozen=True)
class AskHoldings:
    """Ask these workers for their holdings with the next poll. -> StatusSeen with ``holdings``."""

    worker_ids: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class AskStop:
    """Ask one worker to raise the stop flag in its header (S3); all ranks then stop at the same step."""

    worker_id: str
    reason: str


@dataclasses.dataclass(frozen=True)
class AskCheckpoint:
    """Ask one worker to raise the checkpoint flag in its header (S3)."""

    worker_id: str
    reason: str


@dataclasses.dataclass(frozen=True)
class KillWorker:
    """End a worker's process for certain and release its placement group. -> WorkerLost once that is confirmed, or
    after the lease where it cannot be (F2, F7)."""

    worker_id: str
    reason: str


@dataclasses.dataclass(frozen=True)
class WriteJournal:
    """Make a record durable. -> JournalWritten."""

    record: JournalRecord


@dataclasses.dataclass(frozen=True)
class WriteManifest:
    """All data files of a checkpoint are written: make it visible (K1). -> ManifestWritten."""

    epoch: int
    step: int
    parts: tuple[SnapshotPart, ...]


@dataclasses.dataclass(frozen=True)
class Publish:
    """Append a line to the run's event log."""

    kind: str
    fields: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class EndRun:
    """Release workers and placement groups; the run is over. The last instruction of a run."""

    phase: RunPhase
    reason: str


Instruction = (
    LaunchWorkers
    | CancelLaunch
    | SendOrder
    | AskHoldings
    | AskStop
    | AskCheckpoint
    | KillWorker
    | WriteJournal
    | WriteManifest
    | Publish
    | EndRun
)
