"""Where a run goes back to, and who gives what to whom (F4): against a brute-force oracle; invariants by number."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.actors.messages import BlockSet, Copies, Holdings, View
from shoal.kernels.errors import PlanError
from shoal.kernels.spec import TableSpec
from shoal.platform.membership import Candidate, NewMember, ViewSpec, plan_view
from shoal.platform.placement import table_bytes
from shoal.platform.recovery import RecoveryDecision, RecoveryMode, newest_view, plan_recovery

SPEC = ViewSpec(run="r", replicate=True)
TABLES = [
    TableSpec(name="big", num_embeddings=1000, embedding_dim=4, num_blocks=4),
    TableSpec(name="small", num_embeddings=10, embedding_dim=4, num_blocks=1),
]
BLOCKS = [(table.name, block) for table in TABLES for block in range(table.num_blocks)]
STEPS = (0, 10, 20)


def worker(name: str) -> NewMember:
    """``a1``: worker a1 on host a."""
    return NewMember(worker_id=name, host=name[0])


def view_of(*names: str, epoch: int = 1, base: View | None = None) -> View:
    return plan_view(base, epoch, [worker(name) for name in names], TABLES, SPEC).view


def held(view: View, name: str, *steps: int, applied: int = 25, copies: Sequence[int] | None = None) -> Holdings:
    """What a worker of ``view`` holds if all its snapshots at ``steps`` are complete."""
    rank = view.rank_of(name)
    assert rank is not None
    kept = tuple(steps if copies is None else copies)
    wards = [m.worker_id for m, buddy in zip(view.members, view.buddies) if buddy == rank]
    return Holdings(
        worker_id=name,
        view=view,
        applied=applied,
        snapshots=steps,
        owned=view.owned_by(rank),
        copies=(Copies(blocks=view.copied_by(rank), steps=kept),) if kept else (),
        aux=dict.fromkeys(wards, kept),
    )


def recover(holdings: Sequence[Holdings], base: View, members: Sequence[Candidate], **fields) -> RecoveryDecision:
    given_fields = {"epoch": base.epoch + 5, "mode": RecoveryMode.REPLICATED, "durable_step": None} | fields
    return plan_recovery(
        {one.worker_id: one for one in holdings},
        base,
        members,
        TABLES,
        SPEC,
        make_restore=lambda name, blocks: (name, blocks),
        **given_fields,
    )


def check(decision: RecoveryDecision, holdings: Mapping[str, Holdings], base: View, durable_step: int | None) -> None:
    """Carry the plan out on sets, and see that everybody has everything at the target exactly once (3, 5)."""
    plan, view = decision.plan, decision.view
    members = {member.worker_id for member in view.members}
    if plan.from_checkpoint:
        assert plan.step == (durable_step or 0) and not plan.shipments
        assert set(plan.restores) == (members if durable_step is not None else set())
        for name, restore in plan.restores.items():
            assert restore == (name, view.owned_by(view.rank_of(name)))
        return
    step = plan.step
    supplied = {name: supply(one, step) for name, one in holdings.items()}
    for shipment in plan.shipments:
        assert shipment.source in holdings and shipment.target in members
        assert all(key in supplied[shipment.source] for key in shipment.blocks)  # 3
        assert not shipment.has_dense or step in holdings[shipment.source].snapshots  # 3
        assert shipment.blocks or shipment.has_dense or shipment.aux_of
        assert shipment.source != shipment.target or not (shipment.blocks or shipment.has_dense)
    pairs = [(shipment.source, shipment.target) for shipment in plan.shipments]
    assert len(set(pairs)) == len(pairs)
    for member in view.members:
        name = member.worker_id
        incoming = [shipment for shipment in plan.shipments if shipment.target == name]
        for key in view.owned_by(member.rank):
            ways = (key in supplied.get(name, ())) + sum(key in one.blocks for one in incoming)
            assert ways + (key in plan.lost_blocks) == 1, (key, name, plan)  # 3
        has_dense = name in holdings and step in holdings[name].snapshots
        assert has_dense + sum(one.has_dense for one in incoming) == 1  # 3
        lost_here = view.owned_by(member.rank) & plan.lost_blocks
        assert plan.restores.get(name, (name, BlockSet())) == (
            name,
            lost_here if durable_step is not None else BlockSet(),
        )
    for member in base.members:  # 4
        name = member.worker_id
        if name in members and name in holdings:
            kept = [key for key in base.owned_by(member.rank) if key in supplied[name]]
            assert all(key in view.owned_by(view.rank_of(name)) for key in kept)


def supply(one: Holdings, step: int) -> set[tuple[str, int]]:
    blocks = set(one.owned) if step in one.snapshots else set()
    return blocks.union(*(copies.blocks for copies in one.copies if step in copies.steps))


def target_reference(
    holdings: Mapping[str, Holdings], base: View, mode: RecoveryMode, durable_step: int | None, floor: int | None
) -> tuple[int, bool]:
    """(target, from a checkpoint), by trying every step."""
    found_steps = set()
    for wants_all, step in itertools.product((True, False), STEPS):
        if (not wants_all and mode is not RecoveryMode.PARTIAL) or (floor is not None and step < floor):
            continue
        needed = {
            key for key in BLOCKS if wants_all or base.members[base.placement[key[0]][key[1]]].worker_id in holdings
        }
        found = set().union(*(supply(one, step) for one in holdings.values()))
        if needed <= found and any(step in one.snapshots for one in holdings.values()):
            counted = {name for name, one in holdings.items() if step in one.snapshots}
            counted |= {name for one in holdings.values() for name, steps in one.aux.items() if step in steps}
            found_steps.add((wants_all, {m.worker_id for m in base.members} <= counted, step))
    durable, best = durable_step or 0, max(found_steps, default=None)
    return (durable, True) if best is None or durable > best[-1] else (best[-1], False)


@st.composite
def cases(draw):
    """Any holdings, sensible or not: what a decision has to cope with in the middle of anything."""
    names = draw(st.permutations(["a1", "b1", "c1", "a2"]))[: draw(st.integers(1, 4))]
    base = view_of(*names)
    following = view_of(*names[: draw(st.integers(1, 4))], "d1", epoch=2, base=base)
    base = draw(st.sampled_from([base, following]))
    everyone = [m.worker_id for m in base.members] + ["x1"]
    living = draw(st.lists(st.sampled_from(everyone), min_size=1, unique=True))
    blocks = st.sets(st.sampled_from(BLOCKS))
    steps = st.sets(st.sampled_from(STEPS)).map(lambda found: tuple(sorted(found)))
    holdings = {}
    for name in sorted(living):
        rank = base.rank_of(name)
        owned = base.owned_by(rank) if rank is not None and draw(st.booleans()) else to_set(draw(blocks))
        copies = [Copies(blocks=to_set(draw(blocks)), steps=draw(steps)) for _ in range(draw(st.integers(0, 2)))]
        if rank is not None and draw(st.booleans()):
            copies.append(Copies(blocks=base.copied_by(rank), steps=draw(steps)))
        holdings[name] = Holdings(
            worker_id=name,
            view=base if rank is not None and draw(st.booleans()) else None,
            applied=draw(st.integers(0, 30)),
            snapshots=draw(steps),
            owned=owned,
            copies=tuple(copies),
            aux={other: draw(steps) for other in everyone if other != name and draw(st.booleans())},
        )
    staying = [name for name in living if draw(st.integers(0, 3))] or living[:1]
    joiners = draw(st.sampled_from([[], ["n1"], ["n1", "n2"]]))
    gone = [m.worker_id for m in base.members if m.worker_id not in staying]
    replaced = dict(zip(joiners, gone)) if draw(st.booleans()) else {}
    return holdings, base, [*staying, *joiners], replaced


def to_set(keys) -> BlockSet:
    grouped: dict[str, list[int]] = {}
    for table, block in keys:
        grouped.setdefault(table, []).append(block)
    return BlockSet.of(grouped)


@settings(max_examples=200, deadline=None)
@given(
    case=cases(),
    mode=st.sampled_from(RecoveryMode),
    durable_step=st.sampled_from([None, 0, 5, 10, 15, 30]),
    floor=st.sampled_from([None, None, 10, 20]),
)
def test_any_holdings_lead_to_the_best_target_and_everybody_there(case, mode, durable_step, floor):
    holdings, base, names, replaced = case
    members = [worker(name) for name in names]
    fields = {"mode": mode, "durable_step": durable_step, "floor": floor, "replaced": replaced}
    decision = recover(list(holdings.values()), base, members, **fields)
    step, is_checkpoint = target_reference(holdings, base, mode, durable_step, floor)
    assert (decision.plan.step, decision.plan.from_checkpoint) == (step, is_checkpoint)  # 1, 2
    assert sorted(m.worker_id for m in decision.view.members) == sorted(names)
    assert decision.redone_steps == max(0, max(one.applied for one in holdings.values()) - step)
    assert mode is RecoveryMode.PARTIAL or not decision.plan.lost_blocks
    check(decision, holdings, base, durable_step)
    assert recover(list(reversed(holdings.values())), base, members, **fields) == decision  # 6


@settings(max_examples=120, deadline=None)
@given(case=cases())
def test_metric_bins_of_every_origin_reach_exactly_one_member(case):
    holdings, base, names, replaced = case
    decision = recover(list(holdings.values()), base, [worker(name) for name in names], replaced=replaced)
    plan = decision.plan
    if plan.from_checkpoint:
        return
    members = [member.worker_id for member in decision.view.members]
    everyone = {member.worker_id for member in base.members} | set(holdings)
    for origin in everyone.union(*(one.aux for one in holdings.values())):
        has_own = origin in holdings and plan.step in holdings[origin].snapshots
        keeps = origin in members and has_own
        found = has_own or any(plan.step in one.aux.get(origin, ()) for one in holdings.values())
        sent = [shipment for shipment in plan.shipments if origin in shipment.aux_of]
        assert len(sent) + keeps == int(found)  # 5
        assert found or base.rank_of(origin) is None or origin in decision.reason
        for shipment in sent:
            heirs = {old: new for new, old in replaced.items()}
            wanted = origin if origin in members else heirs.get(origin, members[0])
            assert shipment.target == wanted  # 5
            has_it = origin == shipment.source or plan.step in holdings[shipment.source].aux[origin]
            assert has_it


@settings(max_examples=100, deadline=None)
@given(data=st.data(), hosts=st.lists(st.sampled_from("abcd"), min_size=2, max_size=7))
def test_losing_one_host_at_a_time_loses_no_protected_step(data, hosts):
    """Promise 5, through a run of losses, replacements and re-protection; the next snapshot may be under way."""
    names = [f"{host}{number}" for number, host in enumerate(hosts)]
    view, protected, num_new = view_of(*names), 10, 0
    for _ in range(data.draw(st.integers(1, 4))):
        if len(set(view.hosts)) < 2:
            return
        lost_host = data.draw(st.sampled_from(sorted(set(view.hosts))))
        staged = {m.worker_id for m in view.members if data.draw(st.booleans())}
        holdings = []
        for member in view.members:
            steps = (protected, protected + 10)
            copies = steps if member.worker_id in staged else steps[:1]
            holdings.append(held(view, member.worker_id, *steps, applied=protected + 15, copies=copies))
        living = [one for one in holdings if view.members[view.rank_of(one.worker_id)].host != lost_host]
        survivors = [worker(one.worker_id) for one in living]
        lost = [m.worker_id for m in view.members if m.host == lost_host]
        joiners = [
            NewMember(worker_id=f"n{num_new + i}", host=data.draw(st.sampled_from("abcd")))
            for i in range(data.draw(st.integers(0, len(lost))))
        ]
        num_new += len(joiners)
        replaced = dict(zip((one.worker_id for one in joiners), lost))
        decision = recover(living, view, survivors + joiners, replaced=replaced, floor=None, durable_step=0)
        assert not decision.plan.from_checkpoint and decision.plan.step >= protected  # 1
        assert not decision.plan.lost_blocks
        check(decision, {one.worker_id: one for one in living}, view, 0)
        view, protected = decision.view, decision.plan.step


# ---- named cases --------------------------------------------------------------------------------------------------

ABC = view_of("a1", "b1", "c1")


def test_nobody_died_and_all_come_back_to_the_newest_common_snapshot():
    holdings = [held(ABC, "a1", 10, 20), held(ABC, "b1", 10, 20), held(ABC, "c1", 10)]
    decision = recover([dataclasses.replace(one, copies=()) for one in holdings], ABC, ABC.members)
    assert decision.plan.step == 10 and not decision.plan.shipments
    assert decision.view.placement == ABC.placement and decision.redone_steps == 15


def test_a_lost_owner_is_answered_for_by_its_buddy():
    holdings = [held(ABC, "a1", 10, 20), held(ABC, "c1", 10, 20)]
    decision = recover(holdings, ABC, [worker("a1"), worker("c1")], durable_step=15)
    buddy = ABC.members[ABC.buddy(1)].worker_id
    assert decision.plan.step == 20
    assert all(not one.blocks for one in decision.plan.shipments)  # 4: promoted where the copies are
    gained = decision.view.owned_by(decision.view.rank_of(buddy))
    assert all(key in gained for key in ABC.owned_by(1))


def test_staged_changes_that_the_lost_owner_never_saw_acknowledged_still_count():
    """The target may be above `protected`: the buddy has staged 20, nobody knows it complete."""
    holdings = [dataclasses.replace(held(ABC, name, 10, 20), protected=10) for name in ("a1", "c1")]
    assert recover(holdings, ABC, [worker("a1"), worker("c1")]).plan.step == 20


def test_a_buddy_that_never_got_the_last_changes_takes_all_back():
    buddy = ABC.members[ABC.buddy(1)].worker_id
    holdings = [held(ABC, name, 10, 20, copies=[10] if name == buddy else None) for name in ("a1", "c1")]
    assert recover(holdings, ABC, [worker("a1"), worker("c1")]).plan.step == 10


def test_a_replacement_gets_rank_rows_dense_state_and_bins_of_the_lost_one():
    holdings = [held(ABC, "a1", 10), held(ABC, "c1", 10)]
    members = [worker("a1"), worker("c1"), worker("n1")]
    decision = recover(holdings, ABC, members, replaced={"n1": "b1"})
    assert decision.view.rank_of("n1") == 1 and decision.view.placement == ABC.placement  # F9
    (shipment,) = decision.plan.shipments
    assert (shipment.source, shipment.target) == (ABC.members[ABC.buddy(1)].worker_id, "n1")
    assert (shipment.blocks, shipment.has_dense, shipment.aux_of) == (ABC.owned_by(1), True, ("b1",))


def test_owner_and_buddy_lost_means_checkpoint_and_is_said():
    first = ABC.members[ABC.buddy(1)].worker_id
    (left,) = {"a1", "c1"} - {first}
    decision = recover([held(ABC, left, 10, 20)], ABC, [worker(left)], durable_step=5)
    assert decision.plan.from_checkpoint and decision.plan.step == 5
    assert "nobody left has" in decision.reason and "checkpoint of step 5" in decision.reason
    assert decision.plan.restores[left] == (left, decision.view.owned_by(0))
    from_start = recover([held(ABC, left, 10, 20)], ABC, [worker(left)])
    assert from_start.plan.step == 0 and from_start.plan.from_checkpoint and not from_start.plan.restores
    assert "there is no checkpoint" in from_start.reason


def test_a_newer_checkpoint_wins_over_an_older_snapshot_but_not_an_equal_one():
    holdings = [held(ABC, name, 10) for name in ("a1", "b1", "c1")]
    assert recover(holdings, ABC, ABC.members, durable_step=20).plan.from_checkpoint
    assert not recover(holdings, ABC, ABC.members, durable_step=10).plan.from_checkpoint


def test_a_second_attempt_never_goes_below_the_first():
    """F4: once 20 was the target, 10 is not taken even if it is all that is left; the checkpoint is."""
    holdings = [held(ABC, name, 10) for name in ("a1", "b1", "c1")]
    decision = recover(holdings, ABC, ABC.members, floor=20, durable_step=5)
    assert decision.plan.from_checkpoint and "earlier attempt" in decision.reason
    raised = [held(ABC, name, 20) for name in ("a1", "b1", "c1")]
    assert recover(raised, ABC, ABC.members, floor=10).plan.step == 20


def test_a_second_failure_in_recovery_finds_the_rows_the_first_attempt_has_moved():
    """b1 died, n1 received its rows and did not get further; then c1 dies too, whose rows a1 keeps copies of or n1."""
    holdings = [held(ABC, "a1", 10, 20)]
    base = ABC
    moved = Copies(blocks=ABC.owned_by(1) | ABC.owned_by(2), steps=(20,))
    holdings.append(Holdings(worker_id="n1", view=None, applied=0, snapshots=(20,), owned=BlockSet(), copies=(moved,)))
    members = [worker("a1"), worker("n1"), worker("m1")]
    decision = recover(holdings, base, members, replaced={"n1": "b1", "m1": "c1"}, floor=20)
    assert decision.plan.step == 20 and not decision.plan.from_checkpoint
    check(decision, {one.worker_id: one for one in holdings}, base, None)
    targets = {shipment.target for shipment in decision.plan.shipments if shipment.blocks}
    assert targets == {"m1"}  # n1 keeps what it has received


def test_some_know_the_next_view_and_the_newest_one_counts():
    """A kill in the middle of a cutover: a1 has completed e+1, b1 has not, the joiner d1 has; a snapshot at 20 is
    everywhere, since it is the cutover's own boundary."""
    before = view_of("a1", "b1")
    after = view_of("a1", "b1", "d1", epoch=2, base=before)
    holdings = [held(after, "a1", 20), held(before, "b1", 20), held(after, "d1", 20)]
    base = newest_view(holdings, before)
    assert base == after
    decision = recover(holdings, base, after.members)
    assert decision.plan.step == 20 and decision.view.placement == after.placement
    check(decision, {one.worker_id: one for one in holdings}, base, None)
    without = recover(holdings[1:], base, after.members[1:])
    check(without, {one.worker_id: one for one in holdings[1:]}, base, None)


