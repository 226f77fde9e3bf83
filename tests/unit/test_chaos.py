"""Schedules from seeds: what they promise, by the numbers of shoal.platform.chaos."""

from __future__ import annotations

from shoal.kernels.faults import POINTS, ROLES, Action, Fault
from shoal.platform.chaos import (
    NUM_SEEDS,
    ChaosPlan,
    Promise,
    Provocation,
    all_pairs,
    missing_pairs,
    next_provocation,
    plan_chaos,
)


def test_schedule_depends_on_its_seed_alone():  # 1
    assert plan_chaos(5) == plan_chaos(5) and plan_chaos(5) != plan_chaos(6)
    first = plan_chaos(0)
    assert (first.num_workers, first.promise, [(f.point, f.role) for f in first.faults]) == GOLDEN


GOLDEN = (
    3,
    Promise.EXACTLY_ONCE,
    [
        ("step.values_done", "buddy"),
        ("step.gradients_done", "rank0"),
        ("wire.poll", "buddy"),
        ("recovery.parked", "owner"),
    ],
)


def test_all_seeds_together_meet_every_point_in_every_role():  # 2
    roles = set(ROLES) - {"feeder"}
    plans = [plan_chaos(seed) for seed in range(NUM_SEEDS)]
    assert NUM_SEEDS >= 30 and all(plan.faults for plan in plans)
    assert missing_pairs(plans, roles=roles) == []
    assert missing_pairs(plans, roles=ROLES) == [pair for pair in all_pairs() if pair[1] == "feeder"]
    with_feeder = [plan_chaos(seed, roles=ROLES) for seed in range(NUM_SEEDS)]
    assert missing_pairs(with_feeder, roles=ROLES) == []


def test_all_seeds_together_have_every_action_and_both_promises_and_sizes():
    plans = [plan_chaos(seed) for seed in range(NUM_SEEDS)]
    assert {fault.action for plan in plans for fault in plan.faults} == set(Action)
    assert {(plan.promise, plan.num_workers) for plan in plans} == {(p, n) for p in Promise for n in (2, 3, 4)}
    prefixes = {(plan.promise, fault.point.split(".")[0]) for plan in plans for fault in plan.faults}
    families = {name.split(".")[0] for name in POINTS} - {"feeder", "join"}
    assert prefixes >= {(p, family) for p in Promise for family in families}


def plan_of(promise: Promise, *faults: Fault) -> ChaosPlan:
    return ChaosPlan(seed=0, promise=promise, num_workers=3, faults=faults)


def fault(point: str, role: str) -> Fault:
    return Fault(point=point, role=role, action=Action.KILL)


def test_what_does_not_come_by_itself_is_provoked():  # 3
    step, cut = fault("step.begin", "owner"), fault("cutover.meet", "joiner")
    left, lost = fault("cutover.closed", "leaver"), fault("recovery.ship", "owner")
    for promise in Promise:
        plan = plan_of(promise, step, cut)
        assert next_provocation(plan, [], 0) is None and next_provocation(plan, [step], 0) is None
        assert next_provocation(plan, [step, lost], 0) is Provocation.LOSS
    same, elastic = plan_of(Promise.IDENTICAL, cut), plan_of(Promise.EXACTLY_ONCE, cut)
    assert {next_provocation(same, [cut], n) for n in range(4)} == {Provocation.DRAIN}
    assert {next_provocation(same, [fault("cutover.flip", "buddy")], n) for n in range(4)} == {
        Provocation.DRAIN,
        Provocation.REBALANCE,
    }
    # A worker that grows beyond the limit, or shrinks below it, has to come back before it can do so again.
    assert [next_provocation(elastic, [left], n) for n in range(4)] == [Provocation.GROW, Provocation.SHRINK] * 2
