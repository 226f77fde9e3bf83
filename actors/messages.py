"""What crosses process boundaries between the controller and its workers: immutable values, no behaviour.

Everything here is picklable by Ray and free of handles. A view is replaced, never changed (PROTOCOLS V1).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from shoal.kernels.spec import TableSpec, WireCodecs


@dataclasses.dataclass(frozen=True)
class BlockSet:
    """A set of row blocks: (table name, ascending blocks), in table-name order, without empty tables. Immutable."""

    tables: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @staticmethod
    def of(blocks: Mapping[str, Iterable[int]]) -> BlockSet:
        """The set with ``blocks``, table name -> blocks."""
        made = ((table, tuple(sorted(set(numbers)))) for table, numbers in sorted(blocks.items()))
        return BlockSet(tuple((table, numbers) for table, numbers in made if numbers))

    def as_dict(self) -> dict[str, tuple[int, ...]]:
        """Table name -> ascending blocks."""
        return dict(self.tables)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """(table, block), table by table."""
        return ((table, block) for table, blocks in self.tables for block in blocks)

    def __len__(self) -> int:
        return sum(len(blocks) for _, blocks in self.tables)

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key[1] in dict(self.tables).get(key[0], ())

    def __or__(self, other: BlockSet) -> BlockSet:
        return self._joined(other, lambda a, b: a | b)

    def __and__(self, other: BlockSet) -> BlockSet:
        return self._joined(other, lambda a, b: a & b)

    def __sub__(self, other: BlockSet) -> BlockSet:
        return self._joined(other, lambda a, b: a - b)

    def _joined(self, other: BlockSet, join: Callable[[set[int], set[int]], set[int]]) -> BlockSet:
        mine, theirs = self.as_dict(), other.as_dict()
        return BlockSet.of({t: join(set(mine.get(t, ())), set(theirs.get(t, ()))) for t in mine.keys() | theirs.keys()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One worker of a view. ``share`` is its part of every global batch; shares of a view sum to 1."""

    rank: int
    worker_id: str
    #: The network locality level: the Ray node id unless configured.
    host: str
    share: float
    #: "host:port" of the worker's transfer server; empty in a world that never changes.
    address: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """What all ranks must agree on while an epoch lasts (V1)."""

    run: str
    epoch: int
    members: tuple[Member, ...]
    #: Table name -> owner rank of each row block.
    placement: Mapping[str, tuple[int, ...]]
    #: auto, shm, gloo or nccl.
    transport: str
    store_host: str
    store_port: int
    #: How rows travel: flat or hierarchical (``kernels/row_exchange``). A switch changes numbers in rounding (S5).
    exchange: str = "flat"
    #: Table -> wire formats; tables without an entry travel as fp32. A switch changes numbers (S5).
    codecs: Mapping[str, WireCodecs] = dataclasses.field(default_factory=dict)
    #: Tables whose values every rank keeps (data parallel): owners send what changes (``csrc/core/step/mirrors.h``).
    mirrored: tuple[str, ...] = ()
    #: For every rank the rank that holds copies of its row blocks and of its metric bins (F5); empty: nobody does.
    buddies: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host of every rank, in rank order."""
        return tuple(member.host for member in self.members)

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of every rank, in rank order."""
        return tuple(member.share for member in self.members)

    def owners(self, table: str) -> np.ndarray:
        """uint16 [num_blocks]: the rank that owns each row block of ``table``."""
        return np.asarray(self.placement[table], dtype=np.uint16)

    def rank_of(self, worker_id: str) -> int | None:
        """The worker's number in this view; None where it is not a member."""
        return next((m.rank for m in self.members if m.worker_id == worker_id), None)

    def buddy(self, rank: int) -> int | None:
        """The rank that holds copies of ``rank``'s blocks; None without replication."""
        found = self.buddies[rank] if self.buddies else -1
        return found if found >= 0 else None

    def owned_by(self, rank: int) -> BlockSet:
        """The row blocks that ``rank`` owns."""
        return BlockSet.of(
            {t: [b for b, owner in enumerate(owners) if owner == rank] for t, owners in self.placement.items()}
        )

    def copied_by(self, rank: int) -> BlockSet:
        """The row blocks that ``rank`` holds copies of for their owners."""
        wards = {r for r, buddy in enumerate(self.buddies) if buddy == rank}
        return BlockSet.of(
            {t: [b for b, owner in enumerate(owners) if owner in wards] for t, owners in self.placement.items()}
        )

    def held_by(self, rank: int) -> BlockSet:
        """The row blocks that ``rank`` owns or holds copies of."""
        return self.owned_by(rank) | self.copied_by(rank)


