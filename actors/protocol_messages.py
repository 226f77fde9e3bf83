"""What goes into a worker's state machine and what comes out: events and instructions. Pure values.

Three kinds of events reach ``shoal.actors.protocol.WorkerState.handle``, always from the step loop's thread:

* *outcomes*: the end of the one blocking instruction that is under way. Each answer ends with the next blocking one.
* *news*: orders and what background work has to say, taken from an inbox. The inbox is emptied (a) right before an
  outcome is handed in, where an answer holds instructions that do not block, and (b) one by one while the thread is in
  ``WaitForOrder``, where each answer ends with a blocking instruction.
* the first event of a worker's life is news: the machine begins in ``WaitForOrder``.

An order that cannot wait for the step's end (``WorkerState.is_urgent``) is put into the inbox *and* the groups are
aborted at once from the receiving thread, so that the blocking instruction fails soon.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from shoal.actors.messages import Order, RecoveryPlan, View
from shoal.kernels.frame import Flag

NO_FLAG = Flag(0)

# ---- news ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OrderArrived:
    """The controller has told this worker something. The same order may come again, late, or out of order."""

    order: Order


@dataclasses.dataclass(frozen=True)
class PrepareReady:
    """This worker's part of preparing ``epoch`` is done: copies are current, its groups are formed (V2, V3)."""

    epoch: int


@dataclasses.dataclass(frozen=True)
class PrepareFailed:
    """``epoch`` cannot be prepared here: groups were not formed in time, a destination is gone or full."""

    epoch: int
    reason: str


@dataclasses.dataclass(frozen=True)
class CutOverCalled:
    """To a joiner, over the data connection: the members act on the cutover to ``epoch`` at boundary ``step``.

    A joiner sees no headers of the present view, so rank 0 of that view tells it when it sends the dense state.
    """

    epoch: int
    step: int


@dataclasses.dataclass(frozen=True)
class ControllerSilent:
    """Nobody has polled this worker for ``seconds``. Reported at every boundary and wait once it exceeds the lease."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class ControllerBack:
    """A poll came after a silence that was reported."""


News = OrderArrived | PrepareReady | PrepareFailed | CutOverCalled | ControllerSilent | ControllerBack

# ---- outcomes -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Joined:
    """JoinView is done: rows and dense state are those after ``step`` steps."""

    epoch: int
    step: int


@dataclasses.dataclass(frozen=True)
class JoinFailed:
    """The first view was not formed, because of other ranks."""

    epoch: int
    reason: str
    #: Ranks of the new view that did not answer in an exchange of it, where known.
    missing_ranks: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class StepDone:
    """A step was applied here, and its boundaries (log, checkpoint, evaluation) are behind.

    ``step`` counts applied steps. ``flags``, ``control`` (the largest control word) and ``protected`` (the smallest
    ``acked``) are those of the step's opening header exchange: the same values on every rank.
    """

    step: int
    flags: Flag = NO_FLAG
    control: int = 0
    protected: int = -1


@dataclasses.dataclass(frozen=True)
class StepFailed:
    """An exchange failed because of other ranks; ``missing_ranks`` are those that did not answer, where known."""

    reason: str
    missing_ranks: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class LoopFailed:
    """The user's model, feed or data failed, here or (agreed in a header) elsewhere; also a failed restore."""

    reason: str


@dataclasses.dataclass(frozen=True)
class LoopEnded:
    """FinishLoop is done: the last checkpoint is cut and the summary is there."""

    step: int


@dataclasses.dataclass(frozen=True)
class CutOverDone:
    """The first header exchange of ``epoch`` completed here, which decides it (V4).

    Of a worker that leaves: its final changes and metric bins are acknowledged; it does not learn more.
    """

    epoch: int
    step: int


@dataclasses.dataclass(frozen=True)
class CutOverFailed:
    """The cutover did not complete here. Whether it did elsewhere is not known (V4); nothing was dropped (V5)."""

    epoch: int
    reason: str
    #: Ranks of the new view that did not answer in an exchange of it, where known.
    missing_ranks: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Recovered:
    """PerformRecover is done: rows and dense state are those after ``step`` steps, the view's header is exchanged.

    Of a worker that only supplies rows and is no member: its shipments are acknowledged.
    """

    epoch: int
    step: int


