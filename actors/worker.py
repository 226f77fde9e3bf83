"""Worker: one rank's process state: model, shards, feed and step loop. A plain class; ``runtime`` makes it an actor.

The controller drives it with four calls: ``prepare`` (build the model), ``start`` (join a view, restore, train in a
thread of its own), ``poll`` (status and what has happened; also the sign that the controller is alive) and ``request``
(raise a flag). The step loop itself never calls anybody.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shoal.actors.dense import DenseOptimizerSpec, DenseReplica
from shoal.actors.embedding import lazy_tables
from shoal.actors.feed import BatchSource
from shoal.actors.groups import Groups, GroupSpec, form, run_hash
from shoal.actors.messages import Progress, SnapshotPart, View, WorkerInfo, WorkerPhase, WorkerPoll, WorkerStatus
from shoal.actors.session import Session
from shoal.actors.shard_host import Restore, ShardHost
from shoal.actors.sharded import describe_model
from shoal.actors.snapshot_writer import SnapshotWriter
from shoal.actors.trainer import LearningRates, LoopSpec, Trainer
from shoal.kernels import errors
from shoal.kernels.errors import DataError, PeerError, RowError, ShoalError
from shoal.kernels.exchange import Exchange
from shoal.kernels.frame import Flag, Identity
from shoal.kernels.plan import StepPlan
from shoal.kernels.spec import IdPolicy, TableSpec
from shoal.kernels.tables import BaseEmbeddingConfig

logger = logging.getLogger(__name__)

_PORTABLE = frozenset(c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.ShoalError))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """A worker's place in a view, as its feed needs it."""

    rank: int
    world_size: int
    shares: tuple[float, ...]
    start_step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Everything a worker needs to know of its job; the same for all workers of a run, picklable."""

    run: str
    build_model: Callable[[], nn.Module]
    #: The job's settings applied to a table's config.
    make_table: Callable[[BaseEmbeddingConfig], TableSpec]
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


class Worker:
    """One rank. Methods are called by the controller, from other threads than the step loop's."""

    def __init__(self, worker_id: str, spec: WorkerSpec) -> None:
        self.worker_id = worker_id
        self.spec = spec
        #: Set once the worker has joined a view; readable after the loop has ended.
        self.trainer: Trainer | None = None
        self.shards: ShardHost | None = None
        self._lock = threading.Lock()
        self._records: list[Progress] = []
        self._parts: list[SnapshotPart] = []
        self._summary: Mapping[str, Any] | None = None
        self._error: str | None = None
        self._failure: BaseException | None = None
        self._is_origin = False
        self._phase, self._step, self._since = WorkerPhase.STARTING, 0, time.monotonic()
        self._rank, self._epoch = -1, -1
        self._address = ""
        self._requested = Flag(0)
        self._thread: threading.Thread | None = None
        self._groups: Groups | None = None
        self._session: Session | None = None
        self._feed: BatchSource | None = None
        self._writer: SnapshotWriter | None = None
        self.last_contact = time.monotonic()

    # ---- what the controller calls --------------------------------------------------------------------------------

    def prepare(self, host: str | None = None, address: str = "") -> WorkerInfo:
        """Build the model (tables take no memory yet) and describe it.

        Args:
            host: the network locality this worker is on; by default the machine's name.
            address: where workers of other hosts reach this one; by default Gloo's own choice.
        """
        self._address = address
        torch.set_num_threads(self.spec.num_threads)
        torch.manual_seed(self.spec.loop.seed)
        with lazy_tables():
            self.model = self.spec.build_model()
        self.model_tables = describe_model(self.model, self.spec.make_table, self.spec.policies)
        self.host = host or socket.gethostname()
        dense = [(name, tuple(p.shape), str(p.dtype)) for name, p in self.model.named_parameters()]
        # Values too: a factory that draws from numpy's generator builds another model in each process.
        values = hashlib.blake2b(digest_size=8)
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if not tensor.is_meta:
                values.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        text = repr((self.model_tables.tables, self.model_tables.features, dense, values.hexdigest()))
        return WorkerInfo(
            worker_id=self.worker_id,
            host=self.host,
            pid=os.getpid(),
            tables=self.model_tables.tables,
            model_hash=int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"),
            dense_parameters=sum(p.numel() for p in self.model.parameters()),
        )

    def start(self, view: View, rank: int, restore: Restore | None = None) -> None:
        """Join ``view`` as ``rank`` and train in a thread; returns at once."""
        self._rank, self._epoch = rank, view.epoch
        self._thread = threading.Thread(target=self._run, args=(view, restore), name=f"step-loop-{rank}", daemon=True)
        self._thread.start()

    def poll(self) -> WorkerPoll:
        """Status, and the records and checkpoint parts since the last poll."""
        self.last_contact = time.monotonic()
        writer = self._writer
        # Asked before the parts are taken: a part delivered in between is then in this poll.
        is_saving = writer is not None and writer.is_writing
        with self._lock:
            records, self._records = tuple(self._records), []
            parts, self._parts = tuple(self._parts), []
            status = WorkerStatus(
                worker_id=self.worker_id,
                rank=self._rank,
                epoch=self._epoch,
                step=self._step,
                phase=self._phase,
                since_s=time.monotonic() - self._since,
                pid=os.getpid(),
                host=getattr(self, "host", ""),
                error=self._error,
            )
            return WorkerPoll(
                status=status,
                records=records,
                parts=parts,
                summary=self._summary,
                failure=self._failure,
                is_origin=self._is_origin,
                is_saving=is_saving,
            )

    def request(self, flags: int) -> None:
        """Raise flags in the next step's header (S3)."""
        self._requested |= Flag(flags)
        if self.trainer is not None:
            self.trainer.request(Flag(flags))

    def shut_down(self) -> None:
        """Leave the view's groups, which releases peers that wait for this rank (F1)."""
        groups = self._groups
        if groups is not None:
            groups.abort()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the step loop to end (num_workers=0 and tests)."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    # ---- the step loop's thread -----------------------------------------------------------------------------------

    def _run(self, view: View, restore: Restore | None) -> None:
        try:
            summary = self._train(view, restore)
            self._leave()
            with self._lock:
                self._summary = summary
            self._set_phase(WorkerPhase.FINISHED, self._step)
        except BaseException as error:  # the actor's edge: becomes a status that the controller reads
            logger.error("worker=%s failed\n%s", self.worker_id, "".join(traceback.format_exception(error)))
            # Known before peers are let go: their errors are this one's consequences.
            with self._lock:
                self._error = f"{type(error).__name__}: {error}"
                self._failure, self._is_origin = describe_failure(error)
            self._set_phase(WorkerPhase.FAILED, self._step)
            self._leave()

    def _leave(self) -> None:
        """Let go of the view: the groups first, so that no peer waits for the feed's threads to end (F1)."""
        for close in (
            self._groups.destroy if self._groups is not None else None,
            self._session.detach if self._session is not None else None,
            self._feed.close if self._feed is not None else None,
        ):
            try:
                if close is not None:
                    close()
            except Exception:  # the outcome stands; what follows must still be released
                logger.exception("worker=%s action=leave", self.worker_id)

    def _train(self, view: View, restore: Restore | None) -> Mapping[str, Any]:
        torch.set_num_threads(self.spec.num_threads)
        self.shards = ShardHost(self.model_tables.tables, view, self._rank, num_threads=self.spec.num_threads)
        self._session = self._open_session(view, self.shards)
        trainer, self._writer = self._make_trainer(view, restore, self.shards, self._session)
        # In this order: a request that comes in between is raised twice rather than never.
        self.trainer = trainer
        trainer.request(self._requested)
        summary = trainer.run()
        self._writer.wait(self.spec.checkpoint_timeout_s)
        return summary

    def _open_session(self, view: View, host: ShardHost) -> Session:
        """Form the view's groups and open the data plane over them."""
        spec, rank = self.spec, self._rank
        self._groups = groups = form(
            GroupSpec(
                run=view.run,
                epoch=view.epoch,
                rank=rank,
                hosts=view.hosts,
                store_host=view.store_host,
                store_port=view.store_port,
                transport=view.transport,
                # Among ranks of one host Gloo listens on loopback; across hosts it may choose that too, unless told.
                bind_address=self._address if len(set(view.hosts)) > 1 else "",
                form_timeout_s=spec.start_timeout_s,
                timeout_s=spec.op_timeout_s,
            )
        )
        plan = StepPlan(
            host.store,
            self.model_tables.tables,
            self.model_tables.features,
            [view.owners(table.name) for table in self.model_tables.tables],
            rank=rank,
            world_size=view.world_size,
            num_threads=spec.num_threads,
        )
        identity = Identity(
            run=run_hash(view.run),
            epoch=view.epoch,
            rank=rank,
            world_size=view.world_size,
            plan_hash=plan.hash,
            num_tables=len(self.model_tables.tables),
        )
        exchange = Exchange(
            groups.transport, identity, timeout_s=spec.op_timeout_s, payload_transport=groups.payload_transport
        )
        return Session(
            self.model_tables,
            host.store,
            plan,
            exchange,
            start_timeout_s=spec.start_timeout_s,
        )

    def _make_trainer(
        self, view: View, restore: Restore | None, host: ShardHost, session: Session
    ) -> tuple[Trainer, SnapshotWriter]:
        """The dense replica, restored if the run goes on, the feed from the step it goes on with, and the loop."""
        spec, rank = self.spec, self._rank
        dense = DenseReplica(self.model, spec.dense_optimizer)
        if view.world_size > 1 and rank == 0 and dense.floating_buffers:
            logger.warning(
                "buffer=%s reason='not shared between ranks, checkpoints hold rank 0's'", dense.floating_buffers[0]
            )
        start_step = 0
        metrics_state = None
        num_samples = 0
        if restore is not None:
            start_step = restore.step
            dense_tensors, metrics_state, metadata = host.restore(restore, spec.storage)
            dense.load_state_tensors(dense_tensors, metadata.get("optimizer"))
            num_samples = int(metadata.get("samples", 0))
        seat = Seat(rank=rank, world_size=view.world_size, shares=view.shares, start_step=start_step)
        self._feed = feed = spec.train_feed(seat)
        writer = SnapshotWriter(
            host,
            dense,
            spec.storage,
            spec.checkpoint_directory,
            spec.checkpoint_bytes_per_s,
            self._add_part,
        )
        eval_feed = spec.eval_feed
        trainer: Trainer = Trainer(
            dataclasses.replace(
                spec.loop, checkpoint_timeout_s=spec.checkpoint_timeout_s, feed_timeout_s=spec.feed_timeout_s
            ),
            model=self.model,
            session=session,
            dense=dense,
            feed=feed,
            eval_feed=None if eval_feed is None else lambda: eval_feed(dataclasses.replace(seat, start_step=0)),
            learning_rates=spec.learning_rates(self.model_tables.tables),
            start_step=start_step,
            on_progress=self._add_record,
            before_checkpoint=lambda: writer.wait(spec.checkpoint_timeout_s),
            on_checkpoint=lambda step: writer.start(
                step, view.epoch, rank, trainer.metrics, {"samples": trainer.num_samples}, spec.checkpoint_timeout_s
            ),
            on_phase=self._set_phase,
        )
        if metrics_state is not None and rank == 0:
            trainer.metrics.load_state_dict(metrics_state)
        trainer.num_samples = num_samples
        return trainer, writer

    def _add_record(self, record: Progress) -> None:
        with self._lock:
            self._records.append(record)

    def _add_part(self, part: SnapshotPart) -> None:
        with self._lock:
            self._parts.append(part)

    def _set_phase(self, phase: WorkerPhase, step: int) -> None:
        self._phase, self._step, self._since = phase, step, time.monotonic()