class WorkerPhase(enum.Enum):
    """Where a worker stands, as it reports it."""

    STARTING = "starting"
    TRAINING = "training"
    EVALUATING = "evaluating"
    CHECKPOINTING = "checkpointing"
    #: Between the last exchange of one view and the first of the next.
    CUTTING_OVER = "cutting over"
    #: Its exchange failed, or it waits for a controller: groups are destroyed, state is kept, an order is awaited (F1).
    PARKED = "parked"
    RECOVERING = "recovering"
    #: No member of the decided view any more; keeps its rows until it is told to end (V5).
    LEFT = "left"
    FINISHED = "finished"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareProgress:
    """How far a worker is with preparing a view (V2)."""

    #: Its copies are current enough to cut over, and its groups are formed.
    is_ready: bool
    rounds: int = 0
    bytes_moved: int = 0
    rows_last_round: int = 0
    predicted_pause_s: float = 0.0
    #: Why this view cannot be prepared; the controller aborts it.
    error: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """A worker's answer to a poll (F2): what its step loop last published."""

    worker_id: str
    rank: int
    epoch: int
    step: int
    phase: WorkerPhase
    #: Seconds since the phase or step last changed.
    since_s: float
    pid: int
    host: str
    error: str | None = None
    #: Newest snapshot that all ranks of the view have acknowledged, as this rank knows it (F3); -1: none.
    protected: int = -1
    #: Bytes of this rank's rows without a current copy on its buddy.
    unprotected_bytes: int = 0
    #: Rows this rank owns.
    rows: int = 0
    #: Orders of epochs below this are void for this worker: what a parked worker has reported then holds (F4).
    fence: int = 0
    #: Worker ids that did not answer in the exchange because of which this worker has parked, where known.
    unreachable: tuple[str, ...] = ()
    #: Epoch being prepared, or -1; and how that stands.
    preparing: int = -1
    prepare: PrepareProgress | None = None
    #: Seconds until this process ends because it was told to (SIGTERM); None: it was not.
    drain_s: float | None = None
    #: Seconds since this process last applied a step; None: it has not applied any.
    applied_s: float | None = None
    #: What the last view change or recovery of this worker took, by part: {"close": s, "copy": s, "form": s, ...}, and
    #: "feed": the first step's wait for its batch.
    timings: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """What rank 0 says at a log or evaluation boundary."""

    #: "train" or "eval".
    kind: str
    #: Steps applied so far.
    step: int
    #: Metric name (its unit last) -> value.
    values: Mapping[str, float]
    #: Wall time of the window or evaluation.
    seconds: float
    #: Logical table -> what its flow costs, from the window's last step; empty in a world of one.
    flows: Mapping[str, FlowCost] = dataclasses.field(default_factory=dict)


class FlowCost(NamedTuple):
    """Bytes of rows and gradients of one step, all ranks together, for a table in either flow."""

    #: The flow it has: "rows" or "pooled".
    flow: str
    rows_bytes: float
    #: None where it cannot be pooled.
    pooled_bytes: float | None

    @property
    def bytes_now(self) -> float:
        return self.rows_bytes if self.flow == "rows" or self.pooled_bytes is None else self.pooled_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """What a worker says once its model is built: the controller places tables from it and compares ranks."""

    worker_id: str
    host: str
    pid: int
    tables: tuple[TableSpec, ...]
    #: Hash of everything that workers must agree on: ``facts``.
    model_hash: int
    dense_parameters: int
    #: "host:port" where other workers send row blocks; empty where nothing ever moves.
    address: str = ""
    #: What the worker's numbers depend on (``rank_facts``).
    facts: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotPart:
    """One rank's finished part of a checkpoint: what the controller needs to write the manifest (K1)."""

    epoch: int
    step: int
    rank: int
    #: File entries as ``shoal.actors.snapshot`` returns them.
    files: tuple[Any, ...]
    #: Set on rank 0: cursor, metric values and whatever else describes the whole checkpoint.
    summary: Mapping[str, Any] | None = None
    error: str | None = None
    #: Rows that were not updated after this step may have been left out (K3); None: it holds all rows.
    since: int | None = None
    #: It was given up because the view is over; nothing is wrong with storage.
    is_cancelled: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerPoll:
    """A worker's answer to a poll: its status and what has happened since the last one. Polls are pulls, so that the
    step loop never calls anybody (0 control calls per step)."""

    status: WorkerStatus
    records: tuple[Progress, ...] = ()
    parts: tuple[SnapshotPart, ...] = ()
    #: Set once the loop has returned.
    summary: Mapping[str, Any] | None = None
    #: Set once the loop has failed. Shoal's own errors keep their type, others become PeerError; where it arose in the
    #: user's code its text has the traceback.
    failure: BaseException | None = None
    #: The failure arose on this rank (its model, feed, restore or update); False: it suffers from another rank's.
    is_origin: bool = False
    #: A snapshot is being written; its part is still to come, also after a failure.
    is_saving: bool = False


