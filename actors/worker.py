"""Worker: one rank's process: model, shards, feed and step loop. A plain class; ``runtime`` makes it an actor.

The controller calls ``prepare`` (build the model), ``order`` (join, prepare, cut over, recover, leave), ``poll``
(status and what has happened; also the sign that the controller is alive), ``holdings`` and ``request`` (raise a flag).
Orders only enter an inbox: the step loop's thread asks ``protocol.WorkerState`` what follows from them and does it
(``view_changes``). The step loop itself never calls anybody.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shoal.actors import protocol_messages as pm
from shoal.actors.dense import DenseReplica
from shoal.actors.embedding import lazy_tables
from shoal.actors.failures import describe_failure, is_peer_trouble
from shoal.actors.feed import Assignment, BatchSource
from shoal.actors.messages import (
    Holdings,
    Leave,
    Order,
    Prepare,
    PrepareProgress,
    Progress,
    SetBase,
    SnapshotPart,
    Start,
    View,
    WorkerInfo,
    WorkerPhase,
    WorkerPoll,
    WorkerStatus,
)
from shoal.actors.open_view import OpenOptions
from shoal.actors.preparation import Preparation
from shoal.actors.protocol import WorkerRules, WorkerState
from shoal.actors.rank_facts import worker_facts
from shoal.actors.replication import Replicator
from shoal.actors.session import Session
from shoal.actors.shard_host import Restore, ShardHost
from shoal.actors.sharded import describe_model
from shoal.actors.snapshot_writer import SnapshotWriter
from shoal.actors.trainer import Trainer
from shoal.actors.view_changes import ChangeOptions, ViewChanges
from shoal.actors.worker_spec import Seat, WorkerSpec
from shoal.kernels import faults
from shoal.kernels.errors import CapacityError, ClusterError
from shoal.kernels.facts import Facts, hash_facts
from shoal.kernels.frame import Flag

logger = logging.getLogger(__name__)

_NEVER_S = 1e12
#: Fewest steps between two snapshots while a view change is prepared: each costs the steps after it some copying.
_HASTE_STEPS = 4


class Worker:
    """One rank. Methods are called by the controller, from other threads than the step loop's."""

    def __init__(self, worker_id: str, spec: WorkerSpec) -> None:
        self.worker_id = worker_id
        self.spec = spec
        #: Set by ``prepare``.
        self.shards: ShardHost | None = None
        self.changes: ViewChanges | None = None
        self._lock = threading.Lock()
        self._records: list[Progress] = []
        self._parts: list[SnapshotPart] = []
        self._summary: Mapping[str, Any] | None = None
        self._error: str | None = None
        self._failure: BaseException | None = None
        self._is_origin = False
        self._phase, self._step, self._since = WorkerPhase.STARTING, 0, time.monotonic()
        #: Monotonic time of the last applied step.
        self._applied_at: float | None = None
        self._requested = Flag(0)
        self._inbox: queue.SimpleQueue[pm.News] = queue.SimpleQueue()
        self._raised = Flag(0)
        self._control = 0
        #: A step that the run had reached when a preparation was ordered.
        self._step_hint = 0
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        #: Set once the step loop's thread has been told to end (Leave, or nobody to give orders): so may the process.
        self.has_left = threading.Event()
        self._replicator: Replicator | None = None
        self._writer: SnapshotWriter | None = None
        self._state: WorkerState | None = None
        self._silence_told = False
        #: Steps that waited for a snapshot to be acknowledged, because row versions took too much memory.
        self._version_waits = 0
        self.last_contact = time.monotonic()
        if spec.faults is not None:
            faults.install(spec.faults, worker_id)

    @property
    def trainer(self) -> Trainer | None:
        """The training state, once the worker has joined a view; readable after the loop has ended."""
        return None if self.changes is None else self.changes.trainer

    # ---- what the controller calls --------------------------------------------------------------------------------

    def prepare(self, host: str | None = None, address: str = "") -> WorkerInfo:
        """Build the model (tables take no memory yet), start the step loop's thread, and describe the worker.

        Args:
            host: the network locality this worker is on; by default the machine's name.
            address: where workers of other hosts reach this one; by default Gloo's own choice.
        """
        spec = self.spec
        torch.set_num_threads(spec.num_threads)
        self.model = self._build_model()
        self.model_tables = describe_model(self.model, spec.make_table, spec.policies)
        # The collections have no parameters from here on, and what remains is the dense part. Building it is not left
        # for the moment in which other ranks wait: torch's optimizers take half a second to import.
        for _, module in self.model_tables.collections:
            module.attach(_no_session)
        self._dense = DenseReplica(self.model, spec.dense_optimizer)
        facts = worker_facts(spec, self.model_tables, self._dense)
        self.host = host or socket.gethostname()
        elastic = spec.elastic
        self.shards = ShardHost(
            self.model_tables.tables,
            num_threads=spec.num_threads,
            version_bytes_max=None if elastic is None else elastic.version_bytes_max,
        )
        if elastic is not None:
            self._replicator = Replicator(
                self.worker_id,
                spec.run,
                self.shards.store,
                self.model_tables.tables,
                bind_address=address or "127.0.0.1",
                bytes_per_s=elastic.copy_bytes_per_s,
                timeout_s=spec.op_timeout_s,
                rounds_max=elastic.copy_rounds_max,
                pause_max_s=elastic.pause_max_s,
            )
        self.changes = ViewChanges(
            self.worker_id,
            self.shards,
            self.model_tables,
            self._replicator,
            make_trainer=self._make_trainer,
            build_model=self._build_model,
            storage=spec.storage,
            open_options=OpenOptions(
                num_threads=spec.num_threads,
                op_timeout_s=spec.op_timeout_s,
                bind_address=address,
                facts=facts,
                facts_hash=hash_facts(facts),
            ),
            options=ChangeOptions(
                form_timeout_s=elastic.form_timeout_s if elastic else spec.start_timeout_s,
                copy_timeout_s=elastic.copy_timeout_s if elastic else spec.op_timeout_s,
                start_timeout_s=spec.start_timeout_s,
                has_local_snapshots=elastic is not None and elastic.has_local_snapshots,
            ),
            tell=self._inbox.put,
        )
        self._state = WorkerState(
            self.worker_id,
            WorkerRules(
                total_steps=spec.loop.total_steps,
                snapshot_every_steps=None if elastic is None else elastic.protect_every_steps,
                has_local_snapshots=elastic is not None and elastic.has_local_snapshots,
                lease_s=_NEVER_S if elastic is None else elastic.lease_s,
                orphan_s=2 * _NEVER_S if elastic is None else elastic.orphan_s,
            ),
        )
        info = self._describe(facts)
        self._thread = threading.Thread(target=self._run, name=f"step-loop-{self.worker_id}", daemon=True)
        self._thread.start()
        return info

    def _build_model(self) -> nn.Module:
        """The model with its initial values; the same on all workers."""
        torch.manual_seed(self.spec.loop.seed)
        with lazy_tables():
            return self.spec.build_model()

    def _describe(self, facts: Facts) -> WorkerInfo:
        return WorkerInfo(
            worker_id=self.worker_id,
            host=self.host,
            pid=os.getpid(),
            tables=self.model_tables.tables,
            model_hash=hash_facts(facts),
            dense_parameters=self._dense.num_parameters,
            address="" if self._replicator is None else self._replicator.address,
            facts=facts,
        )

    def order(self, order: Order | SetBase) -> None:
        """Take an order; returns at once. Orders may come again, late or out of order."""
        if isinstance(order, SetBase):
            if self._writer is not None:
                self._writer.set_base(order.step)
            return
        if isinstance(order, Prepare):
            self._step_hint = max(self._step_hint, order.step)
        self._inbox.put(pm.OrderArrived(order))
        state, changes = self._state, self.changes
        if state is not None and changes is not None and state.is_urgent(order):
            changes.abort_exchange(f"order {type(order).__name__}")

    def start(self, view: View, restore: Restore | None = None) -> None:
        """Join the run's first view; returns at once."""
        self.order(Start(view=view, restore=restore))

    def poll(self) -> WorkerPoll:
        """Status, and the records and checkpoint parts since the last poll."""
        faults.reach("wire.poll")
        self.last_contact = time.monotonic()
        writer, changes, replicator = self._writer, self.changes, self._replicator
        # Asked before the parts are taken: a part delivered in between is then in this poll.
        is_saving = writer is not None and writer.is_writing
        view = None if changes is None else changes.view
        preparation = None if changes is None else changes.preparation
        with self._lock:
            records, self._records = tuple(self._records), []
            parts, self._parts = tuple(self._parts), []
            rank = None if view is None else view.rank_of(self.worker_id)
            status = WorkerStatus(
                worker_id=self.worker_id,
                rank=-1 if rank is None else rank,
                epoch=-1 if view is None else view.epoch,
                step=self._step,
                phase=self._phase,
                since_s=time.monotonic() - self._since,
                pid=os.getpid(),
                host=getattr(self, "host", ""),
                error=self._error or (self._state.reason if self._state is not None and self._state.reason else None),
                unreachable=() if self._state is None else self._state.unreachable,
                protected=-1 if changes is None else changes.protected,
                unprotected_bytes=0 if replicator is None else replicator.unprotected_bytes,
                rows=0 if self.shards is None else self.shards.num_rows(),
                fence=0 if self._state is None else self._state.fence,
                preparing=-1 if preparation is None else preparation.view.epoch,
                prepare=None if preparation is None else self._progress_of(preparation),
                applied_s=None if self._applied_at is None else time.monotonic() - self._applied_at,
                timings={} if changes is None else dict(changes.timings),
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

    def _progress_of(self, preparation: Preparation) -> PrepareProgress:
        """Ready only once the protocol knows it too: a rank that meets the cutover before that has to park."""
        progress = preparation.progress()
        is_known = self._state is not None and self._state.is_prepared
        return dataclasses.replace(progress, is_ready=progress.is_ready and is_known)

    def holdings(self) -> Holdings:
        """What this worker can bring into a recovered view, and the view it knows (F4, F8)."""
        assert self.changes is not None and self._state is not None
        # Read first: it only rises, and what is said now holds as of then as long as no order is carried out.
        fence = self._state.fence
        held = self.changes.holdings()
        is_resting = self._state.phase in (WorkerPhase.STARTING, WorkerPhase.PARKED, WorkerPhase.LEFT)
        return dataclasses.replace(held, fence=fence if is_resting else 0)

    def request(self, flags: int) -> None:
        """Raise flags in the next step's header (S3)."""
        self._requested |= Flag(flags)
        if self.trainer is not None:
            self.trainer.request(Flag(flags))

    def shut_down(self) -> None:
        """Leave the view's groups, which releases peers that wait for this rank (F1), and end the step loop."""
        if self.changes is not None:
            self.order(Leave(reason="shut down"))
            self.changes.abort_exchange("shut down")

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for training to end, well or badly (num_workers=0 and tests)."""
        self._is_over.wait(timeout_s)

    # ---- the step loop's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self.spec.num_threads)
        blocking: pm.Blocking = pm.WaitForOrder()
        try:
            while not isinstance(blocking, pm.Exit):
                blocking = self._advance(blocking)
            self.has_left.set()
        except BaseException as error:  # the actor's edge: a mistake of ours becomes a status that the controller reads
            self._fail(error)
        finally:
            self._leave()
            self._is_over.set()

    def _advance(self, blocking: pm.Blocking) -> pm.Blocking:
        """Do one blocking instruction, and what does not block after it; returns the next blocking one."""
        assert self._state is not None
        if isinstance(blocking, pm.WaitForOrder):
            self._publish()
            return self._obey(self._state.handle(self._next_news()))
        outcome = self._perform(blocking)
        for news in self._waiting_news():
            self._obey(self._state.handle(news))
        return self._obey(self._state.handle(outcome))

    def _obey(self, instructions: Sequence[pm.Instruction]) -> pm.Blocking:
        """Do what does not block; returns the blocking instruction at the end, where there is one."""
        for instruction in instructions:
            if isinstance(instruction, pm.Blocking):
                return instruction
            self._do(instruction)
        return pm.WaitForOrder()

    def _next_news(self) -> pm.News:
        """The next entry of the inbox, or the controller's silence once it is too long."""
        while True:
            try:
                return self._inbox.get(timeout=0.5)
            except queue.Empty:
                told = self._told_silence()
                if told is not None:
                    return told

    def _waiting_news(self) -> list[pm.News]:
        news: list[pm.News] = []
        told = self._told_silence()
        if told is not None:
            news.append(told)
        while not self._inbox.empty():
            news.append(self._inbox.get())
        return news

    def _told_silence(self) -> pm.News | None:
        """ControllerSilent at every look once the lease is over, ControllerBack once a poll has come after that."""
        elastic = self.spec.elastic
        if elastic is None:
            return None
        silent_s = time.monotonic() - self.last_contact
        if silent_s > elastic.lease_s:
            self._silence_told = True
            return pm.ControllerSilent(silent_s)
        was_told, self._silence_told = self._silence_told, False
        return pm.ControllerBack() if was_told else None

    # ---- instructions ---------------------------------------------------------------------------------------------

    def _do(self, instruction: pm.Background) -> None:
        """Instructions that do not block."""
        changes = self.changes
        assert changes is not None
        match instruction:
            case pm.TakeSnapshot(step):
                changes.take_snapshot(step)
            case pm.Protect(step):
                changes.protect(step)
            case pm.BeginPreparing(view):
                changes.prepare(view, self._step_hint)
            case pm.CancelPreparing(_, reason):
                changes.cancel_preparation(reason)
            case pm.RaiseFlag(flag, control):
                self._raised |= flag
                self._control = max(self._control, control)
            case pm.DestroyGroups():
                changes.park()
            case pm.DropOthers(view, keep):
                changes.release(view, keep)

    def _perform(self, instruction: pm.Blocking) -> pm.Outcome:
        """Instructions that block, each ending in its outcome."""
        changes = self.changes
        assert changes is not None
        try:
            match instruction:
                case pm.JoinView(view, restore):
                    changes.join(view, restore)
                    return pm.Joined(view.epoch, changes.step)
                case pm.RunStep():
                    return self._run_step()
                case pm.FinishLoop():
                    return self._finish()
                case pm.PerformCutOver(view, old, step):
                    self._set_phase(WorkerPhase.CUTTING_OVER, step)
                    changes.cut_over(view, old, step)
                    return pm.CutOverDone(view.epoch, changes.step)
                case pm.PerformRecover(view, plan):
                    self._set_phase(WorkerPhase.RECOVERING, plan.step)
                    self._cancel_writing()
                    changes.recover(view, plan)
                    return pm.Recovered(view.epoch, changes.step)
            raise AssertionError(f"unknown instruction {instruction!r}")
        except Exception as error:
            return self._failed(instruction, error)

    def _failed(self, instruction: pm.Blocking, error: Exception) -> pm.Outcome:
        """The outcome of an instruction that raised: trouble with peers is recovered from, all else ends the run."""
        if not is_peer_trouble(error):
            self._fail(error)
            return pm.LoopFailed(f"{type(error).__name__}: {error}")
        logger.warning("worker=%s step=%d peer trouble: %s", self.worker_id, self._step, error)
        reason = str(error)
        with self._lock:
            self._error = reason
        match instruction:
            case pm.JoinView(view, _):
                return pm.JoinFailed(view.epoch, reason)
            case pm.PerformCutOver(view, _, _):
                return pm.CutOverFailed(view.epoch, reason)
            case pm.PerformRecover(view, _):
                return pm.RecoverFailed(view.epoch, reason)
        return pm.StepFailed(reason)

    def _run_step(self) -> pm.Outcome:
        changes, trainer = self.changes, self.trainer
        assert changes is not None and trainer is not None
        if self._replicator is not None:
            trainer.session.exchange.acked = self._replicator.acked
        flags, control = self._raised, self._control
        if not self._wants_haste(trainer.step):
            flags &= ~Flag.HASTE
        if self._are_versions_full(trainer.step):
            flags |= Flag.HASTE
        self._raised, self._control = Flag(0), 0
        head = trainer.advance(flags=flags, control=control)
        self._applied_at = time.monotonic()
        changes.timings.setdefault("feed", round(trainer.phase_seconds.get("feed", 0.0), 4))
        return pm.StepDone(trainer.step, head.flags, head.control, head.protected)

    def _wants_haste(self, step: int) -> bool:
        """Whether another snapshot helps the view being prepared: not while a round is under way, or just was."""
        replicator = self._replicator
        if replicator is None or not replicator.wants_haste:
            return False
        return not replicator.snapshots or step - replicator.last_snapshot >= _HASTE_STEPS

    def _are_versions_full(self, step: int) -> bool:
        """Whether a snapshot is due early because older row versions take too much memory (C3).

        Where the newest snapshot is still on its way to its holders, the step waits for it, a while: its
        acknowledgement is what lets the older versions go.
        """
        replicator, shards = self._replicator, self.shards
        if replicator is None or shards is None or not replicator.snapshots or not shards.store.is_version_full():
            return False
        deadline = time.monotonic() + self.spec.op_timeout_s / 4
        if replicator.acked < replicator.last_snapshot:
            self._version_waits += 1
            if self._version_waits & (self._version_waits - 1) == 0:
                bytes_used = shards.store.version_bytes()
                logger.warning("worker=%s version_bytes=%d waits=%d", self.worker_id, bytes_used, self._version_waits)
            while replicator.acked < replicator.last_snapshot and time.monotonic() < deadline:
                time.sleep(0.002)
        return step - replicator.last_snapshot >= _HASTE_STEPS

    def _finish(self) -> pm.Outcome:
        trainer = self.trainer
        assert trainer is not None
        summary = trainer.finish()
        if self._writer is not None:
            self._writer.wait(self.spec.checkpoint_timeout_s)
        with self._lock:
            self._summary = summary
        return pm.LoopEnded(trainer.step)

    def _publish(self) -> None:
        """Tell the controller where this worker stands while it waits."""
        assert self._state is not None
        if self._state.phase is not self._phase and self._phase is not WorkerPhase.FAILED:
            self._set_phase(self._state.phase, self._step)
        if self._phase in (WorkerPhase.FINISHED, WorkerPhase.FAILED):
            # A rank that has finished keeps its groups where it may be needed again: a peer may still be in the last
            # exchange, and would take their end for a failure.
            if self._phase is WorkerPhase.FAILED or self.spec.elastic is None:
                self._leave_groups()
            self._is_over.set()

    def _fail(self, error: BaseException) -> None:
        logger.error("worker=%s failed\n%s", self.worker_id, "".join(traceback.format_exception(error)))
        # Known before peers are let go: their errors are this one's consequences.
        with self._lock:
            self._error = f"{type(error).__name__}: {error}"
            self._failure, self._is_origin = describe_failure(error)
        self._set_phase(WorkerPhase.FAILED, self._step)

    def _leave_groups(self) -> None:
        if self.changes is not None:
            self.changes.park()

    def _leave(self) -> None:
        """Let go of everything: the groups first, so that no peer waits for the feed's threads to end (F1)."""
        steps: list[Callable[[], Any]] = [self._leave_groups]
        if self._replicator is not None:
            steps.append(self._replicator.close)
        if self.trainer is not None:
            steps += [self.trainer.session.detach, self.trainer.feed.close]
        for step in steps:
            try:
                step()
            except Exception:  # the outcome stands; what follows must still be released
                logger.exception("worker=%s action=leave", self.worker_id)

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _make_trainer(self, session: Session, assignment: Assignment, step: int) -> Trainer:
        """The dense replica, the feed from ``step`` on, and the loop."""
        spec = self.spec
        assert self.shards is not None and self.changes is not None
        dense, world_size = self._dense, assignment.world_size
        if world_size > 1 and assignment.rank == 0 and dense.floating_buffers:
            logger.warning(
                "buffer=%s reason='not shared between ranks, checkpoints hold rank 0's'", dense.floating_buffers[0]
            )
        shares = assignment.shares or (1.0 / world_size,) * world_size
        seat = Seat(rank=assignment.rank, world_size=world_size, shares=shares, start_step=step)
        self._writer = writer = SnapshotWriter(
            self.shards,
            dense,
            spec.storage,
            spec.checkpoint_directory,
            spec.checkpoint_bytes_per_s,
            self._add_part,
        )
        trainer: Trainer = Trainer(
            dataclasses.replace(
                spec.loop, checkpoint_timeout_s=spec.checkpoint_timeout_s, feed_timeout_s=spec.feed_timeout_s
            ),
            model=self.model,
            session=session,
            dense=dense,
            feed=spec.train_feed(seat),
            eval_feed=None if spec.eval_feed is None else self._open_eval_feed,
            learning_rates=spec.learning_rates(self.model_tables.tables),
            start_step=step,
            on_progress=self._add_record,
            before_checkpoint=lambda: writer.wait(spec.checkpoint_timeout_s),
            on_checkpoint=self._write_checkpoint,
            on_phase=self._set_phase,
        )
        trainer.request(self._requested)
        return trainer

    def _open_eval_feed(self) -> BatchSource:
        """This rank's slice of the evaluation data in the present view, from its start."""
        assert self.changes is not None and self.changes.current is not None and self.spec.eval_feed is not None
        view, rank = self.changes.current.view, self.changes.current.rank
        return self.spec.eval_feed(Seat(rank=rank, world_size=view.world_size, shares=view.shares, start_step=0))

    def _write_checkpoint(self, step: int) -> None:
        trainer, writer, changes = self.trainer, self._writer, self.changes
        assert trainer is not None and writer is not None and changes is not None and changes.current is not None
        current, counters = changes.current, {"samples": trainer.num_samples, "skipped_steps": trainer.skipped_steps}
        silent_s = time.monotonic() - self.last_contact
        try:
            if self.spec.elastic is not None and silent_s > self.spec.elastic.write_lease_s:
                raise ClusterError(f"no controller for {silent_s:.0f} s: this worker may have been given up (F7)")
            writer.start(
                step, current.view.epoch, current.rank, trainer.metrics, counters, self.spec.checkpoint_timeout_s
            )
        except (CapacityError, ClusterError) as error:  # this checkpoint is given up; training goes on
            self._add_part(
                SnapshotPart(epoch=current.view.epoch, step=step, rank=current.rank, files=(), error=str(error))
            )

    def _cancel_writing(self) -> None:
        """A checkpoint in progress cannot become complete any more: a rank of its view is lost."""
        if self._writer is not None:
            self._writer.cancel()

    def _add_record(self, record: Progress) -> None:
        with self._lock:
            self._records.append(record)

    def _add_part(self, part: SnapshotPart) -> None:
        with self._lock:
            self._parts.append(part)

    def _set_phase(self, phase: WorkerPhase, step: int) -> None:
        self._phase, self._step, self._since = phase, step, time.monotonic()


def _no_session(collection: nn.Module, kjt: Any) -> list[Any]:
    raise AssertionError("the model ran before its worker joined a view")