def test_a_leaver_that_still_lives_supplies_its_rows():
    before = view_of("a1", "b1")
    after = plan_view(before, 2, [worker("a1")], TABLES, SPEC).view
    holdings = [
        Holdings(worker_id="a1", view=after, applied=20, snapshots=(20,), owned=before.owned_by(0)),
        held(before, "b1", 20),
    ]
    decision = recover(holdings, after, after.members)
    (shipment,) = decision.plan.shipments
    assert (shipment.source, shipment.target, shipment.blocks) == ("b1", "a1", before.owned_by(1))
    assert shipment.aux_of == ("b1",)


def test_bins_that_were_handed_over_are_handed_over_again_and_counted_once():
    """b1 is lost, view 6 is decided without it, and fails at once: a1 has adopted b1's bins, its buddy still keeps them
    too, and the snapshots of 20 hold what each worker counted by itself."""
    first = recover([held(ABC, "a1", 20), held(ABC, "c1", 20)], ABC, [worker("a1"), worker("c1")])
    assert [one.aux_of for one in first.plan.shipments] == [("b1",)]
    view = first.view
    holdings = [dataclasses.replace(held(view, name, 20), aux={"b1": (20,)}) for name in ("a1", "c1")]
    second = recover(holdings, view, view.members, epoch=9, floor=20)
    assert [(one.source, one.target, one.aux_of) for one in second.plan.shipments] == [("a1", "a1", ("b1",))]
    later = [dataclasses.replace(held(view, name, 20, 30), aux={"b1": (20,)}) for name in ("a1", "c1")]
    assert recover(later, view, view.members, epoch=9).plan.shipments == ()  # a snapshot after it has them in a1's own