# ---- recovery -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copies:
    """Row blocks a worker holds for others, and the steps (applied) to which it can bring all of them."""

    blocks: BlockSet
    steps: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holdings:
    """What a parked worker can bring into a recovered view (F4). Steps count applied steps."""

    worker_id: str
    #: The newest view this worker knows to be decided; None: it never joined one.
    view: View | None
    #: Steps applied by this worker; not a state it can give to others unless it is among ``snapshots``.
    applied: int
    #: Steps to which its own blocks, its dense state and its metric bins can be rolled back, ascending.
    snapshots: tuple[int, ...]
    #: Blocks it owns.
    owned: BlockSet
    copies: tuple[Copies, ...] = ()
    #: Worker id -> steps for which it holds that worker's metric bins.
    aux: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    #: Highest snapshot it knows to be protected; -1: none.
    protected: int = -1
    #: As in WorkerStatus for a worker that waits for orders; 0 while it is at work, when nothing here lasts.
    fence: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shipment:
    """Row blocks (and, with ``has_dense``, the dense state) that one worker sends to another during a recovery."""

    source: str
    target: str
    blocks: BlockSet = BlockSet()
    has_dense: bool = False
    #: Worker ids whose metric bins travel along: the target adds them to its own.
    aux_of: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """How the members of a new view come to one common step."""

    #: Steps applied at the target: training goes on with this step.
    step: int
    #: True: rows and dense state come from a checkpoint, or from their initial values (``restore`` None).
    from_checkpoint: bool
    shipments: tuple[Shipment, ...] = ()
    #: Worker id -> what it reads from storage (``shoal.actors.shard_host.Restore``): everything it owns with
    #: ``from_checkpoint``, else (partial recovery) the lost blocks only.
    restores: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: Worker ids whose rows are lost and come from a checkpoint or their initial values (partial recovery).
    lost_blocks: BlockSet = BlockSet()
    reason: str = ""


# ---- orders: what the controller tells a worker -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Join the run's first view, from step 0 or a checkpoint. Sent once, to a worker that has no view."""

    view: View
    restore: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepare:
    """Get ready for ``view`` while the present one goes on (V2). Also the first order of a joiner."""

    view: View
    #: Steps applied when the order was given: from about here on a joiner's feed looks ahead.
    step: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CutOver:
    """To rank 0: raise the cutover to ``epoch``, which all members have prepared, in the next header (S3, V4)."""

    epoch: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Abort:
    """Forget the preparation of ``epoch``: it will not be formed."""

    epoch: int
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
    """``epoch`` is journalled: drop every row block that it does not give to this worker (V5)."""

    epoch: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Park:
    """Leave the groups and wait: a member of the view is lost. Harmless where the worker has parked already."""

    #: The number of the attempt that follows, newer than every view so far: orders below it are void from now on, so
    #: that what the worker reports stays true until it gets a Recover of this number or a higher one.
    epoch: int
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recover:
    """Come to ``plan.step`` and go on in ``view``; to parked workers and to joiners."""

    view: View
    plan: RecoveryPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leave:
    """The run no longer needs this worker: end."""

    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetBase:
    """The next checkpoints build on the complete one of ``step`` (K3); None: they are full. Not an order of the view:
    each worker may hear of it whenever, or not at all."""

    step: int | None


Order = Start | Prepare | CutOver | Abort | Release | Park | Recover | Leave
