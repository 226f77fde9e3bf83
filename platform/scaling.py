"""How many workers a run should have, and which (PROTOCOLS V6). Pure.

Room in the cluster is never computed: every wanted worker has a placement group, and one that gets its resources is
room. So Ray's autoscaler sees the demand, and nobody else is given the same slot.

Invariants, asserted by number in the test:
1. One view change is in flight. A cause of higher rank interrupts it, and so does a drain that hits one of its members;
   nothing interrupts a cutover but a failure.
2. No decision takes the run below its minimum, unless a node's deadline leaves no choice, and never to nobody.
3. Workers, ready ones and open placement groups together are never more than wanted (and standbys).
4. Growth that follows the cluster's room keeps its interval and waits for stragglers a moment; drains and orders of the
   operator do not wait.
5. Without changes outside, a carried-out decision is followed by none: no flapping.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from shoal.platform.config import ScalingConfig
from shoal.platform.config_failure import FailureConfig
from shoal.platform.state_messages import Cause

#: A worker is launched so long before the run may grow by it: about what a process takes to start.
LAUNCH_LEAD_S = 5.0
#: How long the first of several joiners waits for others that are being started, so that they come in one view change.
SETTLE_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """A worker and where it runs."""

    worker_id: str
    host: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingSnapshot:
    """What scaling is decided from. Times are the controller's monotonic clock, in seconds."""

    #: Workers of the present view, in rank order.
    members: tuple[Placed, ...]
    #: Workers that have built their model and are in no view, oldest first; not counted as standbys.
    ready: tuple[Placed, ...] = ()
    #: When the oldest of ``ready`` became ready.
    ready_since_s: float = 0.0
    #: Workers that have their resources and are being started.
    starting: tuple[str, ...] = ()
    #: Workers whose placement group waits for room in the cluster.
    pending: tuple[str, ...] = ()
    #: Workers kept idle for on_loss standby, ready or not; in none of the other lists.
    standby: tuple[str, ...] = ()
    #: Number of workers the operator asked for; None: the configuration's.
    target: int | None = None
    #: Worker id -> when it will be gone, for workers on nodes that are being drained, or that had a SIGTERM; infinity:
    #: it is to be replaced when a new one is ready.
    draining: Mapping[str, float] = dataclasses.field(default_factory=dict)
    #: Why the placement should be evened out (``membership.needs_rebalance``).
    rebalance: str | None = None
    #: The view change in flight: its cause, its members, and whether it can no longer be interrupted.
    in_flight: Cause | None = None
    in_flight_members: tuple[str, ...] = ()
    is_cutting_over: bool = False
    #: When the last view change was decided.
    last_change_s: float = float("-inf")
    #: How long a leaver's rows take to copy, as far as known.
    copy_time_s: float = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingDecision:
    """The next view's workers: ``wanted`` of them, the present ones plus ``joiners`` less ``leavers``."""

    cause: Cause
    wanted: int
    joiners: tuple[str, ...]
    leavers: tuple[str, ...]
    #: Joiner -> leaver whose rank it takes.
    replaced: Mapping[str, str]
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demand:
    """Placement groups to open, and workers (ready or pending) to let go."""

    num_open: int
    num_open_standby: int
    cancel: tuple[str, ...]
    reason: str


def worker_bounds(config: ScalingConfig, target: int | None) -> tuple[int, int]:
    """(min, wanted): the operator's target is both wanted and, if lower, the minimum."""
    if target is None:
        return max(1, config.min_workers), max(1, config.max_workers)
    return max(1, min(config.min_workers, target)), max(1, target)


