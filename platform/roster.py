"""What the controller knows of each worker, and the order each should have by now. Pure bookkeeping, no decisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from shoal.actors.messages import Holdings, Leave, Order, View, WorkerInfo, WorkerPhase, WorkerStatus
from shoal.platform.failure import Seen
from shoal.platform.membership import NewMember
from shoal.platform.scaling import Placed
from shoal.platform.state_messages import StatusSeen


@dataclasses.dataclass
class WorkerEntry:
    """One living worker. Changed by the roster and by ControllerState only."""

    info: WorkerInfo
    ready_s: float
    status: WorkerStatus | None = None
    #: When the status was seen, and for how long nothing has been since.
    seen_s: float = 0.0
    silent_s: float = 0.0
    holdings: Holdings | None = None
    is_origin: bool = False
    is_saving: bool = False
    summary: Mapping[str, Any] | None = None
    failed_s: float | None = None
    #: When its node goes, or its process ends because of a SIGTERM.
    drain_at_s: float | None = None
    #: Why it is to end by itself, or is being killed; a worker with either is used for nothing any more.
    leave_reason: str | None = None
    kill_reason: str | None = None
    #: The newest order, and when it was sent.
    order: Order | None = None
    ordered_s: float = 0.0
    #: Epoch it has been told to drop other rows for.
    released: int = -1

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def phase(self) -> WorkerPhase:
        return WorkerPhase.STARTING if self.status is None else self.status.phase

    @property
    def epoch(self) -> int:
        """Newest view it knows to be decided; -1: none."""
        return -1 if self.status is None else self.status.epoch

    @property
    def fence(self) -> int:
        return 0 if self.status is None else self.status.fence

    @property
    def step(self) -> int:
        return 0 if self.status is None else self.status.step

    @property
    def is_usable(self) -> bool:
        return self.leave_reason is None and self.kill_reason is None

    def has_reported(self, fence: int) -> bool:
        """Whether its holdings are known and cannot change before an order of epoch ``fence`` or later."""
        return self.holdings is not None and self.holdings.fence >= fence

    def is_preparing(self, epoch: int) -> bool:
        return self.status is not None and self.status.preparing == epoch

    def is_ready_for(self, epoch: int) -> bool:
        """Whether its part of preparing ``epoch`` is done."""
        status = self.status
        return self.is_preparing(epoch) and status is not None and bool(status.prepare and status.prepare.is_ready)

    def as_member(self) -> NewMember:
        return NewMember(worker_id=self.worker_id, host=self.info.host, address=self.info.address)

    def as_placed(self) -> Placed:
        return Placed(worker_id=self.worker_id, host=self.info.host)

    def as_seen(self) -> Seen:
        """For ``decide_suspects``. A worker in no view that has accepted the fence rests like a parked one."""
        status = self.status
        if status is not None and status.phase is WorkerPhase.STARTING and self.holdings is not None:
            status = dataclasses.replace(status, phase=WorkerPhase.PARKED)
        return Seen(worker_id=self.worker_id, status=status, silent_s=self.silent_s)

    def see(self, event: StatusSeen) -> None:
        """Take in an answer to a poll."""
        self.status, self.seen_s, self.silent_s = event.status, event.now_s, 0.0
        self.is_origin, self.is_saving = event.is_origin, event.is_saving
        self.summary = event.summary if event.summary is not None else self.summary
        if event.holdings is not None:
            self.holdings = event.holdings
        if event.status.phase is WorkerPhase.FAILED and self.failed_s is None:
            self.failed_s = event.now_s
        if event.status.drain_s is not None:
            self.drain_at_s = event.now_s + event.status.drain_s


class Roster:
    """All workers of a run: living, asked for, and lost."""

    def __init__(self, prefix: str) -> None:
        self.living: dict[str, WorkerEntry] = {}
        #: Worker id -> when it was asked for; in the order of asking.
        self.pending: dict[str, float] = {}
        #: Those of them that have room and are being started.
        self.starting: set[str] = set()
        #: Worker id -> why it is gone.
        self.lost: dict[str, str] = {}
        #: Of the lost ones: those whose end was announced, and those that had finished their part of the run.
        self.announced: set[str] = set()
        self.finished: set[str] = set()
        self._prefix = prefix
        self._num_named = 0

    def name_new(self, num: int, now_s: float) -> tuple[str, ...]:
        """Ids for ``num`` workers that are asked for now; never used before in this run."""
        names = tuple(f"{self._prefix}{self._num_named + i}" for i in range(num))
        self._num_named += num
        self.pending |= dict.fromkeys(names, now_s)
        return names

    def add(self, info: WorkerInfo, now_s: float) -> WorkerEntry:
        self.drop_pending(info.worker_id)
        entry = WorkerEntry(info=info, ready_s=now_s, seen_s=now_s)
        self.living[info.worker_id] = entry
        return entry

    def remove(self, worker_id: str, reason: str) -> WorkerEntry | None:
        self.lost[worker_id] = reason
        self.drop_pending(worker_id)
        entry = self.living.pop(worker_id, None)
        if entry is not None and entry.drain_at_s is not None:
            self.announced.add(worker_id)
        if entry is not None and entry.phase is WorkerPhase.FINISHED:
            self.finished.add(worker_id)
        return entry

    def drop_pending(self, worker_id: str) -> None:
        self.pending.pop(worker_id, None)
        self.starting.discard(worker_id)

    def get(self, worker_id: str) -> WorkerEntry | None:
        """A living worker that is not on its way out."""
        entry = self.living.get(worker_id)
        return entry if entry is not None and entry.is_usable else None

    def usable(self) -> list[WorkerEntry]:
        """All that are not on their way out, oldest first."""
        return sorted((e for e in self.living.values() if e.is_usable), key=lambda e: (e.ready_s, e.worker_id))

    def members(self, view: View) -> list[WorkerEntry]:
        """Members of ``view`` that live, in rank order."""
        return [entry for m in view.members if (entry := self.living.get(m.worker_id)) is not None]

    def spares(self, view: View | None) -> list[WorkerEntry]:
        """Usable workers that are in no view and have never been, oldest first."""
        return [
            e
            for e in self.usable()
            if e.epoch < 0 and (view is None or view.rank_of(e.worker_id) is None) and e.phase is not WorkerPhase.LEFT
        ]

    def due_orders(
        self, now_s: float, resend_s: float, desired: Callable[[WorkerEntry], Order | None]
    ) -> list[tuple[str, Order]]:
        """Orders to send now: new ones at once, those without an effect so far again after ``resend_s``."""
        due = []
        for worker_id, entry in sorted(self.living.items()):
            if entry.kill_reason is not None:
                continue
            order = Leave(reason=entry.leave_reason) if entry.leave_reason is not None else desired(entry)
            if order is None:
                entry.order = None
            elif order != entry.order or now_s - entry.ordered_s >= resend_s:
                entry.order, entry.ordered_s = order, now_s
                due.append((worker_id, order))
        return due
