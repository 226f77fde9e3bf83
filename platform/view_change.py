"""A planned view change from its order to its decision: prepare in the background, cut over at a named step (V2-V6).

Pure: what a change needs from each worker by now, what stands in its way, whether it is decided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shoal.actors.messages import Abort, CutOver, Order, Prepare, Start, View, WorkerPhase
from shoal.platform.incident import Limits
from shoal.platform.roster import Roster, WorkerEntry
from shoal.platform.scaling import Cause


@dataclasses.dataclass
class ViewChange:
    """The one view change in flight (V6). Changed by ControllerState only."""

    view: View
    base: View
    cause: Cause
    reason: str
    began_s: float
    #: The journal record of the new view: nobody prepares it before that is durable.
    record_id: int
    cut_over_s: float | None = None

    @property
    def epoch(self) -> int:
        return self.view.epoch

    @property
    def participants(self) -> tuple[str, ...]:
        """Everybody who has a part in it: members of the old view, then joiners."""
        ids = [m.worker_id for m in self.base.members] + [m.worker_id for m in self.view.members]
        return tuple(dict.fromkeys(ids))


def start_order(view: View, entry: WorkerEntry) -> Order | None:
    """Of a run's first view: members join it until they say that they have."""
    if view.rank_of(entry.worker_id) is None or entry.epoch >= view.epoch or entry.fence > view.epoch:
        return None
    return Start(view=view)


def prepare_order(change: ViewChange, entry: WorkerEntry) -> Order | None:
    """Everybody who has a part prepares until it says that it does."""
    if entry.worker_id not in change.participants or entry.is_preparing(change.epoch):
        return None
    return Prepare(view=change.view)


def cutover_order(change: ViewChange, entry: WorkerEntry) -> Order | None:
    """Rank 0 raises the flag; nobody else is told."""
    is_caller = change.base.rank_of(entry.worker_id) == 0 and entry.phase is not WorkerPhase.CUTTING_OVER
    return CutOver(epoch=change.epoch) if is_caller and entry.is_preparing(change.epoch) else None


def abort_order(entry: WorkerEntry, current: int | None, reason: str) -> Order | None:
    """Whoever still prepares anything but ``current`` is to forget it."""
    preparing = -1 if entry.status is None else entry.status.preparing
    return Abort(epoch=preparing, reason=reason) if preparing >= 0 and preparing != current else None


def find_trouble(view: View, roster: Roster, limits: Limits) -> tuple[str, WorkerEntry | None] | None:
    """A sign that ``view`` cannot go on: (what, the worker that complains; None where a worker is lost)."""
    for member in view.members:
        entry = roster.living.get(member.worker_id)
        if entry is None and member.worker_id in roster.finished:
            continue
        if entry is None:
            return f"{member.worker_id} is lost: {roster.lost.get(member.worker_id, 'gone')}", None
        if entry.kill_reason is not None:
            return f"{member.worker_id} is ended: {entry.kill_reason}", None
        if entry.silent_s > limits.silence_s:
            return f"{member.worker_id} has not answered for {entry.silent_s:.1f} s", entry
        if entry.phase is WorkerPhase.PARKED:
            error = entry.status.error if entry.status is not None else None
            return f"{member.worker_id} has parked: {error or 'no reason given'}", entry
    return None


def preparing_problem(change: ViewChange, roster: Roster, limits: Limits, timeout_s: float, now_s: float) -> str | None:
    """Why the preparation is to be abandoned, for reasons that leave the present view intact; None: go on."""
    for member in change.view.members:
        entry = roster.get(member.worker_id)
        if entry is None:
            return f"{member.worker_id} is lost: {roster.lost.get(member.worker_id, 'ended')}"
        if entry.silent_s > limits.silence_s:
            return f"{member.worker_id} has not answered for {entry.silent_s:.1f} s"
        if entry.drain_at_s is not None:
            return f"{member.worker_id} is on a node that goes"
    for worker_id in change.participants:
        entry = roster.get(worker_id)
        if entry is None or not entry.is_preparing(change.epoch) or entry.status is None:
            continue
        if entry.status.prepare is not None and entry.status.prepare.error is not None:
            return f"{worker_id}: {entry.status.prepare.error}"
    if now_s - change.began_s > timeout_s:
        late = _not_ready(change, roster)
        return f"not ready after {timeout_s:g} s: {', '.join(late)}"
    return None


def is_prepared(change: ViewChange, roster: Roster) -> bool:
    return not _not_ready(change, roster)


def is_decided(view: View, roster: Roster) -> bool:
    """Whether the first exchange of ``view`` completed on any rank (V4)."""
    return any(e.epoch == view.epoch for e in roster.living.values())


def are_all_in(view: View, roster: Roster) -> bool:
    """Whether every member of ``view`` says that it trains, or has trained, in it."""
    return all(e.epoch == view.epoch for e in roster.members(view)) and len(roster.members(view)) == view.world_size


def _not_ready(change: ViewChange, roster: Roster) -> Sequence[str]:
    return [w for w in change.participants if (e := roster.get(w)) is None or not e.is_ready_for(change.epoch)]
