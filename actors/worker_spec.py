"""WorkerSpec: everything a worker is told of its job before it meets anybody. Values; picklable by Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from shoal.actors.dense import DenseOptimizerSpec
from shoal.actors.feed import BatchSource
from shoal.actors.trainer import LearningRates, LoopSpec
from shoal.kernels.faults import Schedule
from shoal.kernels.spec import IdPolicy, TableSpec
from shoal.kernels.tables import BaseEmbeddingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """A worker's place in a view, as its feed needs it."""

    rank: int
    world_size: int
    shares: tuple[float, ...]
    start_step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticSpec:
    """How a worker takes part in view changes and recoveries; None in its WorkerSpec: its world never changes."""

    #: Steps between snapshots whose changes go to the buddies (F3); None: only while a view change is prepared.
    protect_every_steps: int | None = 50
    #: Take them in views without buddies too (partial recovery).
    has_local_snapshots: bool = False
    #: Bytes per second that copies may take while training goes on; 0: unlimited.
    copy_bytes_per_s: float = 0.0
    #: V2: rounds of changes before it is decided whether a view change is worth its pause, and how long that may be.
    copy_rounds_max: int = 8
    pause_max_s: float = 2.0
    #: Forming the groups of a view, and what a cutover or a recovery copies.
    form_timeout_s: float = 30.0
    copy_timeout_s: float = 60.0
    #: F7: without a poll for this long nothing is written to storage.
    write_lease_s: float = 5.0
    #: F8: without a poll for this long all ranks park at one named step; for that long, the worker ends.
    lease_s: float = 60.0
    orphan_s: float = 300.0
    #: Bound on the bytes of saved row versions (C3); None: unbounded.
    version_bytes_max: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Everything a worker needs to know of its job; the same for all workers of a run, picklable."""

    run: str
    build_model: Callable[[], nn.Module]
    #: The job's settings applied to a table's config: the table, or its column blocks.
    make_table: Callable[[BaseEmbeddingConfig], TableSpec | Sequence[TableSpec]]
    policies: Mapping[str, IdPolicy]
    learning_rates: Callable[[Sequence[TableSpec]], LearningRates]
    dense_optimizer: DenseOptimizerSpec
    loop: LoopSpec
    train_feed: Callable[[Seat], BatchSource]
    eval_feed: Callable[[Seat], BatchSource] | None
    #: The run's folder (``shoal.platform.storage.Storage``).
    storage: Any
    #: (epoch, step) -> the checkpoint's folder within ``storage``.
    checkpoint_directory: Callable[[int, int], str]
    checkpoint_bytes_per_s: float = 0.0
    num_threads: int = 1
    op_timeout_s: float = 10.0
    start_timeout_s: float = 180.0
    checkpoint_timeout_s: float = 3600.0
    #: How long a feed may take for a batch.
    feed_timeout_s: float = 300.0
    elastic: ElasticSpec | None = None
    #: The Ray node label whose value is a worker's host; empty: the node is.
    host_label: str = ""
    #: What goes wrong on purpose (``shoal chaos``).
    faults: Schedule | None = None