def decide_demand(snapshot: ScalingSnapshot, now: float, config: ScalingConfig, failure: FailureConfig) -> Demand:
    """How many placement groups should be open: what is wanted less what is there. Drained workers are not there.

    For room that the run may not use yet nobody is launched: a process that starts takes CPU time from steps that are
    done again after a loss.
    """
    least, wanted = worker_bounds(config, snapshot.target)
    staying = sum(member.worker_id not in snapshot.draining for member in snapshot.members)
    usable = [one.worker_id for one in snapshot.ready if one.worker_id not in snapshot.draining]
    hopeless = tuple(one.worker_id for one in snapshot.ready if one.worker_id in snapshot.draining)
    # In the order in which they cost least to let go: without resources, not started yet, the newest that is ready.
    coming = [*reversed(snapshot.pending), *reversed(snapshot.starting), *reversed(usable)]
    have = staying + len(coming)
    standby_wanted = failure.num_standby if failure.on_loss == "standby" else 0
    idle = [worker for worker in snapshot.standby if worker not in snapshot.draining]
    excess = max(0, have - wanted)
    surplus = coming[:excess]
    surplus += idle[standby_wanted:]
    unusable_s = config.elastic_resize_monitor_interval_s - LAUNCH_LEAD_S - (now - snapshot.last_change_s)
    has_enough = snapshot.target is None and config.is_elastic and staying >= least and not snapshot.draining
    is_early = has_enough and unusable_s > 0 and failure.loss_policy(is_elastic=True) == "shrink"
    return Demand(
        num_open=0 if is_early else max(0, wanted - have),
        num_open_standby=max(0, standby_wanted - len(idle)),
        cancel=(*hopeless, *surplus),
        reason=f"{wanted} wanted, {staying} at work, {len(usable)} ready, {len(coming) - len(usable)} to come",
    )


def decide_scaling(
    snapshot: ScalingSnapshot, now: float, config: ScalingConfig, failure: FailureConfig
) -> ScalingDecision | None:
    """The view change that is due, or None. Losses are not decided here (``failure.decide_loss``)."""
    for decide in (_drain, _operator, _capacity, _rebalance):
        decision = decide(snapshot, now, config, failure)
        if decision is not None:
            return decision if _may_start(snapshot, decision.cause) else None
    return None


def _may_start(snapshot: ScalingSnapshot, cause: Cause) -> bool:
    """Whether a view change for ``cause`` may begin, which ends one that is being prepared."""
    if snapshot.in_flight is None:
        return True
    if snapshot.is_cutting_over:
        return False
    if cause is Cause.DRAIN and any(worker in snapshot.draining for worker in snapshot.in_flight_members):
        return True
    return cause < snapshot.in_flight


def _drain(
    snapshot: ScalingSnapshot, now: float, config: ScalingConfig, failure: FailureConfig
) -> ScalingDecision | None:
    """Workers on draining nodes leave: with replacements at once, else early enough before the deadline."""
    leavers = [member.worker_id for member in snapshot.members if member.worker_id in snapshot.draining]
    going = [worker for worker in leavers if math.isfinite(snapshot.draining[worker])]
    joiners = _joiners(snapshot, len(going or leavers))
    if not going:
        leavers = leavers[: len(joiners)]
        reason = f"{len(leavers)} workers are replaced, as asked"
        return _decision(snapshot, Cause.REPLACE, joiners, leavers, reason) if leavers else None
    least, _ = worker_bounds(config, snapshot.target)
    wanted = len(snapshot.members) - len(going) + len(joiners)
    left_s = min(snapshot.draining[worker] for worker in going) - now
    is_pressing = left_s <= 2 * snapshot.copy_time_s
    waits = failure.loss_policy(is_elastic=config.is_elastic) != "shrink" or wanted < least
    if len(joiners) < len(going) and waits and not is_pressing:
        # As many as can be replaced go now, those on the nodes that go first; the others wait for their replacements.
        going = sorted(going, key=lambda worker: snapshot.draining[worker])[: len(joiners)]
        wanted = len(snapshot.members)
    if wanted < 1 or not going:
        return None
    below = f", below the minimum of {least}" if wanted < least else ""
    reason = f"{len(going)} workers are on nodes that go in {left_s:.0f} s, {len(joiners)} replaced{below}"
    return _decision(snapshot, Cause.DRAIN, joiners, going, reason)


def decide_abort(snapshot: ScalingSnapshot, config: ScalingConfig) -> str | None:
    """Why the view change that is being prepared is no longer wanted, or cannot last; None where it goes on."""
    if snapshot.in_flight is None or snapshot.is_cutting_over:
        return None
    present = {member.worker_id for member in snapshot.members}
    going = [worker for worker in snapshot.in_flight_members if worker in snapshot.draining and worker not in present]
    if going:
        return f"{', '.join(going)} would join from a node that goes"
    if snapshot.in_flight not in (Cause.SCALE, Cause.CAPACITY):
        return None
    before, prepared = len(snapshot.members), len(snapshot.in_flight_members)
    _, wanted = worker_bounds(config, snapshot.target)
    is_wrong = prepared > max(before, wanted) or prepared < min(before, wanted)
    return f"{prepared} workers are being prepared and {wanted} are wanted now" if is_wrong else None


