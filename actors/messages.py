"""What crosses process boundaries between the controller and its workers: immutable values, no behaviour.

Everything here is picklable by Ray and free of handles. A view is replaced, never changed (PROTOCOLS V1).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.kernels.spec import TableSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One worker of a view. ``share`` is its part of every global batch; shares of a view sum to 1."""

    rank: int
    worker_id: str
    #: The network locality level: the Ray node id unless configured.
    host: str
    share: float


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


class WorkerPhase(enum.Enum):
    """Where a worker stands, as it reports it."""

    STARTING = "starting"
    TRAINING = "training"
    EVALUATING = "evaluating"
    CHECKPOINTING = "checkpointing"
    FINISHED = "finished"
    FAILED = "failed"


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """What a worker says once its model is built: the controller places tables from it and compares ranks."""

    worker_id: str
    host: str
    pid: int
    tables: tuple[TableSpec, ...]
    #: Hash of everything about the model that ranks must agree on (tables, features, dense layout).
    model_hash: int
    dense_parameters: int


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
