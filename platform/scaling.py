"""How many workers a run should have, and which (PROTOCOLS V6). Pure.

Room in the cluster is never computed: every wanted worker has a placement group, and one that gets its resources is
room. So Ray's autoscaler sees the demand, and nobody else is given the same slot.

Invariants, asserted by number in the test:
1. One view change is in flight; only a cause of higher rank interrupts one, and nothing but a failure a cutover.
2. No decision takes the run below its minimum, unless a node's deadline leaves no choice, and never to nobody.
3. Workers, ready ones and open placement groups together are never more than wanted (and standbys).
4. Growth that follows the cluster's room keeps its interval and waits for stragglers a moment; drains and orders of the
   operator do not wait.
5. Without changes outside, a carried-out decision is followed by none: no flapping.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Mapping, Sequence

from shoal.platform.config import ScalingConfig
from shoal.platform.config_failure import FailureConfig

#: How long the first of several joiners waits for the others, so that they come in one view change. Seconds.
SETTLE_S = 2.0
#: Deadline assumed for a drain that names none (Ray: 30 s). Seconds after it was announced.
DRAIN_DEFAULT_S = 30.0


class Cause(enum.IntEnum):
    """What a view change is for; a higher one goes before a lower one (V6)."""

    HOT_SET = 0
    REBALANCE = 1
    CAPACITY = 2
    OPERATOR = 3
    REPLACE = 4
    DRAIN = 5
    FAILURE = 6


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
    #: Workers whose placement group is open, or that are being started.
    pending: tuple[str, ...] = ()
    #: Workers kept idle for on_loss standby, ready or starting; not in ``ready`` or ``pending``.
    standby: tuple[str, ...] = ()
    #: Number of workers the operator asked for; None: the configuration's.
    target: int | None = None
    #: Worker id -> when its node goes, for workers on nodes that are being drained, or that had a SIGTERM.
    draining: Mapping[str, float] = dataclasses.field(default_factory=dict)
    #: Why the placement should be evened out (``membership.needs_rebalance``).
    rebalance: str | None = None
    #: Cause of the view change in flight, and whether it can no longer be interrupted.
    in_flight: Cause | None = None
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


def decide_demand(snapshot: ScalingSnapshot, config: ScalingConfig, failure: FailureConfig) -> Demand:
    """How many placement groups should be open: what is wanted less what is there. Drained workers are not there."""
    _, wanted = worker_bounds(config, snapshot.target)
    staying = sum(member.worker_id not in snapshot.draining for member in snapshot.members)
    usable = [one.worker_id for one in snapshot.ready if one.worker_id not in snapshot.draining]
    hopeless = tuple(one.worker_id for one in snapshot.ready if one.worker_id in snapshot.draining)
    have = staying + len(usable) + len(snapshot.pending)
    standby_wanted = failure.num_standby if failure.on_loss == "standby" else 0
    idle = [worker for worker in snapshot.standby if worker not in snapshot.draining]
    excess = max(0, have - wanted)
    # What has not started yet costs least to let go; then the newest that is ready.
    surplus = [*reversed(snapshot.pending), *reversed(usable)][:excess]
    surplus += idle[standby_wanted:]
    return Demand(
        num_open=max(0, wanted - have),
        num_open_standby=max(0, standby_wanted - len(idle)),
        cancel=(*hopeless, *surplus),
        reason=f"{wanted} wanted, {staying} at work, {len(usable)} ready, {len(snapshot.pending)} pending",
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
    if snapshot.in_flight is None:
        return True
    return not snapshot.is_cutting_over and cause > snapshot.in_flight


def _drain(
    snapshot: ScalingSnapshot, now: float, config: ScalingConfig, failure: FailureConfig
) -> ScalingDecision | None:
    """Workers on draining nodes leave: with replacements at once, else early enough before the deadline."""
    leavers = [member.worker_id for member in snapshot.members if member.worker_id in snapshot.draining]
    if not leavers:
        return None
    least, _ = worker_bounds(config, snapshot.target)
    joiners = [one.worker_id for one in snapshot.ready if one.worker_id not in snapshot.draining][: len(leavers)]
    wanted = len(snapshot.members) - len(leavers) + len(joiners)
    left_s = min(snapshot.draining[worker] for worker in leavers) - now
    is_pressing = left_s <= 2 * snapshot.copy_time_s
    waits = failure.loss_policy(is_elastic=config.is_elastic) != "shrink" or wanted < least
    if wanted < 1 or (len(joiners) < len(leavers) and waits and not is_pressing):
        return None
    below = f", below the minimum of {least}" if wanted < least else ""
    reason = f"{len(leavers)} workers are on nodes that go in {left_s:.0f} s, {len(joiners)} replaced{below}"
    return _decision(snapshot, Cause.DRAIN, joiners, leavers, reason)


def _operator(
    snapshot: ScalingSnapshot, now: float, config: ScalingConfig, failure: FailureConfig
) -> ScalingDecision | None:
    """The operator's number: fewer at once, more as soon as they are ready, together if they come close together."""
    if snapshot.target is None:
        return None
    wanted = worker_bounds(config, snapshot.target)[1]
    return _resize(snapshot, now, wanted, Cause.OPERATOR, f"{wanted} workers were asked for", interval_s=0.0)


def _capacity(
    snapshot: ScalingSnapshot, now: float, config: ScalingConfig, failure: FailureConfig
) -> ScalingDecision | None:
    """Growth towards the maximum, with workers that are ready."""
    if snapshot.target is not None:
        return None
    wanted = worker_bounds(config, None)[1]
    interval_s = config.elastic_resize_monitor_interval_s
    return _resize(snapshot, now, wanted, Cause.CAPACITY, f"room for more, {wanted} at most", interval_s=interval_s)


def _resize(
    snapshot: ScalingSnapshot, now: float, wanted: int, cause: Cause, why: str, *, interval_s: float
) -> ScalingDecision | None:
    surplus = len(snapshot.members) - wanted
    if surplus > 0:
        return _decision(snapshot, cause, (), choose_leavers(snapshot.members, surplus), why)
    joiners = [one.worker_id for one in snapshot.ready if one.worker_id not in snapshot.draining][:-surplus]
    if not joiners:
        return None
    has_all = len(joiners) == -surplus
    if now - snapshot.last_change_s < interval_s or not (has_all or now - snapshot.ready_since_s >= SETTLE_S):
        return None
    return _decision(snapshot, cause, joiners, (), why)


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