@dataclasses.dataclass(frozen=True)
class RecoverFailed:
    """The recovery to ``epoch`` did not complete here; it may be tried again under another epoch (F4)."""

    epoch: int
    reason: str
    #: Ranks of the new view that did not answer in an exchange of it, where known.
    missing_ranks: tuple[int, ...] = ()


Outcome = (
    Joined
    | JoinFailed
    | StepDone
    | StepFailed
    | LoopFailed
    | LoopEnded
    | CutOverDone
    | CutOverFailed
    | Recovered
    | RecoverFailed
)
Event = News | Outcome

# ---- instructions that block --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class JoinView:
    """Form the run's first view and load ``restore`` (None: initial values, step 0). Leaves a snapshot of the step
    behind where snapshots are taken regularly. -> Joined, JoinFailed, LoopFailed."""

    view: View
    restore: Any = None


@dataclasses.dataclass(frozen=True)
class RunStep:
    """Run the next step with the flags raised since the last one. -> StepDone, StepFailed, LoopFailed."""


@dataclasses.dataclass(frozen=True)
class FinishLoop:
    """All steps are done, or all ranks agreed to stop: last checkpoint, evaluation. -> LoopEnded, StepFailed,
    LoopFailed."""

    is_stopped: bool


@dataclasses.dataclass(frozen=True)
class PerformCutOver:
    """Go from the present view to ``view`` at boundary ``step`` (V4): final changes, checksums, dense state, the first
    header exchange. Leaves a snapshot of ``step`` behind, complete everywhere. -> CutOverDone, CutOverFailed.

    ``old`` is None on a joiner; a worker that is no member of ``view`` sends what it owes and is done.
    """

    view: View
    old: View | None
    step: int


@dataclasses.dataclass(frozen=True)
class PerformRecover:
    """Come to ``plan.step`` and form ``view``, or only supply rows where this worker is no member. Idempotent up to
    the end: nothing that another attempt may need is dropped. Leaves a snapshot of ``plan.step`` behind, whose copies
    are completed in the background. -> Recovered, RecoverFailed, LoopFailed."""

    view: View
    plan: RecoveryPlan


@dataclasses.dataclass(frozen=True)
class WaitForOrder:
    """Wait for the next news."""


@dataclasses.dataclass(frozen=True)
class Exit:
    """End the process. Nothing follows."""

    reason: str


Blocking = JoinView | RunStep | FinishLoop | PerformCutOver | PerformRecover | WaitForOrder | Exit

# ---- instructions that do not block -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TakeSnapshot:
    """Cut the store at the present boundary, of ``step`` applied steps, and send changes to holders in the background;
    the rank's ``acked`` becomes ``step`` when all of them have acknowledged (F3)."""

    step: int


@dataclasses.dataclass(frozen=True)
class Protect:
    """The snapshot of ``step`` is complete everywhere: release older cuts, fold staged changes up to it (F3)."""

    step: int


@dataclasses.dataclass(frozen=True)
class BeginPreparing:
    """Send copies to those that will hold them and form the groups of ``view``, in the background. -> PrepareReady,
    PrepareFailed."""

    view: View


@dataclasses.dataclass(frozen=True)
class CancelPreparing:
    """Stop what BeginPreparing began: groups are destroyed, sending stops. Copies received stay until DropOthers."""

    epoch: int
    reason: str


@dataclasses.dataclass(frozen=True)
class RaiseFlag:
    """Put ``flag`` and, unless 0, ``control`` into the next step's header, once (S3)."""

    flag: Flag
    control: int = 0


@dataclasses.dataclass(frozen=True)
class DestroyGroups:
    """Destroy the groups of every view, which releases the peers (F1). Always before a worker parks or fails."""

    reason: str


@dataclasses.dataclass(frozen=True)
class DropOthers:
    """Drop rows, versions and staged changes that neither ``view`` nor ``keep`` (being prepared) gives to this
    worker."""

    view: View
    keep: View | None = None


Background = TakeSnapshot | Protect | BeginPreparing | CancelPreparing | RaiseFlag | DestroyGroups | DropOthers
Instruction = Blocking | Background
