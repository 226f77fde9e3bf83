"""What to make of a failure: who is lost, whether the run goes on, and with how many workers (PROTOCOLS F2, F9). Pure.

Invariants, asserted by number in the test:
1. A worker that answers and is parked is never a suspect.
2. Nobody is a suspect on the word of a peer alone: before the deadline only the dead, the failed and the silent are.
3. After the deadline every run either has a suspect or has all its workers parked: a decision is always reached.
4. A budget counts losses, not workers; each of the three budgets can end the run by itself, and says which it was.
5. A run goes on only with at least ``min_workers``; below, it waits, and at last stops.
6. Replacements take lost ranks one to one; with enough of them the number of workers stays (F9).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from shoal.actors.messages import WorkerPhase, WorkerStatus
from shoal.platform.config_failure import FailureConfig

#: Phases in which a worker takes no part in any exchange and waits for orders.
_RESTING = (WorkerPhase.PARKED, WorkerPhase.LEFT, WorkerPhase.FINISHED)


# ---- who is lost --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What the controller knows of one worker."""

    worker_id: str
    #: Its newest answer; None: it has never answered.
    status: WorkerStatus | None
    #: Seconds since that answer was asked for and came.
    silent_s: float = 0.0
    #: Ray says that the process is gone.
    is_dead: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuspectDecision:
    """Who is lost. ``is_final`` False: ask again, somebody may still park."""

    suspects: tuple[str, ...]
    is_final: bool
    reason: str


def decide_suspects(
    seen: Sequence[Seen],
    *,
    since_report_s: float,
    answer_timeout_s: float,
    park_timeout_s: float,
    complaints: Mapping[str, Collection[str]] | None = None,
) -> SuspectDecision:
    """Who has to be killed before the survivors go on (F2).

    Args:
        seen: all workers of the view, and joiners that have been told to form its groups.
        since_report_s: since the first failure was reported or seen.
        answer_timeout_s: silence after which a worker counts as lost, once a failure is known.
        park_timeout_s: how long a healthy worker may take to notice and park: the operation timeout and some more.
        complaints: worker id -> peers it could not reach, from the errors of this and the attempts just before. Used
            where all are parked and yet groups cannot be formed: whom most cannot reach is lost.
    """
    lost = {one.worker_id: "is dead" for one in seen if one.is_dead}
    for one in seen:
        if one.worker_id in lost:
            continue
        if one.status is not None and one.status.phase is WorkerPhase.FAILED:
            lost[one.worker_id] = f"failed: {one.status.error or 'no reason given'}"
        elif one.silent_s > answer_timeout_s:
            lost[one.worker_id] = f"has not answered for {one.silent_s:.1f} s"
    busy = [one for one in seen if one.worker_id not in lost and not _is_resting(one)]
    if busy and since_report_s < park_timeout_s:
        return _decided(lost, False, f"waiting for {', '.join(sorted(one.worker_id for one in busy))} to park")
    if busy:
        behind = min(_position(one) for one in busy)
        for one in busy:
            if _position(one) == behind:
                lost[one.worker_id] = f"has not parked after {since_report_s:.1f} s and is furthest behind{_where(one)}"
        # Whoever is busy but not furthest behind gets another turn: its peer's end may release it.
        return _decided(lost, len(busy) == sum(_position(one) == behind for one in busy), "")
    if not lost and complaints:
        accused = _most_accused(complaints, {one.worker_id for one in seen})
        if accused is not None:
            lost[accused[0]] = f"cannot be reached by {accused[1]} of {len(seen) - 1} workers"
    return _decided(lost, True, "all workers are parked, none is lost")


def _is_resting(one: Seen) -> bool:
    return one.status is not None and one.status.phase in _RESTING


def _position(one: Seen) -> tuple[int, int]:
    return (-1, -1) if one.status is None else (one.status.epoch, one.status.step)


def _where(one: Seen) -> str:
    if one.status is None:
        return ", never heard of"
    return f", at step {one.status.step}, {one.status.phase.value} for {one.status.since_s:.1f} s"


def _most_accused(complaints: Mapping[str, Collection[str]], workers: Collection[str]) -> tuple[str, int] | None:
    """The worker that the most peers cannot reach, and by how many; among equals the one that reaches the fewest."""
    counts = {
        worker: sum(worker in peers for other, peers in complaints.items() if other != worker) for worker in workers
    }
    worst = max(counts, key=lambda worker: (counts[worker], len(complaints.get(worker, ())), worker), default=None)
    return (worst, counts[worst]) if worst is not None and counts[worst] else None


def _decided(lost: Mapping[str, str], is_final: bool, otherwise: str) -> SuspectDecision:
    parts = [f"{worker} {why}" for worker, why in sorted(lost.items())]
    if otherwise and (not parts or not is_final):
        parts.append(otherwise)
    return SuspectDecision(suspects=tuple(sorted(lost)), is_final=is_final, reason="; ".join(parts))


