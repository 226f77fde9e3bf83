"""What a controller needs to know of a job, and what a driver learns from it: values that travel between the two."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from shoal.actors.worker_spec import WorkerSpec
from shoal.kernels.spec import TableSpec, WireCodecs
from shoal.platform.config import ScalingConfig
from shoal.platform.config_failure import FailureConfig
from shoal.platform.placement import ShardingType
from shoal.platform.state_messages import RunPhase
from shoal.platform.storage import Storage


def plain_codecs(table: TableSpec) -> WireCodecs:
    """fp32 for every table."""
    return WireCodecs()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What the controller needs to know of a job; picklable."""

    name: str
    scaling: ScalingConfig
    failure: FailureConfig
    worker: WorkerSpec
    storage: Storage
    steps_total: int
    sharding: Callable[[TableSpec], ShardingType]
    codecs: Callable[[TableSpec], WireCodecs] = plain_codecs
    #: Table -> what placement evens out; None: its bytes.
    loads: Callable[[TableSpec], float] | None = None
    resume: str | int = "auto"
    #: Called once the run is accepted: its checkpoint is chosen, and its data is what it was.
    record: Callable[[], None] = lambda: None
    num_to_keep: int | None = 2
    #: A full checkpoint, then this many less one that hold what has changed since the one before.
    full_every: int = 1
    #: Checkpoints in a row that may fail before the run ends; None: any number.
    max_failed_checkpoints: int | None = None
    #: What identifies the data order (D2), and the check of a stored one against it.
    data_fingerprint: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    check_fingerprint: Callable[[Mapping[str, Any]], None] = lambda stored: None
    op_timeout_s: float = 10.0
    start_timeout_s: float = 180.0
    #: A stop is given this long, and a checkpoint's time, before the workers are ended as they are.
    stop_timeout_s: float = 30.0
    checkpoint_timeout_s: float = 3600.0
    #: Between two rounds of polls while the run trains; a view change or a recovery is polled more often.
    poll_interval_s: float = 0.2
    #: One call to a worker. One that does not answer is called again until its silence has been decided upon.
    call_timeout_s: float = 10.0
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: Tells this start of the run from every other one: a restarted controller has the same.
    token: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def num_workers(self) -> int:
        """The most workers that the job asks for; 1 without Ray."""
        return max(1, self.scaling.max_workers)


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
