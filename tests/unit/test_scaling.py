"""How many workers, and which (V6): decisions by invariant number, and a small world in which they are carried out."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.platform.config import ScalingConfig
from shoal.platform.config_failure import FailureConfig
from shoal.platform.scaling import (
    LAUNCH_LEAD_S,
    SETTLE_S,
    Demand,
    Placed,
    ScalingDecision,
    ScalingSnapshot,
    choose_leavers,
    decide_abort,
    decide_checkpoint,
    decide_demand,
    decide_scaling,
    worker_bounds,
)
from shoal.platform.state_messages import Cause

NOW = 1000.0
ELASTIC = ScalingConfig(num_workers=(2, 4))
FIXED = ScalingConfig(num_workers=2)
INTERVAL_S = ELASTIC.elastic_resize_monitor_interval_s


def placed(names: str) -> tuple[Placed, ...]:
    """``a1 b1``: worker a1 on host a, b1 on host b."""
    return tuple(Placed(worker_id=name, host=name[0]) for name in names.split())


def snapshot(members: str = "a1 b1", ready: str = "", **fields) -> ScalingSnapshot:
    fields.setdefault("ready_since_s", NOW)
    return ScalingSnapshot(members=placed(members), ready=placed(ready), **fields)


def decide(snap: ScalingSnapshot, config: ScalingConfig = ELASTIC, **failure) -> ScalingDecision | None:
    return decide_scaling(snap, NOW, config, FailureConfig(**failure))


def demand(snap: ScalingSnapshot, config: ScalingConfig = ELASTIC, **failure) -> Demand:
    return decide_demand(snap, NOW, config, FailureConfig(**failure))


# ---- demand -------------------------------------------------------------------------------------------------------


def test_every_wanted_worker_has_an_open_placement_group():
    assert demand(snapshot()).num_open == 2
    assert demand(snapshot(ready="c1", pending=("p",))).num_open == 0
    assert demand(snapshot(starting=("s",))).num_open == 1
    assert demand(snapshot(), FIXED).num_open == 0
    assert demand(snapshot("a1"), FIXED).num_open == 1  # a lost worker is asked for again


def test_nobody_is_launched_for_room_that_may_not_be_used_yet():
    after_loss = {"last_change_s": NOW - INTERVAL_S + LAUNCH_LEAD_S + 0.1}
    assert demand(snapshot(**after_loss)).num_open == 0
    assert demand(snapshot(last_change_s=NOW - INTERVAL_S + LAUNCH_LEAD_S)).num_open == 2
    assert demand(snapshot("a1", **after_loss)).num_open == 3  # below min
    assert demand(snapshot(target=3, **after_loss)).num_open == 1
    assert demand(snapshot(**after_loss), on_loss="replace").num_open == 2
    assert demand(snapshot("a1", **after_loss), FIXED).num_open == 1
    assert demand(snapshot(draining={"b1": NOW + 30}, **after_loss)).num_open == 3


def test_draining_workers_are_replaced_and_draining_joiners_let_go():
    draining = {"b1": NOW + 30, "c1": NOW + 30}
    found = demand(snapshot(ready="c1", draining=draining), FIXED)
    assert (found.num_open, found.cancel) == (1, ("c1",))


def test_a_lower_target_lets_go_what_costs_least_first():
    snap = snapshot(ready="c1 d1", starting=("s",), pending=("p",), target=3)
    assert demand(snap).cancel == ("p", "s", "d1")  # 3
    assert demand(snapshot(pending=("p", "q"), target=2)).cancel == ("q", "p")


def test_standbys_are_kept_beside_the_workers():
    found = demand(snapshot(), FIXED, on_loss="standby", num_standby=2)
    assert (found.num_open, found.num_open_standby) == (0, 2)
    found = demand(snapshot(standby=("s", "t", "u")), FIXED, on_loss="standby", num_standby=2)
    assert (found.num_open_standby, found.cancel) == (0, ("u",))


# ---- growing and shrinking ----------------------------------------------------------------------------------------


def test_ready_workers_join_together_up_to_the_maximum():
    decision = decide(snapshot(ready="c1 d1 e1"))
    assert decision is not None and decision.cause is Cause.CAPACITY
    assert (decision.wanted, decision.joiners, decision.leavers) == (4, ("c1", "d1"), ())
    assert decision.reason.startswith("2 -> 4 workers")


def test_the_first_joiner_waits_a_moment_for_one_that_is_being_started_but_not_for_one_without_room():
    assert decide(snapshot(ready="c1", starting=("s",))) is None  # 4
    assert decide(snapshot(ready="c1", starting=("s",), ready_since_s=NOW - SETTLE_S)) is not None
    assert decide(snapshot(ready="c1", pending=("p",))) is not None


def test_growth_keeps_its_interval_and_the_operator_does_not_wait():
    recent = {"last_change_s": NOW - INTERVAL_S + 1}
    assert decide(snapshot(ready="c1", **recent)) is None  # 4
    asked = decide(snapshot(ready="c1", target=3, **recent))
    assert asked is not None and asked.cause is Cause.SCALE and asked.wanted == 3  # 4


def test_the_operators_number_overrides_both_bounds():
    assert worker_bounds(ELASTIC, None) == (2, 4)
    assert worker_bounds(ELASTIC, 1) == (1, 1) and worker_bounds(ELASTIC, 9) == (2, 9)
    fewer = decide(snapshot("a1 b1 c1", target=1))
    assert fewer is not None and fewer.wanted == 1 and fewer.leavers == ("c1", "b1")
    assert decide(snapshot("a1 b1", target=2, ready="c1")) is None


@pytest.mark.parametrize(
    ("members", "num", "leavers"),
    [
        ("a1 a2 b1", 1, ("a2",)),  # b1 is the only one on another host
        ("a1 b1 c1", 1, ("c1",)),
        ("a1 a2 b1 c1 c2", 1, ("b1",)),  # a host comes free, two stay
        ("a1 a2 a3", 2, ("a3", "a2")),
        ("a1 b1", 1, ("b1",)),
        ("a1 b1", 5, ("b1",)),  # 2: never nobody
    ],
)
def test_leavers_free_hosts_but_keep_two(members, num, leavers):
    assert choose_leavers(placed(members), num) == leavers


# ---- drains -------------------------------------------------------------------------------------------------------


def test_an_elastic_run_leaves_a_draining_node_at_once():
    decision = decide(snapshot("a1 b1 c1", draining={"b1": NOW + 60}))
    assert decision is not None and decision.cause is Cause.DRAIN
    assert (decision.wanted, decision.leavers) == (2, ("b1",))


def test_a_replacement_takes_the_leavers_rank():
    decision = decide(snapshot("a1 b1", ready="c1", draining={"b1": NOW + 60}), FIXED)
    assert decision is not None and decision.replaced == {"c1": "b1"} and decision.wanted == 2


def test_of_several_draining_workers_as_many_go_as_there_are_replacements():
    draining = {"a1": NOW + 60, "b1": NOW + 40}
    decision = decide(snapshot("a1 b1", ready="c1", draining=draining), FIXED)
    assert decision is not None and decision.replaced == {"c1": "b1"}  # the one whose node goes first
    assert (decision.wanted, decision.leavers) == (2, ("b1",))
    rest = snapshot("a1 c1", draining={"a1": NOW + 60}, last_change_s=NOW)
    assert decide(rest, FIXED) is None
    assert demand(rest, FIXED).num_open == 1


def test_a_run_below_its_minimum_grows_as_soon_as_a_worker_is_ready():
    for config in (FIXED, ELASTIC):
        decision = decide(snapshot("a1", ready="b1", last_change_s=NOW - 0.1, ready_since_s=NOW - 60), config)
        assert decision is not None and decision.joiners == ("b1",)
    assert decide(snapshot("a1 b1", ready="c1", last_change_s=NOW - 0.1, ready_since_s=NOW - 60)) is None


def test_a_run_at_its_minimum_waits_for_a_replacement_until_the_deadline_presses():
    waiting = snapshot("a1 b1", draining={"b1": NOW + 60}, copy_time_s=5)
    assert decide(waiting, FIXED) is None
    pressed = decide(dataclasses.replace(waiting, draining={"b1": NOW + 9}), FIXED)
    assert pressed is not None and pressed.wanted == 1 and "below the minimum of 2" in pressed.reason  # 2


def test_when_all_nodes_go_and_nobody_is_ready_a_checkpoint_is_due():
    snap = snapshot("a1 b1", draining={"a1": NOW + 20, "b1": NOW + 30})
    assert decide(snap) is None  # 2: never to nobody
    assert "all 2 workers" in (decide_checkpoint(snap, NOW) or "")
    assert decide_checkpoint(dataclasses.replace(snap, ready=placed("c1")), NOW) is None
    assert decide_checkpoint(snapshot("a1 b1", draining={"a1": NOW + 20}), NOW) is None


def test_a_worker_without_deadline_is_replaced_when_a_new_one_is_ready():
    draining = {"b1": math.inf}
    assert decide(snapshot("a1 b1", draining=draining)) is None
    decision = decide(snapshot("a1 b1", ready="c1", draining=draining), FIXED)
    assert decision is not None and decision.cause is Cause.REPLACE and decision.replaced == {"c1": "b1"}
    assert decide_checkpoint(snapshot("a1", draining={"a1": math.inf}), NOW) is None


# ---- order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", list(Cause))
@pytest.mark.parametrize("is_cutting_over", [False, True])
@pytest.mark.parametrize(
    ("cause", "fields"),
    [
        (Cause.DRAIN, {"draining": {"b1": NOW + 60}}),
        (Cause.REPLACE, {"draining": {"b1": math.inf}, "ready": "c1"}),
        (Cause.SCALE, {"target": 3, "ready": "c1"}),
        (Cause.CAPACITY, {"ready": "c1"}),
        (Cause.REBALANCE, {"rebalance": "uneven"}),
    ],
)
def test_only_a_higher_cause_interrupts_and_nothing_a_cutover(cause, fields, in_flight, is_cutting_over):
    """1: every pair of causes x phase."""
    members = "a1 b1 b2" if cause is Cause.DRAIN else "a1 b1"
    idle = decide(snapshot(members, **fields))
    assert idle is not None and idle.cause is cause
    during = decide(snapshot(members, in_flight=in_flight, is_cutting_over=is_cutting_over, **fields))
    assert (during is not None) == (cause < in_flight and not is_cutting_over)


def test_a_drain_that_hits_the_view_being_prepared_replans_it():
    snap = snapshot("a1 b1 b2", draining={"b1": NOW + 60}, in_flight=Cause.DRAIN, in_flight_members=("a1", "b1"))
    decision = decide(snap)
    assert decision is not None and decision.leavers == ("b1",)
    assert decide(dataclasses.replace(snap, in_flight_members=("a1", "b2"))) is None


def test_a_preparation_is_abandoned_when_its_joiner_goes_or_it_is_no_longer_wanted():
    growing = snapshot(ready="c1", in_flight=Cause.CAPACITY, in_flight_members=("a1", "b1", "c1"))
    assert decide_abort(growing, ELASTIC) is None
    assert "c1" in (decide_abort(dataclasses.replace(growing, draining={"c1": NOW + 30}), ELASTIC) or "")
    assert decide_abort(dataclasses.replace(growing, target=2), ELASTIC)
    assert decide_abort(dataclasses.replace(growing, target=2, is_cutting_over=True), ELASTIC) is None
    shrinking = snapshot("a1 b1 c1", in_flight=Cause.SCALE, in_flight_members=("a1",), target=1)
    assert decide_abort(shrinking, ELASTIC) is None
    assert decide_abort(dataclasses.replace(shrinking, target=3), ELASTIC)
    assert decide_abort(dataclasses.replace(shrinking, in_flight=Cause.DRAIN, target=3), ELASTIC) is None
    assert decide_abort(snapshot(), ELASTIC) is None


def test_an_uneven_placement_is_evened_out_when_nothing_else_is_due():
    decision = decide(snapshot(rebalance="7 row blocks are not where they should be"))
    assert decision is not None and decision.cause is Cause.REBALANCE and decision.wanted == 2
    assert decide(snapshot(rebalance="7 row blocks", last_change_s=NOW - 1)) is None


# ---- a small world ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class World:
    """Carries decisions out at once: placement groups get room while there is any, view changes succeed."""

    config: ScalingConfig
    failure: FailureConfig
    room: int
    snap: ScalingSnapshot
    now: float = 0.0
    started: int = 0
    changes: int = 0

    def tick(self) -> None:
        self.now += 1.0
        snap = self.snap
        wish = decide_demand(snap, self.now, self.config, self.failure)
        keep = lambda workers: tuple(w for w in workers if w not in wish.cancel)  # noqa: E731
        names = [f"{'abc'[(self.started + i) % 3]}{self.started + i}" for i in range(wish.num_open)]
        self.started += wish.num_open
        ready = tuple(one for one in snap.ready if one.worker_id not in wish.cancel)
        waiting = (*keep(snap.pending), *names)
        free = max(0, self.room - len(snap.members) - len(ready) - len(keep(snap.starting)))
        coming = tuple(Placed(worker_id=name, host=name[0]) for name in keep(snap.starting))
        since = snap.ready_since_s if ready else self.now
        snap = dataclasses.replace(
            snap, pending=waiting[free:], starting=waiting[:free], ready=ready + coming, ready_since_s=since
        )
        _, wanted = worker_bounds(self.config, snap.target)
        staying = sum(member.worker_id not in snap.draining for member in snap.members)
        everyone = staying + len(snap.ready) + len(snap.starting) + len(snap.pending)
        assert everyone <= max(wanted, staying)  # 3
        decision = decide_scaling(snap, self.now, self.config, self.failure)
        if decision is not None:
            snap = self.change(snap, decision)
        self.snap = snap

    def change(self, snap: ScalingSnapshot, decision: ScalingDecision) -> ScalingSnapshot:
        least, _ = worker_bounds(self.config, snap.target)
        is_fewer = decision.wanted < len(snap.members)
        assert decision.wanted >= (least if is_fewer and decision.cause is not Cause.DRAIN else 1)  # 2
        joining = tuple(one for one in snap.ready if one.worker_id in decision.joiners)
        staying = tuple(one for one in snap.members if one.worker_id not in decision.leavers)
        assert len(staying) + len(joining) == decision.wanted
        self.changes += 1
        return dataclasses.replace(
            snap,
            members=staying + joining,
            ready=tuple(one for one in snap.ready if one not in joining),
            last_change_s=self.now,
        )


@settings(max_examples=150, deadline=None)
@given(
    bounds=st.tuples(st.integers(1, 3), st.integers(0, 3)),
    room=st.integers(1, 8),
    script=st.lists(
        st.tuples(st.sampled_from(["target", "drain", "room", "none"]), st.integers(0, 8), st.integers(1, 20)),
        max_size=5,
    ),
)
def test_a_world_comes_to_rest_at_the_wanted_size_and_stays_there(bounds, room, script):
    config = ScalingConfig(num_workers=(bounds[0], sum(bounds)))
    first = tuple(Placed(worker_id=f"m{i}", host="abc"[i % 3]) for i in range(bounds[0]))
    world = World(config, FailureConfig(), max(room, bounds[0]), ScalingSnapshot(members=first))
    for what, number, ticks in script:
        members = world.snap.members
        if what == "target":
            world.snap = dataclasses.replace(world.snap, target=number or None)
        elif what == "drain" and number < len(members):
            draining = {**world.snap.draining, members[number].worker_id: world.now + 40}
            world.snap = dataclasses.replace(world.snap, draining=draining)
        elif what == "room":
            world.room = max(number, len(members))
        for _ in range(ticks):
            world.tick()
    for _ in range(60):
        world.tick()
    _, wanted = worker_bounds(config, world.snap.target)
    going = [member for member in world.snap.members if member.worker_id in world.snap.draining]
    assert len(world.snap.members) == min(wanted, max(world.room, len(world.snap.members))) or going
    if not going and world.room >= wanted:
        assert len(world.snap.members) == wanted
    before = world.changes
    for _ in range(30):
        world.tick()
    assert world.changes == before  # 5
