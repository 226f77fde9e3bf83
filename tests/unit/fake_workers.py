"""Workers of a make-believe cluster behind the launcher's and the handle's interface: no processes, no rows.

They follow orders as real ones do, as far as a controller can see: one step a poll, snapshots of every step, and what
the test does to them: die, fall silent, drain, fail.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.actors.messages import (
    Abort,
    BlockSet,
    Copies,
    CutOver,
    Holdings,
    Leave,
    Order,
    Park,
    Prepare,
    PrepareProgress,
    Recover,
    Release,
    SetBase,
    SnapshotPart,
    Start,
    View,
    WorkerInfo,
    WorkerPhase,
    WorkerPoll,
    WorkerStatus,
)
from shoal.kernels.errors import ClusterError
from shoal.kernels.frame import Flag
from shoal.kernels.spec import TableSpec
from shoal.platform.launch import Capacity, LaunchEvent, Placed, Ready, WorkerGoneError

TABLES = (TableSpec(name="t", embedding_dim=4, num_embeddings=64, num_blocks=8),)


class FakeCluster:
    """What the workers of a view share: the view, its step, the steps there are. One lock for all."""

    def __init__(self, steps_total: int = 10**9) -> None:
        self.lock = threading.RLock()
        self.workers: dict[str, FakeWorker] = {}
        self.steps_total = steps_total
        self.step = 0
        self.is_stopping = False
        #: Every order given: (worker id, order).
        self.orders: list[tuple[str, Order]] = []

    def members(self, view: View) -> list[FakeWorker]:
        return [self.workers[m.worker_id] for m in view.members if m.worker_id in self.workers]

    def is_complete(self, view: View) -> bool:
        """Whether all members live, answer and have joined: the next exchange would complete."""
        members = self.members(view)
        return len(members) == view.world_size and all(
            w.is_alive and not w.is_silent and w.view == view and w.phase is WorkerPhase.TRAINING for w in members
        )

    def advance(self, view: View) -> None:
        if self.step < self.steps_total and not self.is_stopping:
            self.step += 1
            return
        for worker in self.members(view):
            worker.finish(self.step)


class FakeWorker:
    """One worker (``WorkerHandle``)."""

    def __init__(self, worker_id: str, host: str, cluster: FakeCluster) -> None:
        self.worker_id = worker_id
        self.host = host
        self.cluster = cluster
        self.phase = WorkerPhase.STARTING
        self.view: View | None = None
        self.prepared: View | None = None
        self.fence = 0
        self.is_alive, self.is_silent = True, False
        self.drain_s: float | None = None
        self.failure: BaseException | None = None
        self.parts: list[SnapshotPart] = []
        self.summary: dict[str, Any] | None = None

    # ---- what a test does to it -----------------------------------------------------------------------------------

    def die(self) -> None:
        with self.cluster.lock:
            self.is_alive = False
            self._let_go_of_peers()

    def hang(self) -> None:
        with self.cluster.lock:
            self.is_silent = True
            self._let_go_of_peers()

    def fail(self, error: BaseException) -> None:
        with self.cluster.lock:
            self.failure, self.phase = error, WorkerPhase.FAILED

    def _let_go_of_peers(self) -> None:
        """Their exchange fails, so they destroy their groups and park (F1)."""
        for peer in self.cluster.members(self.view) if self.view is not None else ():
            if peer is not self and peer.phase is WorkerPhase.TRAINING:
                peer.phase = WorkerPhase.PARKED

    def finish(self, step: int) -> None:
        if self.phase is WorkerPhase.FINISHED or self.view is None:
            return
        self.phase = WorkerPhase.FINISHED
        self.summary = {"step": step}

    # ---- what the controller calls --------------------------------------------------------------------------------

    def describe(self, timeout_s: float) -> WorkerInfo:
        self._check()
        return WorkerInfo(
            worker_id=self.worker_id,
            host=self.host,
            pid=1,
            tables=TABLES,
            model_hash=7,
            dense_parameters=0,
            address="a",
        )

    def order(self, order: Order | SetBase, timeout_s: float) -> None:
        self._check()
        cluster = self.cluster
        with cluster.lock:
            cluster.orders.append((self.worker_id, order))
            match order:
                case Start(view=view, restore=restore) if self.view is None:
                    self._join(view)
                    cluster.step = restore.step if restore is not None else cluster.step
                case Prepare(view=view) if view.epoch >= self.fence:
                    self.prepared = view
                case Abort(epoch=epoch) if self.prepared is not None and self.prepared.epoch == epoch:
                    self.prepared = None
                case CutOver(epoch=epoch) if self.prepared is not None and self.prepared.epoch == epoch:
                    self._cut_over(self.prepared)
                case Park(epoch=epoch):
                    self.fence = max(self.fence, epoch)
                    if self.phase is not WorkerPhase.STARTING:
                        self.phase = WorkerPhase.PARKED
                case Recover(view=view, plan=plan) if view.epoch >= self.fence:
                    self.fence = view.epoch
                    cluster.step = plan.step
                    if view.rank_of(self.worker_id) is not None:
                        self._join(view)
                case Leave():
                    self.is_alive = False
                case Release():
                    pass

    def _join(self, view: View) -> None:
        self.view, self.prepared, self.phase = view, None, WorkerPhase.TRAINING
        self.fence = max(self.fence, view.epoch)

    def _cut_over(self, view: View) -> None:
        before = self.view
        assert before is not None
        for worker in {w.worker_id: w for w in (*self.cluster.members(before), *self.cluster.members(view))}.values():
            if view.rank_of(worker.worker_id) is not None:
                worker._join(view)
            else:
                worker.phase, worker.prepared = WorkerPhase.LEFT, None

    def poll(self, timeout_s: float) -> WorkerPoll:
        self._check()
        with self.cluster.lock:
            view = self.view
            if view is not None and view.rank_of(self.worker_id) == 0 and self.cluster.is_complete(view):
                self.cluster.advance(view)
            parts, self.parts = tuple(self.parts), []
            status = WorkerStatus(
                worker_id=self.worker_id,
                rank=-1 if view is None else view.rank_of(self.worker_id) or 0,
                epoch=-1 if view is None else view.epoch,
                step=self.cluster.step,
                phase=self.phase,
                since_s=0.0,
                pid=1,
                host=self.host,
                error=None if self.failure is None else str(self.failure),
                protected=self.cluster.step,
                fence=self.fence,
                preparing=-1 if self.prepared is None else self.prepared.epoch,
                prepare=None if self.prepared is None else PrepareProgress(is_ready=True),
                drain_s=self.drain_s,
            )
            return WorkerPoll(
                status=status,
                parts=parts,
                summary=self.summary,
                failure=self.failure,
                is_origin=self.failure is not None,
            )

    def holdings(self, timeout_s: float) -> Holdings:
        self._check()
        with self.cluster.lock:
            view, step = self.view, self.cluster.step
            rank = None if view is None else view.rank_of(self.worker_id)
            owned = BlockSet() if view is None or rank is None else view.owned_by(rank)
            copied = BlockSet() if view is None or rank is None else view.copied_by(rank)
            wards = () if view is None else [m.worker_id for m in view.members if view.buddy(m.rank) == rank]
            return Holdings(
                worker_id=self.worker_id,
                view=view,
                applied=step,
                snapshots=(step,) if view is not None else (),
                owned=owned,
                copies=(Copies(blocks=copied, steps=(step,)),) if len(copied) else (),
                aux=dict.fromkeys(wards, (step,)),
                protected=step,
                fence=self.fence,
            )

    def request(self, flags: int, timeout_s: float) -> None:
        self._check()
        if Flag(flags) & Flag.STOP:
            self.cluster.is_stopping = True

    def _check(self) -> None:
        if not self.is_alive:
            raise WorkerGoneError(f"worker {self.worker_id} died")
        if self.is_silent:
            raise ClusterError(f"worker {self.worker_id} did not answer")


class FakeLauncher:
    """Hands out fake workers, one host each, as long as there is ``room``."""

    is_fixed = False
    cluster_address = "nowhere"

    def __init__(self, cluster: FakeCluster, room: int = 8, on_release: Callable[[], None] = lambda: None) -> None:
        self.cluster = cluster
        self.room = room
        self.num_released = 0
        self.killed: list[str] = []
        self._on_release = on_release
        self._waiting: list[str] = []
        self._starting: list[str] = []

    def start_feeder(self, start_step: int, num_workers: int) -> None:
        pass

    def forget_ranks(self) -> None:
        pass

    def launch_worker(self, worker_id: str, spec: Any) -> None:
        self._waiting.append(worker_id)

    def advance(self) -> Sequence[LaunchEvent]:
        events: list[LaunchEvent] = []
        for worker_id in self._starting:
            worker = self.cluster.workers[worker_id]
            events.append(Ready(worker_id=worker_id, info=worker.describe(1.0)))
        self._starting = []
        living = sum(worker.is_alive for worker in self.cluster.workers.values())
        while self._waiting and living < self.room:
            worker_id = self._waiting.pop(0)
            self.cluster.workers[worker_id] = FakeWorker(worker_id, f"host-{worker_id}", self.cluster)
            self._starting.append(worker_id)
            events.append(Placed(worker_id=worker_id, host=f"host-{worker_id}"))
            living += 1
        return events

    def handle(self, worker_id: str) -> FakeWorker | None:
        return self.cluster.workers.get(worker_id)

    def release_worker(self, worker_id: str) -> None:
        if worker_id in self._waiting:
            self._waiting.remove(worker_id)
        if worker_id in self.cluster.workers:
            self.cluster.workers[worker_id].die()

    def kill_worker(self, worker_id: str, pid: int, host: str) -> bool:
        self.killed.append(worker_id)
        self.release_worker(worker_id)
        return True

    def adopt(self) -> Mapping[str, FakeWorker]:
        return {w: worker for w, worker in self.cluster.workers.items() if worker.is_alive}

    def capacity(self) -> Capacity:
        return Capacity(free={}, num_waiting=len(self._waiting), text="nothing")

    def draining(self) -> Mapping[str, float | None]:
        return {}

    def open_store(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def forget_epochs(self, run: str, before: int) -> None:
        pass

    def release(self) -> None:
        self.num_released += 1
        for worker_id in list(self.cluster.workers):
            self.release_worker(worker_id)
        self._on_release()


def part_of(rank: int, step: int, *, epoch: int = 0, error: str | None = None) -> SnapshotPart:
    return SnapshotPart(epoch=epoch, step=step, rank=rank, files=(), error=error)


def without_steps(report: Any) -> list[tuple[str, dict[str, Any]]]:
    """The events among a report's items."""
    return [item for item in report.items if isinstance(item, tuple) and not dataclasses.is_dataclass(item)]