def decide_checkpoint(snapshot: ScalingSnapshot, now: float) -> str | None:
    """Why a checkpoint is due at once: all workers will be gone before a new one can take over (V6)."""
    left = [snapshot.draining.get(member.worker_id, math.inf) - now for member in snapshot.members]
    if not left or math.isinf(max(left)) or _joiners(snapshot, 1):
        return None
    return f"all {len(left)} workers are on nodes that go, the last in {max(left):.0f} s, and no new worker is ready"


def _joiners(snapshot: ScalingSnapshot, num: int) -> list[str]:
    """At most ``num`` ready workers, oldest first, without those that will be gone themselves."""
    return [one.worker_id for one in snapshot.ready if one.worker_id not in snapshot.draining][:num]


def _operator(
    snapshot: ScalingSnapshot, now: float, config: ScalingConfig, failure: FailureConfig
) -> ScalingDecision | None:
    """The operator's number: fewer at once, more as soon as they are ready, together if they come close together."""
    if snapshot.target is None:
        return None
    wanted = worker_bounds(config, snapshot.target)[1]
    return _resize(snapshot, now, wanted, Cause.SCALE, f"{wanted} workers were asked for", interval_s=0.0)


def _capacity(
    snapshot: ScalingSnapshot, now: float, config: ScalingConfig, failure: FailureConfig
) -> ScalingDecision | None:
    """Growth towards the maximum, with workers that are ready."""
    if snapshot.target is not None:
        return None
    least, wanted = worker_bounds(config, None)
    # A run with too few workers does not wait to have enough again.
    interval_s = config.elastic_resize_monitor_interval_s if len(snapshot.members) >= least else 0.0
    return _resize(snapshot, now, wanted, Cause.CAPACITY, f"room for more, {wanted} at most", interval_s=interval_s)


def _resize(
    snapshot: ScalingSnapshot, now: float, wanted: int, cause: Cause, why: str, *, interval_s: float
) -> ScalingDecision | None:
    surplus = len(snapshot.members) - wanted
    if surplus > 0:
        return _decision(snapshot, cause, (), choose_leavers(snapshot.members, surplus), why)
    joiners = _joiners(snapshot, -surplus)
    if not joiners or now - snapshot.last_change_s < interval_s:
        return None
    is_settled = len(joiners) == -surplus or not snapshot.starting or now - snapshot.ready_since_s >= SETTLE_S
    return _decision(snapshot, cause, joiners, (), why) if is_settled else None


def _rebalance(
    snapshot: ScalingSnapshot, now: float, config: ScalingConfig, failure: FailureConfig
) -> ScalingDecision | None:
    if snapshot.rebalance is None or now - snapshot.last_change_s < config.elastic_resize_monitor_interval_s:
        return None
    return _decision(snapshot, Cause.REBALANCE, (), (), snapshot.rebalance)


def _decision(
    snapshot: ScalingSnapshot, cause: Cause, joiners: Sequence[str], leavers: Sequence[str], reason: str
) -> ScalingDecision:
    before = len(snapshot.members)
    after = before + len(joiners) - len(leavers)
    return ScalingDecision(
        cause=cause,
        wanted=after,
        joiners=tuple(joiners),
        leavers=tuple(leavers),
        replaced=dict(zip(joiners, leavers)),
        reason=f"{before} -> {after} workers: {reason}",
    )


def choose_leavers(members: Sequence[Placed], num: int) -> tuple[str, ...]:
    """Who leaves when fewer are wanted: hosts with the fewest workers are emptied first, so that machines come free,
    but two hosts stay as long as there are two workers, for the sake of copies. Within a host the highest rank goes."""
    left = list(members)
    leavers = []
    for _ in range(min(num, len(members) - 1)):
        counts = Counter(member.host for member in left)
        spare = {host for host in counts if counts[host] > 1 or len(counts) != 2 or len(left) == 2}
        fewest = min(counts[host] for host in spare)
        rank = max(rank for rank, member in enumerate(left) if member.host in spare and counts[member.host] == fewest)
        leavers.append(left.pop(rank).worker_id)
    return tuple(leavers)