def test_partial_recovery_takes_only_the_lost_rows_back_and_counts_them():
    spec = dataclasses.replace(SPEC, replicate=False)
    base = plan_view(None, 1, [worker(name) for name in ("a1", "b1", "c1")], TABLES, spec).view
    holdings = {
        name: Holdings(
            worker_id=name, view=base, applied=25, snapshots=(10, 20), owned=base.owned_by(base.rank_of(name))
        )
        for name in ("a1", "c1")
    }
    decision = plan_recovery(
        holdings,
        base,
        [worker("a1"), worker("c1")],
        TABLES,
        spec,
        epoch=2,
        mode=RecoveryMode.PARTIAL,
        durable_step=5,
        make_restore=lambda name, blocks: (name, blocks),
        rows_reported={"b1": 40},
    )
    assert (decision.plan.step, decision.plan.from_checkpoint) == (20, False)
    assert decision.plan.lost_blocks == base.owned_by(1)
    assert decision.rows_lost == 40 and "checkpoint of step 5" in decision.reason
    check(decision, holdings, base, 5)


def test_one_survivor_with_all_copies_goes_on_alone():
    pair = view_of("a1", "b1")
    decision = recover([held(pair, "b1", 10, 20)], pair, [worker("b1")])
    assert decision.view.world_size == 1 and decision.view.buddies == () and decision.plan.step == 20
    assert [one.aux_of for one in decision.plan.shipments] == [("a1",)]


