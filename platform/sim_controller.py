"""The simulated executor of the production ``ControllerState``, and the cluster that workers come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.actors.messages import Holdings, SnapshotPart, WorkerStatus
from shoal.kernels.frame import Flag
from shoal.platform.sim_network import Process
from shoal.platform.sim_rows import Saved
from shoal.platform.sim_worker import SimWorker
from shoal.platform.state_messages import (
    Adopted,
    AskCheckpoint,
    AskHoldings,
    AskStop,
    CancelLaunch,
    EndRun,
    Event,
    FoundWorker,
    Instruction,
    JournalRecord,
    JournalWritten,
    KillWorker,
    LaunchWorkers,
    ManifestWritten,
    PartWritten,
    Publish,
    SendOrder,
    StatusSeen,
    Tick,
    WorkerLost,
    WorkerPlaced,
    WorkerPrepared,
    WorkerSilent,
    WriteJournal,
    WriteManifest,
)

if TYPE_CHECKING:
    from shoal.platform.sim import History

POLL_S = 0.25
#: How long a poll may take, as the executor counts it, before a worker is called silent.
SILENT_S = 1.0
#: How long after its process has ended a worker is known to be gone; for a lost host it takes longer.
DEATH_NOTICE_S, HOST_NOTICE_S = 0.3, 3.0


class SimController(Process):
    """One controller process: polls, orders, journal and manifests over the simulated network."""

    def __init__(self, history: History, incarnation: int) -> None:
        super().__init__(f"controller {incarnation}", "head")
        self.history, self.world = history, history.world
        self.incarnation = incarnation
        self.state = history.make_controller_state(incarnation)
        #: Worker id -> when it last answered.
        self.answered_s: dict[str, float] = {}
        self.asked: set[str] = set()
        self.gone: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._queue: list[Event] = []
        self._is_handling = False

    @property
    def now_s(self) -> float:
        return self.world.now_s

    def start(self) -> None:
        """First event: nothing, or what a restarted controller finds."""
        if self.incarnation:
            self._adopt()
        self._tick()

    def _adopt(self) -> None:
        found = []
        for worker in self.history.workers.values():
            if worker.is_alive and not worker.is_stopped and self.world.is_linked(self, worker) and worker.is_ready:
                worker.contact()
                if not worker.is_alive:
                    continue
                found.append(FoundWorker(info=worker.info, status=worker.status(), holdings=worker.holdings()))
                self.answered_s[worker.name] = self.now_s
        lost = [w for w in self.history.workers.values() if w.is_alive and w.name not in self.answered_s]
        for worker in lost:  # whoever does not answer is ended by force before anything else
            self.history.kill_when_reachable(worker)
        self.handle(
            Adopted(
                now_s=self.now_s,
                workers=tuple(found),
                journal=tuple(self.history.journal),
                durable_step=self.history.newest_durable,
                epoch_used=-1,
            )
        )

    def _tick(self) -> None:
        for name, answered_s in list(self.answered_s.items()):
            worker = self.history.workers[name]
            silent_s = self.now_s - answered_s
            if silent_s > SILENT_S:
                self.handle(WorkerSilent(now_s=self.now_s, worker_id=name, seconds=silent_s))
            self.world.send(self, worker, lambda w=worker: self._polled(w, w.name in self.asked))  # type: ignore[misc]
        self.handle(Tick(now_s=self.now_s))
        self.world.after(POLL_S, self, self._tick)

    def _polled(self, worker: SimWorker, is_asked: bool) -> None:
        """In the worker: its answer is what is so at this moment."""
        worker.contact()
        if not worker.is_alive:
            return
        status = worker.status()
        holdings = worker.holdings() if is_asked and worker.state.is_resting else None
        is_saving = worker.saving > 0
        if not self.world.is_linked(self, worker):
            return
        parts, worker.parts = tuple(worker.parts), []
        worker.num_answers += 1
        number = worker.num_answers
        self.world.after(
            self.world.delay_s(), self, lambda: self._answered(worker, number, status, holdings, parts, is_saving)
        )

    def _answered(
        self,
        worker: SimWorker,
        number: int,
        status: WorkerStatus,
        holdings: Holdings | None,
        parts: tuple[SnapshotPart, ...],
        is_saving: bool,
    ) -> None:
        if worker.name in self.gone:
            return
        self.answered_s[worker.name] = self.now_s
        for part in parts:
            self.handle(PartWritten(now_s=self.now_s, part=part))
        if number < self._numbers.get(worker.name, 0):
            return  # a later answer has overtaken it
        self._numbers[worker.name] = number
        if holdings is not None:
            self.asked.discard(worker.name)
        self.handle(
            StatusSeen(now_s=self.now_s, status=status, holdings=holdings, is_saving=is_saving, summary=worker.summary)
        )

    # ---- what the cluster says ------------------------------------------------------------------------------------

    def placed(self, worker_id: str) -> None:
        self.handle(WorkerPlaced(now_s=self.now_s, worker_id=worker_id))

    def prepared(self, worker: SimWorker) -> None:
        self.answered_s[worker.name] = self.now_s
        self.handle(WorkerPrepared(now_s=self.now_s, info=worker.info))

    def lost(self, worker_id: str, reason: str) -> None:
        if worker_id not in self.gone:
            self.gone.add(worker_id)
            self.answered_s.pop(worker_id, None)
            self.handle(WorkerLost(now_s=self.now_s, worker_id=worker_id, reason=reason))

    # ---- events and instructions ----------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Hand an event to the machine; those that instructions cause come after it, in order."""
        self._queue.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        while self._queue and self.is_alive:
            event = self._queue.pop(0)
            before = self.state.phase
            instructions = self.state.handle(event)
            for instruction in instructions:
                if self.is_alive:
                    self._perform(instruction)
            self.history.on_controller(self, before, event, instructions)
        self._is_handling = False

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case SendOrder(worker_id, order):
                worker = self.history.workers[worker_id]
                self.world.send(self, worker, lambda: worker.order(order))
            case AskHoldings(worker_ids):
                self.asked.update(worker_ids)
            case AskStop(worker_id):
                worker = self.history.workers[worker_id]
                self.world.send(self, worker, lambda: worker.request(Flag.STOP))
            case AskCheckpoint(worker_id):
                worker = self.history.workers[worker_id]
                self.world.send(self, worker, lambda: worker.request(Flag.CHECKPOINT))
            case LaunchWorkers(worker_ids):
                self.history.launch(worker_ids)
            case CancelLaunch(worker_ids):
                self.history.cancel_launch(worker_ids)
            case KillWorker(worker_id):
                self.history.kill_when_reachable(self.history.workers[worker_id])
            case WriteJournal(record):
                self.world.after(self.world.delay_s(0.02), self, lambda: self._journalled(record))
            case WriteManifest():
                self.world.after(self.world.delay_s(0.05), self, lambda: self._manifest(instruction))
            case EndRun(phase, reason):
                self.history.on_end(phase, reason)
            case Publish(kind, fields):
                self.history.on_publish(kind, dict(fields))

    def _journalled(self, record: JournalRecord) -> None:
        self.history.on_record(self, record)
        # A crash may come between the record and the knowledge of it.
        self.world.after(self.world.delay_s(0.005), self, lambda: self._known(record.record_id))

    def _known(self, record_id: int) -> None:
        self.handle(JournalWritten(now_s=self.now_s, record_id=record_id))

    def _manifest(self, order: WriteManifest) -> None:
        rows = {key: content for part in order.parts for key, content in part.files}
        first = order.parts[0].summary or {}
        bins = sum((part.summary or {})["bins"] for part in order.parts)
        self.history.save(Saved(order.epoch, order.step, rows, first["dense"], bins))
        self.handle(ManifestWritten(now_s=self.now_s, epoch=order.epoch, step=order.step))
