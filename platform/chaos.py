"""Chaos: schedules of faults made from a seed, and what to do to a run so that each of them happens. Pure.

1. A schedule is a pure function of (seed, number of seeds): the same on every machine and version of Python.
2. Over all seeds every (fault point, role) is in some schedule; every schedule has at least one fault.
3. Where a fault needs a view change or a loss to come about, ``next_provocation`` asks for one until it has happened;
   it asks for nothing once all have.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Collection, Sequence

from shoal.kernels.faults import (
    BUDDY,
    CONTROLLER,
    FEEDER,
    JOINER,
    LEAVER,
    OWNER,
    POINTS,
    RANK0,
    Action,
    Fault,
    Point,
)

#: Seeds over which every fault point is met in every role.
NUM_SEEDS = 36


class Promise(enum.Enum):
    """What a run under a schedule is compared with."""

    #: Its number of workers never changes: it equals the run without faults, bit for bit.
    IDENTICAL = "identical"
    #: Its number of workers changes too: every sample counts exactly once.
    EXACTLY_ONCE = "exactly once"


class Provocation(enum.Enum):
    """What is done to a run from outside, so that it comes to where a fault waits."""

    #: One more worker, or one less.
    GROW = "grow"
    SHRINK = "shrink"
    #: A worker is to go, another one takes its place.
    DRAIN = "drain"
    #: Row blocks move among the present workers.
    REBALANCE = "rebalance"
    #: A worker that none of the waiting faults is for is killed.
    LOSS = "loss"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChaosPlan:
    """What happens to one run."""

    seed: int
    promise: Promise
    num_workers: int
    faults: tuple[Fault, ...]


def plan_chaos(seed: int, num_seeds: int = NUM_SEEDS, *, roles: Collection[str] | None = None) -> ChaosPlan:
    """The plan of ``seed``, counted from 0; seeds beyond ``num_seeds`` begin anew with other actions and times.

    ``roles``: those that the run has; None: all but the Feeder, which exists only on Ray.
    """
    present = frozenset(roles) if roles is not None else frozenset(r for r in all_roles() if r != FEEDER)
    pairs = [pair for pair in all_pairs() if pair[1] in present]
    dealt = sorted(range(len(pairs)), key=lambda index: _draw(1 << 32, "deal", index))
    mine = [pairs[index] for index in dealt[seed % num_seeds :: num_seeds]]
    assert mine, f"{num_seeds} seeds are more than there are faults to deal"
    # Both promises meet every kind of fault, though not each of them.
    promise = Promise.EXACTLY_ONCE if _draw(2, "promise", seed) else Promise.IDENTICAL
    return ChaosPlan(
        seed=seed,
        promise=promise,
        num_workers=2 + _draw(3, "workers", seed),
        faults=tuple(_fault(seed, index, point, role) for index, (point, role) in enumerate(mine)),
    )


def all_pairs() -> tuple[tuple[str, str], ...]:
    """Every (fault point, role)."""
    return tuple((point.name, role) for point in POINTS.values() for role in point.roles)


def all_roles() -> tuple[str, ...]:
    return (OWNER, BUDDY, RANK0, JOINER, LEAVER, CONTROLLER, FEEDER)


def missing_pairs(plans: Sequence[ChaosPlan], *, roles: Collection[str]) -> list[tuple[str, str]]:
    """The pairs, among those of ``roles``, that no plan has."""
    planned = {(fault.point, fault.role) for plan in plans for fault in plan.faults}
    return [pair for pair in all_pairs() if pair[1] in roles and pair not in planned]


def next_provocation(plan: ChaosPlan, waiting: Sequence[Fault], num_before: int) -> Provocation | None:
    """What brings the first of ``waiting`` about, ``num_before`` provocations having been tried; None: time alone.

    A fault of a step, a snapshot or a checkpoint comes by itself; it is asked for after those that do not.
    """
    for fault in sorted(waiting, key=_needs_nothing):
        if _needs_nothing(fault):
            return None
        if fault.point.startswith("recovery."):
            return Provocation.LOSS
        return _view_change(plan.promise, fault.role, num_before)
    return None


def _needs_nothing(fault: Fault) -> bool:
    return not fault.point.startswith(("prepare.", "cutover.", "recovery."))


def _view_change(promise: Promise, role: str, num_before: int) -> Provocation:
    if promise is Promise.IDENTICAL:
        # Only a drain has somebody come and somebody go.
        can_rebalance = role not in (JOINER, LEAVER)
        return Provocation.REBALANCE if can_rebalance and num_before % 2 else Provocation.DRAIN
    if role == JOINER:
        return Provocation.GROW if num_before % 2 == 0 else Provocation.SHRINK
    if role == LEAVER:
        return Provocation.SHRINK if num_before % 2 else Provocation.GROW
    return (Provocation.GROW, Provocation.SHRINK)[num_before % 2]


def _fault(seed: int, index: int, point: str, role: str) -> Fault:
    action = _action(POINTS[point], role, seed, index)
    # A view change or a recovery comes past a place once or twice, a step each time.
    often, seldom = ("step.", "wire."), ("snapshot.", "controller.")
    passages = 20 if point.startswith(often) else 3 if point.startswith(seldom) else 1
    seconds = {Action.STALL: 0.2, Action.STOP: 0.0, Action.PARTITION: 6.0}.get(action, 0.0)
    return Fault(point=point, role=role, action=action, nth=1 + _draw(passages, "nth", seed, index), seconds=seconds)


def _action(point: Point, role: str, seed: int, index: int) -> Action:
    """Mostly sudden death; the first round of seeds has it in most places."""
    if role in (CONTROLLER, FEEDER):
        choices = [Action.KILL, *([Action.DROP] * 3 * point.is_message)]
    elif point.is_wire:
        choices = [Action.PARTITION] * 3 + [Action.DROP] * 3 * point.is_message
    else:
        choices = [Action.KILL] * 6 + [Action.EXIT, Action.STOP, Action.STALL, *([Action.RAISE] * point.can_fail)]
    return choices[_draw(len(choices), "action", seed, index)]


def _draw(below: int, *key: object) -> int:
    """An integer in [0, below) that only depends on ``key``."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % below