def describe_failure(error: BaseException) -> tuple[BaseException, bool]:
    """(the error as it crosses processes, whether it arose on this rank).

    Shoal's errors keep type and code. Where this rank is the origin, the text gains the traceback of what the user's
    code raised, or the whole message of a Shoal error that the exchange had cut. Any other exception becomes a
    PeerError, since a user's class may not unpickle elsewhere.
    """
    mark = error.is_origin if isinstance(error, ShoalError) else None
    is_origin = not isinstance(error, PeerError) if mark is None else mark
    if not isinstance(error, ShoalError) or type(error) not in _PORTABLE:
        lines = "".join(traceback.format_exception(error))
        return PeerError(f"{type(error).__name__}: {error}\n{lines}"), is_origin
    cause = error.__cause__
    if mark is not True or cause is None:
        return error, is_origin
    addition = str(cause) if isinstance(cause, ShoalError) else "".join(traceback.format_exception(cause)).rstrip()
    text = str(error.args[0]) if error.args else ""
    if addition in text:
        return error, is_origin
    # RowError takes other arguments; as the DataError it is, its text is free.
    kind: type[ShoalError] = DataError if isinstance(error, RowError) else type(error)
    failure = kind(f"{text}\n{addition}")
    failure.is_origin = True
    return failure, is_origin