def test_joiners_that_died_leave_no_trace():
    """n1 was to replace b1 and died too: it is in neither holdings nor members."""
    holdings = [held(ABC, "a1", 20), held(ABC, "c1", 20)]
    decision = recover(holdings, ABC, [worker("a1"), worker("c1")], floor=20)
    assert decision.plan.step == 20 and decision.view.rank_of("n1") is None


def test_nobody_is_left_and_new_workers_read_the_checkpoint():
    decision = recover([], ABC, [worker("n1"), worker("n2")], durable_step=20)
    assert decision.plan.from_checkpoint and set(decision.plan.restores) == {"n1", "n2"}
    assert "no survivor has a snapshot" in decision.reason


def test_a_checkpoint_is_read_without_copies_where_memory_holds_none():
    bytes_all = sum(table_bytes(table) for table in TABLES)
    fields = {"epoch": 9, "mode": RecoveryMode.REPLICATED, "durable_step": 5}
    members = [worker("n1"), worker("n2")]
    tight = dataclasses.replace(SPEC, memory_bytes_per_worker=round(bytes_all * 0.7))
    decision = plan_recovery({}, ABC, members, TABLES, tight, **fields)
    assert decision.view.buddies == () and "without copies" in decision.reason  # F5
    with pytest.raises(PlanError):
        plan_recovery({}, ABC, members[:1], TABLES, tight, **fields)


@pytest.mark.parametrize("journalled", [None, view_of("a1", epoch=3)])
def test_the_newest_view_is_what_anybody_knows(journalled):
    holdings = [held(ABC, "a1", 10), dataclasses.replace(held(ABC, "b1", 10), view=None)]
    found = newest_view(holdings, journalled)
    assert found == (journalled or ABC)
    assert newest_view([], None) is None