# ---- whether the run goes on --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """One failure that took workers, or that made a run go back: what the budgets count."""

    #: Highest step that any worker had applied when it happened.
    step: int
    workers: tuple[str, ...] = ()
    #: All its workers were on nodes that had been announced to go.
    is_announced: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Go:
    """The run goes on."""

    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
    """The run ends, resumable from its newest checkpoint."""

    reason: str


def decide_budget(losses: Sequence[Loss], controller_restarts: int, config: FailureConfig) -> Go | Stop:
    """Whether a run may go on after ``losses`` (oldest first, the present one last) and restarts of its controller."""
    counted = sum(not loss.is_announced for loss in losses)
    in_a_row = _without_progress(losses)
    budgets = (
        (counted, config.max_failures, "losses of workers", "max_failures"),
        (in_a_row, config.max_failures_without_progress, "losses without a new step", "max_failures_without_progress"),
        (controller_restarts, config.controller_failure_limit, "controller restarts", "controller_failure_limit"),
    )
    for count, limit, what, field in budgets:
        if 0 <= limit < count:
            return Stop(reason=f"{count} {what}: run.failure.{field} is {limit}")
    shown = ", ".join(f"{count} of {'any' if limit < 0 else limit} {what}" for count, limit, what, _ in budgets)
    return Go(reason=shown)


def _without_progress(losses: Sequence[Loss]) -> int:
    """Losses at the end of the list without a step beyond all earlier ones in between; the first has progress."""
    in_a_row, best = 0, -1
    for index, loss in enumerate(losses):
        in_a_row = in_a_row + 1 if index and loss.step <= best else 0
        best = max(best, loss.step)
    return in_a_row


# ---- with how many ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossState:
    """What is left of a view after a loss."""

    #: Living members of the view, in rank order.
    survivors: tuple[str, ...]
    #: Members that are gone and were to stay; empty where a failure took nobody.
    lost: tuple[str, ...]
    #: Workers that have built their model and are in no view: standbys and new ones, oldest first.
    ready: tuple[str, ...] = ()
    #: Since the loss was decided.
    waited_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resume:
    """Go on with ``members``; ``replaced``: joiner -> lost worker whose rank it takes."""

    members: tuple[str, ...]
    replaced: Mapping[str, str]
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wait:
    """Decide again when a worker is ready, or after ``until_s``. ``scaling.decide_demand`` asks for the workers."""

    #: How many more ready workers would end the wait.
    num_missing: int
    #: Seconds after the loss at which the decision changes by itself.
    until_s: float
    #: The run has fewer workers than it may have: it is paused, not merely recovering.
    is_below_min: bool
    reason: str


def decide_loss(
    state: LossState,
    config: FailureConfig,
    *,
    min_workers: int,
    is_elastic: bool,
    max_workers: int | None = None,
) -> Resume | Wait | Stop:
    """How the run goes on after a loss: ``on_loss``, with the reason. Asked again whenever ``state`` changes.

    ``shrink`` takes no new worker that it can do without, for rows would have to be sent to it first; the cluster's
    room is used afterwards. ``standby`` and ``replace`` fill lost ranks, so that the number of workers stays (F9), but
    not beyond ``max_workers``: a lost worker that was to leave anyway is not waited for, since nobody asks for another.
    """
    policy = config.loss_policy(is_elastic=is_elastic)
    num_left, num_lost = len(state.survivors), len(state.lost)
    num_needed = max(1, min_workers - num_left) if num_left == 0 else max(0, min_workers - num_left)
    num_filled = num_lost if max_workers is None else min(num_lost, max_workers - num_left)
    num_wanted = num_needed if policy == "shrink" else max(num_needed, num_filled)
    num_taken = min(num_wanted, len(state.ready))
    found = f"{num_left} of {num_left + num_lost} workers left, {num_taken} new ones take part"
    if num_taken == num_wanted:
        return _resume(state, num_taken, f"{policy}: {found}")
    if policy == "replace" and state.waited_s < config.replace_timeout_s:
        return Wait(
            num_missing=num_wanted - num_taken,
            until_s=config.replace_timeout_s,
            is_below_min=num_taken < num_needed,
            reason=f"replace: {num_wanted - num_taken} new workers are waited for, {config.replace_timeout_s:g} s",
        )
    if num_taken >= num_needed:
        late = f", no more within {config.replace_timeout_s:g} s" if policy == "replace" else ""
        return _resume(state, num_taken, f"{policy}: {found}{late}")
    if state.waited_s >= config.capacity_timeout_s:
        return Stop(reason=f"{num_left + num_taken} workers for {state.waited_s:.0f} s, at least {min_workers} needed")
    return Wait(
        num_missing=num_needed - num_taken,
        until_s=config.capacity_timeout_s,
        is_below_min=True,
        reason=f"paused: {num_left + num_taken} workers, at least {min_workers} are needed",
    )


def _resume(state: LossState, num_taken: int, reason: str) -> Resume:
    joiners = state.ready[:num_taken]
    return Resume(members=state.survivors + joiners, replaced=dict(zip(joiners, state.lost)), reason=reason)
