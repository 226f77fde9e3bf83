"""A failure from its first sign to the recovered view: who is lost, who goes on, and from which step (F2, F4, F9).

Pure. An incident may take several attempts, each with an epoch number of its own (V1): a second failure while workers
come together begins the next one. It is over when the recovered view is decided and protected again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.actors.messages import BlockSet, Holdings, Park, Recover, View, WorkerPhase
from shoal.kernels.spec import TableSpec
from shoal.platform.config import ScalingConfig
from shoal.platform.config_failure import FailureConfig
from shoal.platform.failure import (
    Go,
    Loss,
    LossState,
    Resume,
    Stop,
    SuspectDecision,
    Wait,
    decide_budget,
    decide_loss,
    decide_suspects,
)
from shoal.platform.membership import ViewSpec
from shoal.platform.recovery import RecoveryDecision, RecoveryMode, newest_view, plan_recovery
from shoal.platform.roster import Roster, WorkerEntry
from shoal.platform.scaling import worker_bounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Times of the control plane, in seconds, and how often it tries again."""

    #: Silence after which a worker is looked into although nobody complains.
    silence_s: float = 20.0
    #: Silence after which it counts as lost once a failure is known.
    answer_timeout_s: float = 5.0
    #: What a healthy worker may take to notice a failure and park: the operation timeout and some more.
    park_timeout_s: float = 15.0
    #: From the first order of a recovery to the last worker's first step.
    recover_timeout_s: float = 600.0
    #: From the order to cut over to the decision.
    cutover_timeout_s: float = 120.0
    #: An order without visible effect is sent again after this long.
    resend_s: float = 2.0
    #: How long a victim's failure waits for the failure that caused it.
    cause_timeout_s: float = 5.0
    #: How long a failure waits for a checkpoint in progress.
    saving_timeout_s: float = 3600.0
    #: A view change that failed is tried again after this long, twice as long after each further failure.
    retry_s: float = 5.0
    retry_max_s: float = 120.0
    #: How long a run waits for its first ``min`` workers.
    start_timeout_s: float = 180.0
    #: How long the first view waits for further workers once ``min`` are ready and nobody is being started.
    start_settle_s: float = 5.0
    #: Checkpoints in a row that may fail before the run ends; None: any number.
    failed_checkpoints_max: int | None = None


@dataclasses.dataclass
class Attempt:
    """One try to bring the survivors into a new view. ``decision`` None: still collecting what they hold."""

    epoch: int
    began_s: float
    decision: RecoveryDecision | None = None
    decided_s: float = 0.0
    #: The journal record that must be durable before anybody acts (F4).
    record_id: int = -1
    #: Whether the record is durable: orders are out.
    is_ordered: bool = False
    formed_s: float | None = None


@dataclasses.dataclass
class Incident:
    """What is known of a failure; lives on until the recovered view is protected again."""

    reason: str
    #: When its first sign was seen, and when any worker that lives last applied a step.
    began_s: float
    last_well_s: float
    attempt: Attempt
    num_attempts: int = 1
    #: Target of the newest attempt that was journalled: a later one may rise, never fall (F4).
    floor: int | None = None
    #: Workers of the view that were lost in this incident, and whether the budgets have counted them.
    lost: list[str] = dataclasses.field(default_factory=list)
    num_counted: int = -1
    is_waiting: bool = False
    wait_reason: str = ""


@dataclasses.dataclass(frozen=True)
class Redo:
    """A recovered view on its way to the first step that had not been applied before the failure."""

    incident: Incident
    view: View
    #: Steps applied before the failure.
    step: int
    recovered_s: float


def last_step_s(roster: Roster) -> float | None:
    """When a living worker last applied a step, as far as they have told."""
    told = [(e.seen_s, None if e.status is None else e.status.applied_s) for e in roster.living.values()]
    return max((seen_s - applied_s for seen_s, applied_s in told if applied_s is not None), default=None)


