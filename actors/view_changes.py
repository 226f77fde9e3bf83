"""ViewChanges: how one worker gets from view to view: it joins, prepares, cuts over, recovers (PROTOCOLS V, F).

What a worker is made of lives across views: row store, copies for others, dense replica, metrics, feed. Here are the
procedures that bring all of it to the first step of a view; when each is due is decided by ``protocol``, and they run
in the step loop's thread at a step boundary. A procedure that fails leaves the worker able to recover: nothing is
dropped before the controller has journalled the view (V5), and ownership always follows the view that is entered next.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shoal.actors.fault_roles import take_roles
from shoal.actors.feed import Assignment
from shoal.actors.messages import BlockSet, Holdings, Member, RecoveryPlan, Shipment, View
from shoal.actors.open_view import OpenOptions, OpenView
from shoal.actors.preparation import Preparation
from shoal.actors.protocol_messages import News
from shoal.actors.state_blob import decode_metrics, encode_dense, encode_metrics, load_dense
from shoal.kernels import faults
from shoal.kernels.errors import PeerError, ProtocolError

if TYPE_CHECKING:
    from torch import nn

    from shoal.actors.replication import Replicator
    from shoal.actors.session import Session
    from shoal.actors.shard_host import Restore, ShardHost
    from shoal.actors.sharded import ModelTables
    from shoal.actors.trainer import Trainer, TrainerSnapshot
    from shoal.kernels.metrics import BinaryMetrics

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChangeOptions:
    """Deadlines of view changes and recoveries, in seconds."""

    #: Forming the groups of a view, and meeting in it.
    form_timeout_s: float = 30.0
    #: Copying what a cutover or a recovery waits for.
    copy_timeout_s: float = 60.0
    #: The first view: ranks build models and restore at different speeds.
    start_timeout_s: float = 180.0
    #: Snapshots are kept in views without buddies too (partial recovery).
    has_local_snapshots: bool = False


class ViewChanges:
    """One worker's state across views, and the procedures that change views.

    Args:
        make_trainer: builds the trainer over a first session; (session, assignment, step) -> Trainer.
        build_model: another instance of the model, with its initial values.
        tell: takes what a preparation in the background has to say.
    """

    def __init__(
        self,
        worker_id: str,
        host: ShardHost,
        model_tables: ModelTables,
        replicator: Replicator | None,
        *,
        make_trainer: Callable[[Session, Assignment, int], Trainer],
        build_model: Callable[[], nn.Module],
        storage: Any,
        open_options: OpenOptions,
        options: ChangeOptions,
        tell: Callable[[News], None] = lambda news: None,
    ) -> None:
        self.worker_id = worker_id
        self.host = host
        self.trainer: Trainer | None = None
        self.current: OpenView | None = None
        #: The newest view this worker knows to be decided.
        self.view: View | None = None
        self.preparation: Preparation | None = None
        #: Newest snapshot known to be complete on all ranks of the view; -1: none yet.
        self.protected = -1
        #: What the last change took, in seconds by part.
        self.timings: dict[str, float] = {}
        self._model_tables = model_tables
        self._replicator = replicator
        self._make_trainer = make_trainer
        self._build_model = build_model
        self._storage = storage
        self._open_options = open_options
        self._options = options
        self._tell = tell
        #: Worker id -> (step, metric bins) of a former member, added to this rank's at that step.
        self._adopted: dict[str, tuple[int, bytes]] = {}
        #: This rank's bins before it adopted others', while the view that made it do so is not decided.
        self._metrics_before: BinaryMetrics | None = None
        #: Step -> training state of this rank at that snapshot.
        self._snapshots: dict[int, TrainerSnapshot] = {}
        #: What is under way is to end soon, with an error.
        self._is_broken = threading.Event()

    @property
    def step(self) -> int:
        """Steps applied."""
        return 0 if self.trainer is None else self.trainer.step

    # ---- joining the first view -----------------------------------------------------------------------------------

    def join(self, view: View, restore: Restore | None) -> None:
        """Enter the run's first view, from step 0 or from a checkpoint; returns when all ranks have."""
        rank = self._rank_in(view)
        self._is_broken.clear()
        self.timings = {}
        take_roles(self.worker_id, self.view, view)
        if self._replicator is not None:
            self._replicator.expect(view)
        with self._timed("form"):
            self.current = opened = self._open(view, rank, self._options.start_timeout_s)
        step = 0 if restore is None else restore.step
        with self._timed("restore"):
            self._own(view, rank, step)
            session = opened.take_over(start_timeout_s=self._options.start_timeout_s)
            trainer = self._trainer_over(session, step)
            if restore is not None:
                self._load(trainer, restore, rank)
        self._enter(view, rank, opened, trainer, "join")

    def _load(self, trainer: Trainer, restore: Restore, rank: int) -> None:
        """Everything this rank owns, and the dense state, from a checkpoint."""
        tensors, metrics, metadata = self.host.restore(restore, self._storage)
        trainer.dense.load_state_tensors(tensors, metadata.get("optimizer"))
        trainer.step = trainer.last_checkpoint = restore.step
        trainer.num_samples = int(metadata.get("samples", 0))
        trainer.skipped_steps = int(metadata.get("skipped_steps", 0))
        trainer.metrics.reset()
        if metrics and rank == 0:
            trainer.metrics.load_state_dict(metrics)

    # ---- preparing ------------------------------------------------------------------------------------------------

    def prepare(self, view: View, step_hint: int = 0) -> None:
        """Start getting ready for ``view`` in the background (V2, V3); ``preparation`` tells how far it is.

        ``step_hint``: a joiner's feed is opened there, a little before the step that it will begin with.
        """
        replicator = self._replicator
        assert replicator is not None, "a world of one process does not change"
        rank = view.rank_of(self.worker_id)
        take_roles(self.worker_id, self.view, view)
        faults.reach("prepare.begin")
        replicator.expect(view)
        if self.view is not None:
            replicator.prepare(view)

        def open_view() -> OpenView | None:
            if rank is None:
                return None
            opened = self._open(view, rank, self._options.form_timeout_s)
            if self.trainer is None:  # a joiner has no other session that this one could disturb
                session = opened.take_over(start_timeout_s=0.0)
                self.trainer = self._make_trainer(session, assignment_of(view, rank), step_hint)
            return opened

        calls = replicator.dense_step if self.view is None else None
        self.preparation = Preparation(view, open_view, replicator.progress, self._tell, calls)

    def cancel_preparation(self, reason: str) -> None:
        """Forget the view being prepared, with its groups; copies received stay until ``release``."""
        preparation, self.preparation = self.preparation, None
        if preparation is not None:
            logger.info("worker=%s epoch=%d action=cancel reason=%r", self.worker_id, preparation.view.epoch, reason)
            preparation.cancel()
            assert self._replicator is not None
            self._replicator.cancel_prepare(preparation.view.epoch)
            take_roles(self.worker_id, self.view)

    # ---- cutting over ---------------------------------------------------------------------------------------------

    def cut_over(self, view: View, old: View | None, step: int) -> None:
        """Go from ``old`` (None: this worker joins) to ``view``, which is prepared, at boundary ``step`` (V4).

        A worker that is no member of ``view`` has left afterwards and keeps what it holds. Raises what exchanges and
        transfers raise; the worker then parks, and a recovery decides.
        """
        self.timings = {}
        assert self.preparation is not None and self.preparation.view.epoch == view.epoch, "the view is not prepared"
        faults.reach("cutover.called")
        if old is None:
            self._join_cut_over(view, step)
        else:
            self._stay_or_leave(view, old, step)

    def _stay_or_leave(self, view: View, old: View, step: int) -> None:
        preparation, replicator, trainer, left = self.preparation, self._replicator, self.trainer, self.current
        assert preparation and replicator and trainer and left
        rank = view.rank_of(self.worker_id)
        if rank is not None:
            # First of all: the next batch is then on its way while rows travel.
            trainer.feed.reassign(assignment_of(view, rank), step)
        with self._timed("close"):
            trainer.session.close(step)
        faults.reach("cutover.closed")
        with self._timed("dense"):
            self._send_dense_to_joiners(old, view, trainer)
        with self._timed("copy"):
            replicator.cut_over(step, view, encode_metrics(trainer.metrics), self._options.copy_timeout_s)
        faults.reach("cutover.copied")
        with self._timed("agree"):
            # Every rank has come this far, so the state of this step is held everywhere under the new view. Only now
            # may copies be folded to it: until here a failure goes back to the last protected snapshot.
            trainer.session.close(step)
        faults.reach("cutover.agreed")
        opened, self.preparation = preparation.take(), None
        if rank is None:
            replicator.flip(view, None, step)
            self.current = None
            left.close()
            return
        assert opened is not None
        self.current = opened
        try:
            with self._timed("flip"):
                self._own(view, rank, step, may_be_empty=BlockSet())
                faults.reach("cutover.flip")
                trainer.bind(opened.take_over(start_timeout_s=0.0))
            if rank == 0:
                self._adopt(view, rank, trainer, step, replicator.aux_for_merge(step))
            self._enter(view, rank, opened, trainer, "cutover")
        finally:
            left.close()

    def _join_cut_over(self, view: View, step: int) -> None:
        """A joiner's side: its rows have come, the dense state has come; it takes its place."""
        preparation, replicator = self.preparation, self._replicator
        assert preparation is not None and replicator is not None
        rank = self._rank_in(view)
        with self._timed("copy"):
            received = replicator.receive(
                view.held_by(rank), step, wants_dense=True, timeout_s=self._options.copy_timeout_s
            )
        faults.reach("cutover.copied")
        self.current, self.preparation = preparation.take(), None
        opened = self.current
        assert opened is not None and received.dense is not None
        with self._timed("build"):
            session = opened.session or opened.take_over(start_timeout_s=0.0)
            trainer = self._trainer_over(session, step)
            trainer.feed.reassign(assignment_of(view, rank), step)
            load_dense(trainer, received.dense)
        with self._timed("flip"):
            replicator.count_from(step)
            self._own(view, rank, step, may_be_empty=BlockSet())
        faults.reach("cutover.flip")
        if rank == 0:
            self._adopt(view, rank, trainer, step, replicator.aux_for_merge(step))
        self._enter(view, rank, opened, trainer, "cutover")

    def _send_dense_to_joiners(self, old: View, view: View, trainer: Trainer) -> None:
        """One worker sends the dense state to every joiner, which also tells them that the cutover is on (V4)."""
        olds = {member.worker_id for member in old.members}
        stayers = [member.worker_id for member in view.members if member.worker_id in olds]
        joiners = [member for member in view.members if member.worker_id not in olds]
        # Where nobody stays, a leaver is the source.
        source = stayers[0] if stayers else old.members[0].worker_id
        if source != self.worker_id or not joiners:
            return
        assert self._replicator is not None
        data = encode_dense(trainer)
        leavers = [member.worker_id for member in old.members if view.rank_of(member.worker_id) is None]
        for joiner in joiners:
            # Leavers send their metric bins to rank 0; a joiner in that place has to know whose to wait for.
            announced = leavers if joiner.rank == 0 else []
            self._replicator.ship(joiner, view.epoch, trainer.step, dense=data, announces_aux=announced)

    # ---- recovering -----------------------------------------------------------------------------------------------

    def park(self) -> None:
        """Leave all groups, so that no peer waits for this rank (F1); rows, copies and snapshots are kept."""
        opened, self.current = self.current, None
        preparation, self.preparation = self.preparation, None
        if opened is not None:
            opened.close()
        if preparation is not None:
            preparation.cancel()
        if self._replicator is not None:
            self._replicator.park()
        faults.reach("recovery.parked")

    def holdings(self) -> Holdings:
        """What this worker can bring into a recovered view (F4)."""
        if self._replicator is None:
            return Holdings(worker_id=self.worker_id, view=self.view, applied=self.step, snapshots=(), owned=BlockSet())
        faults.reach("recovery.holdings")
        held = self._replicator.holdings()
        return Holdings(
            worker_id=self.worker_id,
            view=self.view,
            applied=self.step,
            # Both halves of a snapshot are needed: the rows and the rest.
            snapshots=tuple(step for step in held.snapshots if step in self._snapshots),
            owned=held.owned,
            copies=held.copies,
            aux=self._aux_steps(held.aux),
            protected=self.protected,
        )

    def _aux_steps(self, held: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
        """Worker id -> steps for which this worker can bring its metric bins."""
        steps = {worker_id: set(taken) for worker_id, taken in held.items()}
        for worker_id, (step, _) in self._adopted.items():
            steps.setdefault(worker_id, set()).add(step)
        return {worker_id: tuple(sorted(taken)) for worker_id, taken in steps.items()}

    def recover(self, view: View, plan: RecoveryPlan) -> None:
        """Come to ``plan.step`` with all members of ``view`` and enter it (F4); only supply rows where this worker is
        no member. Nothing that another attempt may need is dropped."""
        replicator = self._replicator
        assert replicator is not None
        self.park()
        rank = view.rank_of(self.worker_id)
        self.timings, self._metrics_before = {}, None
        self._is_broken.clear()
        take_roles(self.worker_id, self.view, view)
        replicator.expect(view)
        if rank is None:
            with self._timed("copy"):
                self._roll_back(plan.step)
                self._ship_and_receive(view, plan)
        elif plan.from_checkpoint:
            self._recover_from_checkpoint(view, rank, plan)
        else:
            self._recover_from_copies(view, rank, plan)

    def _recover_from_checkpoint(self, view: View, rank: int, plan: RecoveryPlan) -> None:
        assert self._replicator is not None
        with self._timed("form"):
            self.current = opened = self._open(view, rank, self._options.form_timeout_s)
        with self._timed("restore"):
            self._replicator.reset()
            self._snapshots.clear()
            self._adopted.clear()
            self._own(view, rank, plan.step)
            session = opened.take_over(start_timeout_s=self._options.start_timeout_s)
            trainer = self._trainer_over(session, plan.step)
            restore = plan.restores.get(self.worker_id)
            if restore is not None:
                self._load(trainer, restore, rank)
            else:
                trainer.start_over(self._build_model())
        trainer.feed.reassign(assignment_of(view, rank), trainer.step)
        self._enter(view, rank, opened, trainer, "recovery")

    def _recover_from_copies(self, view: View, rank: int, plan: RecoveryPlan) -> None:
        with self._timed("roll_back"):
            self._roll_back(plan.step)
        faults.reach("recovery.rolled_back")
        if self.trainer is not None:
            self.trainer.feed.reassign(assignment_of(view, rank), plan.step)
        with self._timed("copy"):
            dense, metrics = self._ship_and_receive(view, plan)
            self._own(view, rank, plan.step, may_be_empty=plan.lost_blocks)
            restore = plan.restores.get(self.worker_id)
            lost = view.owned_by(rank) & plan.lost_blocks
            if restore is not None:  # partial: the lost blocks go back further than the rest
                self.host.restore_rows(restore, self._storage, lost.as_dict())
        with self._timed("form"):
            self.current = opened = self._open(view, rank, self._options.form_timeout_s)
        with self._timed("build"):
            # A worker that is new here opens its feed only now: the others are patient with its first exchange.
            session = opened.take_over(start_timeout_s=self._open_options.op_timeout_s)
            trainer = self._trainer_over(session, plan.step)
            if dense is not None:
                load_dense(trainer, dense)
            self._adopt(view, rank, trainer, plan.step, metrics)
        self._enter(view, rank, opened, trainer, "recovery")

    def _roll_back(self, step: int) -> None:
        """Rows, copies and training state as of ``step`` applied steps, as far as this worker has them."""
        assert self._replicator is not None
        self._replicator.roll_back(step)
        snapshot = self._snapshots.get(step)
        if self.trainer is not None and snapshot is not None:
            self.trainer.roll_back(snapshot)
        self._snapshots = {taken: s for taken, s in self._snapshots.items() if taken <= step}

    def _ship_and_receive(self, view: View, plan: RecoveryPlan) -> tuple[bytes | None, Mapping[str, bytes]]:
        """Send what this worker owes others while it receives what others owe it: (dense state, metric bins)."""
        assert self._replicator is not None
        me = self.worker_id
        outgoing = [s for s in plan.shipments if s.source == me and s.target != me]
        incoming = [s for s in plan.shipments if s.target == me and s.source != me]
        own_aux = {
            w: self._aux_of(w, plan.step) for s in plan.shipments if me == s.source == s.target for w in s.aux_of
        }
        members = {member.worker_id: member for member in view.members}
        has_dense = any(shipment.has_dense for shipment in outgoing)
        dense = encode_dense(self.trainer) if self.trainer is not None and has_dense else None
        blocks = BlockSet()
        for shipment in incoming:
            blocks |= shipment.blocks
        with _sending(outgoing, lambda s: self._ship(s, members[s.target], view.epoch, plan.step, dense)):
            received = self._replicator.receive(
                blocks,
                plan.step,
                wants_dense=any(shipment.has_dense for shipment in incoming),
                wants_aux=[worker_id for shipment in incoming for worker_id in shipment.aux_of],
                timeout_s=self._options.copy_timeout_s,
            )
        return received.dense, {**own_aux, **received.aux}

    def _ship(self, shipment: Shipment, target: Member, epoch: int, step: int, dense: bytes | None) -> None:
        replicator = self._replicator
        assert replicator is not None
        aux = {worker_id: self._aux_of(worker_id, step) for worker_id in shipment.aux_of}
        faults.reach("recovery.ship")
        replicator.ship(target, epoch, step, shipment.blocks, dense=dense if shipment.has_dense else None, aux=aux)

    def _aux_of(self, worker_id: str, step: int) -> bytes:
        """The metric bins of a worker at ``step``: this one's own, or kept for another."""
        assert self._replicator is not None
        adopted_at, bins = self._adopted.get(worker_id, (-1, b""))
        if adopted_at == step:
            return bins
        is_own = worker_id == self.worker_id
        found = self._replicator.aux_at(step) if is_own else self._replicator.held_aux(worker_id, step)
        if found is None:
            raise PeerError(f"the metric bins of worker {worker_id} at step {step} are not here")
        return found

    # ---- snapshots ------------------------------------------------------------------------------------------------

    def take_snapshot(self, step: int) -> None:
        """Freeze this rank's state at this boundary; its changes travel to their holders in the background (F3)."""
        assert self._replicator is not None and self.trainer is not None
        faults.reach("snapshot.cut")
        self._snapshots[step] = snapshot = self.trainer.take_snapshot()
        self._replicator.snapshot(step, encode_metrics(snapshot.metrics))

    def protect(self, protected: int) -> None:
        """Let go of what lies before a snapshot that all ranks have acknowledged."""
        assert self._replicator is not None and self.trainer is not None
        faults.reach("snapshot.protected")
        self.protected = protected
        self._adopted = {w: kept for w, kept in self._adopted.items() if kept[0] >= protected}
        self._replicator.protect(protected)
        kept = set(self._replicator.snapshots)
        self._snapshots = {step: s for step, s in self._snapshots.items() if step in kept}
        self.trainer.feed.keep_from(protected)

    def release(self, view: View, keep: View | None) -> None:
        """Drop the row blocks that neither ``view``, which is journalled, nor ``keep`` gives to this worker (V5)."""
        faults.reach("cutover.release")
        if self._replicator is not None and keep is None:
            self._replicator.release(view, view.rank_of(self.worker_id))
            if not self._keeps_snapshots(view):
                self._replicator.drop_snapshots()
                self._snapshots.clear()

    # ---- parts ----------------------------------------------------------------------------------------------------

    def abort_exchange(self, reason: str) -> None:
        """From any thread: break the groups this worker is in, so that its step-loop thread comes to a boundary."""
        self._is_broken.set()  # groups that are being formed just now
        opened, preparation = self.current, self.preparation
        if opened is not None:
            opened.abort(reason)
        if preparation is not None:
            preparation.abort(reason)
        if self._replicator is not None:
            self._replicator.abort()

    def _enter(self, view: View, rank: int, opened: OpenView, trainer: Trainer, way: str) -> None:
        """The first exchange of a view; once it completes on any rank the view is decided (V4).

        ``way``: how this worker comes to it, as fault points name it: join, cutover or recovery.
        """
        assert opened.session is not None
        faults.reach(f"{way}.meet")
        exchange = opened.session.exchange
        exchange.applied = trainer.step - 1
        with self._timed("meet"):
            opened.agree(trainer.step, opened.session.patience_s)
            opened.session.meet(trainer.step, trainer.dense.checksum())
        faults.reach(f"{way}.decided")
        self.view = view
        take_roles(self.worker_id, view)
        if self._replicator is not None:
            with self._timed("snapshot"):
                self.protected = -1
                # Without what was adopted at this very step: see ``_adopt``.
                metrics, self._metrics_before = self._metrics_before or trainer.metrics.copy(), None
                self._snapshots = {trainer.step: dataclasses.replace(trainer.take_snapshot(), metrics=metrics)}
                self._replicator.set_view(
                    view, rank, trainer.step, encode_metrics(metrics), keeps_snapshot=self._keeps_snapshots(view)
                )
                trainer.feed.keep_from(trainer.step)

    def _keeps_snapshots(self, view: View) -> bool:
        """Whether anybody could roll back to a snapshot of ``view``: in a view of its own kind nothing is kept."""
        return bool(view.buddies) or self._options.has_local_snapshots

    def _own(self, view: View, rank: int, step: int, *, may_be_empty: BlockSet | None = None) -> None:
        """Own what ``view`` gives to ``rank``: copies as of ``step`` become rows, what is not held begins empty.

        ``may_be_empty``: the blocks that may begin empty; None: all.
        """
        owned = view.owned_by(rank)
        if self._replicator is None:
            self.host.assign(owned)
            return
        try:
            self._replicator.flip(view, rank, step, from_storage=owned if may_be_empty is None else may_be_empty)
        except ProtocolError as error:  # a copy is missing or damaged: another attempt finds another source
            raise PeerError(str(error)) from error
        self.host.take(owned)

    def _trainer_over(self, session: Session, step: int) -> Trainer:
        """The trainer, over ``session``; it is built with the first one."""
        opened = self.current
        assert opened is not None
        if self.trainer is None:
            self.trainer = self._make_trainer(session, assignment_of(opened.view, opened.rank), step)
        else:
            self.trainer.bind(session)
        return self.trainer

    def _adopt(self, view: View, rank: int, trainer: Trainer, step: int, bins: Mapping[str, bytes]) -> None:
        """Add the metric bins of workers that are no members any more: they are integers, so any place will do.

        The snapshot of ``step`` keeps this rank's bins as they were, and the adopted ones stay under their owners'
        names until a later snapshot is protected: a recovery to ``step`` hands them over again, and counts them once.
        Until then this rank's buddy keeps them too: who counted them may be gone by the time this rank is lost.
        """
        buddy = view.buddy(rank)
        if bins and buddy is not None:
            assert self._replicator is not None
            self._replicator.ship(view.members[buddy], view.epoch, step, aux=bins, is_kept=True)
        self._metrics_before = trainer.metrics.copy()
        for worker_id in sorted(bins):
            self._adopted[worker_id] = (step, bins[worker_id])
            trainer.metrics.merge_(decode_metrics(bins[worker_id]))

    def _open(self, view: View, rank: int, form_timeout_s: float) -> OpenView:
        return OpenView(
            view,
            rank,
            self._model_tables,
            self.host.store,
            self._open_options,
            form_timeout_s=form_timeout_s,
            is_cancelled=self._is_broken.is_set,
        )

    def _rank_in(self, view: View) -> int:
        rank = view.rank_of(self.worker_id)
        if rank is None:
            raise PeerError(f"worker {self.worker_id} is no member of epoch {view.epoch}")
        return rank

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.timings[part] = round(self.timings.get(part, 0.0) + time.perf_counter() - started, 4)


def assignment_of(view: View, rank: int) -> Assignment:
    """The slice of every global batch that ``rank`` takes in ``view``."""
    return Assignment(rank, view.world_size, None if view.world_size == 1 else view.shares)


@contextmanager
def _sending(shipments: Sequence[Shipment], send: Callable[[Shipment], None]) -> Iterator[None]:
    """Send in threads while the body receives; raises what sending raised, once the body is done."""
    with ThreadPoolExecutor(max_workers=max(1, len(shipments)), thread_name_prefix="ship") as pool:
        futures = [pool.submit(send, shipment) for shipment in shipments]
        yield
        for future in futures:
            future.result()