def resumed(redo: Redo, roster: Roster, now_s: float) -> dict[str, float] | None:
    """What the event says once every member is beyond the steps done before; None: not yet.

    ``outage_s``: from the last step applied before the failure to here; ``fed_s``: how long the slowest member's first
    step waited for its batch; ``redo_s``: from the recovered view to here. As exact as the controller polls.
    """
    members = roster.members(redo.view)
    statuses = [e.status for e in members if e.status is not None and e.status.epoch == redo.view.epoch]
    if len(statuses) < redo.view.world_size or any(status.step <= redo.step for status in statuses):
        return None
    return {
        "outage_s": round(now_s - redo.incident.last_well_s, 3),
        "fed_s": round(max(status.timings.get("feed", 0.0) for status in statuses), 3),
        "redo_s": round(now_s - redo.recovered_s, 3),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What decisions of an incident depend on beside the workers; fixed for a run or taken at the moment."""

    scaling: ScalingConfig
    failure: FailureConfig
    limits: Limits
    view_spec: ViewSpec
    tables: Sequence[TableSpec]
    durable_step: int | None
    #: The operator's number of workers.
    target: int | None
    is_stopping: bool
    controller_restarts: int
    #: (step of the checkpoint, worker id, its blocks) -> what it reads from storage.
    make_restore: Callable[[int, str, BlockSet], Any]

    def spec_for(self, hosts: Sequence[str]) -> ViewSpec:
        """The view's constants, with or without copies as these hosts allow."""
        keeps = self.failure.keeps_copies(len(set(hosts))) and len(hosts) > 1
        return dataclasses.replace(self.view_spec, replicate=keeps)


def park_order(attempt: Attempt, entry: WorkerEntry, reason: str) -> Park | None:
    """While collecting: everybody closes all epochs below the attempt's, and says what it holds."""
    is_at_rest = entry.phase in (WorkerPhase.PARKED, WorkerPhase.LEFT, WorkerPhase.FINISHED, WorkerPhase.STARTING)
    # A worker that is at work may have closed those epochs by itself, when it came to its view.
    return None if is_at_rest and entry.fence >= attempt.epoch else Park(epoch=attempt.epoch, reason=reason)


def recover_order(attempt: Attempt, entry: WorkerEntry) -> Recover | None:
    """While restoring: members and suppliers get the plan, until they have accepted it."""
    decision = attempt.decision
    if decision is None or not attempt.is_ordered or entry.fence > attempt.epoch:
        return None
    order = Recover(view=decision.view, plan=decision.plan)
    is_member = decision.view.rank_of(entry.worker_id) is not None
    is_source = any(shipment.source == entry.worker_id for shipment in decision.plan.shipments)
    return order if is_member or is_source else None


def suspects(incident: Incident, roster: Roster, limits: Limits, now_s: float) -> SuspectDecision:
    """Whom to kill before the others go on (F2)."""
    attempt = incident.attempt
    # A worker that has just come had no time to take in an order.
    concerned = [
        e
        for e in roster.usable()
        if e.has_reported(incident.attempt.epoch) or now_s - e.ready_s > limits.park_timeout_s or e.epoch >= 0
    ]
    complaints = {
        e.worker_id: e.status.unreachable
        for e in concerned
        if e.status is not None and e.status.unreachable and incident.num_attempts > 1
    }
    since_s = now_s - attempt.began_s
    decision = decide_suspects(
        [e.as_seen() for e in concerned],
        since_report_s=since_s,
        answer_timeout_s=limits.answer_timeout_s,
        park_timeout_s=limits.park_timeout_s,
        complaints=complaints,
    )
    # It answers and rests, yet never takes the order in: of no use, and it must not hold the others up.
    deaf = [e.worker_id for e in concerned if since_s > 3 * limits.park_timeout_s and not e.has_reported(attempt.epoch)]
    if not deaf:
        return decision
    reason = "; ".join(filter(None, (decision.reason, f"{', '.join(deaf)} took no order for {since_s:.0f} s")))
    return dataclasses.replace(decision, suspects=tuple(sorted({*decision.suspects, *deaf})), reason=reason)


def is_collected(attempt: Attempt, roster: Roster) -> bool:
    """Whether all living workers have reported, and nobody's end is awaited: work of a worker that may still be
    training is not given away (F7)."""
    return all(
        e.kill_reason is None and (e.leave_reason is not None or e.has_reported(attempt.epoch))
        for e in roster.living.values()
    )


def known_view(view: View | None, roster: Roster) -> View | None:
    """The newest view that the journal or any worker knows to be decided (V4)."""
    return newest_view([e.holdings for e in roster.living.values() if e.holdings is not None], view)


def decide_members(
    incident: Incident, base: View, roster: Roster, setting: Setting, losses: Sequence[Loss], now_s: float
) -> Resume | Wait | Stop:
    """With whom the run goes on, or whom it waits for (F9), within its budgets."""
    budget = decide_budget(losses, setting.controller_restarts, setting.failure)
    if not isinstance(budget, Go):
        return budget
    survivors = tuple(m.worker_id for m in base.members if roster.get(m.worker_id) is not None)
    lost = tuple(m.worker_id for m in base.members if roster.get(m.worker_id) is None)
    ready = tuple(e.worker_id for e in roster.spares(base) if e.drain_at_s is None)
    least, most = worker_bounds(setting.scaling, setting.target)
    if setting.is_stopping:
        # Whoever is left takes the last checkpoint; nobody is waited for.
        members = survivors or ready[:1]
        return Resume(members=members, replaced={}, reason="the run is to stop") if members else Stop(reason="")
    state = LossState(
        survivors=survivors,
        lost=lost,
        ready=ready,
        waited_s=now_s - incident.began_s,
    )
    is_elastic = setting.scaling.is_elastic or setting.target is not None
    return decide_loss(state, setting.failure, min_workers=least, max_workers=most, is_elastic=is_elastic)


def decide_recovery(
    incident: Incident, base: View, resume: Resume, roster: Roster, setting: Setting
) -> RecoveryDecision:
    """The recovered view and the way to it. Raises PlanError where the members have too little memory."""
    chosen = [roster.living[worker_id] for worker_id in resume.members]
    holdings: Mapping[str, Holdings] = {
        e.worker_id: e.holdings for e in roster.living.values() if e.holdings is not None and e.kill_reason is None
    }
    hosts = [e.info.host for e in chosen]
    base_hosts = {*base.hosts, *hosts}
    return plan_recovery(
        holdings,
        base,
        [e.as_member() for e in chosen],
        setting.tables,
        setting.spec_for(hosts),
        epoch=incident.attempt.epoch,
        mode=RecoveryMode(setting.failure.recovery_on(len(base_hosts))),
        durable_step=setting.durable_step,
        make_restore=lambda worker_id, blocks: setting.make_restore(setting.durable_step or 0, worker_id, blocks),
        floor=incident.floor,
        replaced=resume.replaced,
        rows_reported={e.worker_id: e.status.rows for e in chosen if e.status is not None},
    )


def restoring_problem(attempt: Attempt, roster: Roster, limits: Limits, now_s: float) -> str | None:
    """Why this attempt cannot succeed any more; None: it may."""
    decision = attempt.decision
    assert decision is not None
    targets = [m.worker_id for m in decision.view.members]
    sources = [s.source for s in decision.plan.shipments]
    is_formed = attempt.formed_s is not None
    for worker_id in dict.fromkeys([*targets, *(() if is_formed else sources)]):
        entry = roster.get(worker_id)
        if entry is None:
            return f"{worker_id} is lost: {roster.lost.get(worker_id, 'ended')}"
        if entry.silent_s > limits.silence_s:
            return f"{worker_id} has not answered for {entry.silent_s:.1f} s"
        is_member = worker_id in targets
        gave_up = entry.phase is WorkerPhase.PARKED and entry.fence > attempt.epoch
        if is_member and gave_up:
            error = entry.status.error if entry.status is not None else None
            return f"{worker_id} could not recover: {error or 'no reason given'}"
    if now_s - attempt.decided_s > limits.recover_timeout_s:
        return f"not done after {limits.recover_timeout_s:g} s"
    return None
