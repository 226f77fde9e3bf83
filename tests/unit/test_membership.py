"""Views: ranks, placement and buddies through any sequence of changes; invariants by number."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.actors.messages import BlockSet, View
from shoal.kernels.column_blocks import cut_columns
from shoal.kernels.errors import PlanError
from shoal.kernels.spec import TableSpec
from shoal.platform.membership import NewMember, ViewSpec, count_moves, failover_view, needs_rebalance, plan_view
from shoal.platform.placement import ShardingType, default_num_blocks, table_bytes

SPEC = ViewSpec(run="r", replicate=True)


def tables_of(*sizes: int) -> list[TableSpec]:
    return [
        TableSpec(name=f"t{i}", num_embeddings=n, embedding_dim=8, num_blocks=default_num_blocks(n))
        for i, n in enumerate(sizes)
    ]


def member(name: str) -> NewMember:
    """``c@B``: worker c on host B."""
    worker, host = name.split("@")
    return NewMember(worker_id=worker, host=host, address=f"{host}:{worker}")


def members(*names: str) -> list[NewMember]:
    return [member(name) for name in names]


def ids(view: View) -> list[str]:
    return [m.worker_id for m in view.members]


def check_view(view: View, wanted: list[NewMember], tables: list[TableSpec], spec: ViewSpec) -> None:
    assert sorted(ids(view)) == sorted(m.worker_id for m in wanted)  # 1
    assert [m.rank for m in view.members] == list(range(len(wanted)))  # 1
    assert sum(view.shares) == pytest.approx(1) and len(set(view.shares)) == 1  # 1
    assert {(m.worker_id, m.host, m.address) for m in view.members} == {
        (m.worker_id, m.host, m.address) for m in wanted
    }
    for table in tables:
        owners = view.placement[table.name]
        assert len(owners) == table.num_blocks and set(owners) <= set(range(view.world_size))  # 3
    assert len(view.buddies) == (view.world_size if spec.replicate and view.world_size > 1 else 0)  # 5
    for rank, buddy in enumerate(view.buddies):
        assert buddy != rank and (len(set(view.hosts)) == 1 or view.hosts[buddy] != view.hosts[rank])  # 5


def check_counts(view: View, tables: list[TableSpec], sharding: dict[str, ShardingType]) -> None:
    hosts_of = {}
    for table in tables:
        kind = sharding.get(table.name, ShardingType.ROW_WISE)
        counts = Counter(view.placement[table.name])
        hosts = {view.hosts[rank] for rank in counts}
        if kind.is_host_bound:
            assert len(hosts) == 1  # 3
            if kind is not ShardingType.GRID_SHARD:
                assert hosts_of.setdefault(table.logical_name, hosts) == hosts  # 3
        if kind.is_whole:
            assert len(counts) == 1  # 3
        else:
            ranks = [r for r in range(view.world_size) if not kind.is_host_bound or view.hosts[r] in hosts]
            every = [counts[rank] for rank in ranks]
            assert max(every) - min(every) <= 1  # 3


@st.composite
def changes(draw):
    """A first world and a sequence of next ones: some stay, some leave, some join."""
    names, worlds = 0, []
    current: list[NewMember] = []
    for _ in range(draw(st.integers(2, 6))):
        keep = [m for m in current if draw(st.integers(0, 3))]
        joining = draw(st.integers(0 if keep else 1, 4))
        hosts = [draw(st.sampled_from("ABC")) for _ in range(joining)]
        new = [NewMember(worker_id=f"w{names + i}", host=host) for i, host in enumerate(hosts)]
        names += joining
        current = draw(st.permutations(keep + new))
        worlds.append(current)
    return worlds


@settings(max_examples=150, deadline=None)
@given(
    worlds=changes(),
    sizes=st.lists(st.sampled_from([0, 1, 300, 600, 5000, 100_000, 10**6]), min_size=1, max_size=5),
    kinds=st.lists(st.sampled_from(ShardingType), min_size=5, max_size=5),
    replicate=st.booleans(),
)
def test_any_sequence_of_planned_changes_keeps_the_invariants(worlds, sizes, kinds, replicate):
    tables, sharding = [], {}
    for spec, kind in zip(tables_of(*sizes), kinds):
        blocks = cut_columns(spec, [4, 4]) if kind.cuts_columns else [spec]
        tables += blocks
        sharding |= {block.name: kind for block in blocks}
    spec = dataclasses.replace(SPEC, replicate=replicate, sharding=sharding)
    view = None
    for epoch, world in enumerate(worlds):
        plan = plan_view(view, epoch, world, tables, spec)
        check_view(plan.view, world, tables, spec)
        check_counts(plan.view, tables, sharding)
        if view is not None:
            before, after = ids(view), ids(plan.view)
            stayed = [w for w in before if w in after]
            assert [w for w in after if w in before] == stayed  # 1
            if len(after) - len(stayed) >= len(before) - len(stayed):
                assert all(after.index(w) == before.index(w) for w in stayed)  # 2
            elif stayed:
                assert after[0] in stayed  # 2
            assert plan.moves == count_moves(view, plan.view, tables)
        again = plan_view(plan.view, epoch + 1, world, tables, spec)
        assert not again.moves and again.view.buddies == plan.view.buddies  # 4
        assert needs_rebalance(plan.view, tables, spec) is None  # 4
        view = plan.view


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 4), (2, 4), (4, 8), (3, 2), (4, 3), (4, 2), (8, 3)])
def test_as_few_row_wise_blocks_move_as_the_counts_allow(before, after):
    """4: 2 -> 3 moves a third; nothing moves between survivors."""
    tables = tables_of(10**6, 10**6)
    base = plan_view(None, 0, members(*(f"w{i}@h{i}" for i in range(before))), tables, SPEC).view
    plan = plan_view(base, 1, members(*(f"w{i}@h{i}" for i in range(after))), tables, SPEC)
    for table in tables:
        pairs = [(old, new) for old, new in zip(base.placement[table.name], plan.view.placement[table.name])]
        moved = [(old, new) for old, new in pairs if old != new]
        if after > before:
            assert all(new >= before for _, new in moved)
            fewest = sum(-(-64 // after) if rank < 64 % after else 64 // after for rank in range(before, after))
            assert len(moved) <= fewest + (after - before)
        else:
            assert all(old >= after for old, _ in moved)
            assert len(moved) == sum(old >= after for old, _ in pairs)


def test_a_replacement_takes_the_lost_rank_and_its_blocks():
    tables = tables_of(10**6, 300, 1)
    base = plan_view(None, 0, members("a@A", "b@B", "c@C"), tables, SPEC).view
    plan = plan_view(base, 1, members("c@C", "x@A", "b@B", "y@D"), tables, SPEC, replaced={"y": "a"})
    assert ids(plan.view) == ["y", "b", "c", "x"]  # 2
    plan = plan_view(base, 1, members("n@B", "a@A", "c@C"), tables, SPEC)
    assert ids(plan.view) == ["a", "n", "c"]  # 2: a joiner fills the free rank without being told
    assert plan.view.placement == base.placement and plan.view.buddies == base.buddies
    assert plan.moves.receives == {"n": base.held_by(1)}


def test_a_loss_without_replacement_closes_up_the_ranks():
    base = plan_view(None, 0, members("a@A", "b@B", "c@C", "d@D"), tables_of(5000), SPEC).view
    plan = plan_view(base, 1, members("d@D", "b@B"), tables_of(5000), SPEC)
    assert ids(plan.view) == ["b", "d"] and plan.view.shares == (0.5, 0.5)
    mixed = plan_view(base, 1, members("x@A", "b@B", "d@D"), tables_of(5000), SPEC)
    assert ids(mixed.view) == ["b", "x", "d"]  # 2: rank 0 stays with a survivor


def test_blocks_of_a_leaver_go_to_who_has_copies_of_them_where_counts_allow():
    tables = tables_of(10**6)
    base = plan_view(None, 0, members("a@A", "b@B", "c@C", "d@D"), tables, SPEC).view
    plan = plan_view(base, 1, members("a@A", "b@B", "c@C"), tables, SPEC)
    gained = plan.view.owned_by(base.buddy(3)) - base.owned_by(base.buddy(3))
    assert gained and all(key in base.copied_by(base.buddy(3)) for key in gained)


def test_a_whole_table_of_a_leaver_goes_to_who_has_its_copy():
    tables = tables_of(1000)
    spec = dataclasses.replace(SPEC, sharding={"t0": ShardingType.TABLE_WISE})
    base = plan_view(None, 0, members("a@A", "b@B", "c@C"), tables, spec).view
    owner = base.placement["t0"][0]
    buddy = base.members[base.buddy(owner)].worker_id
    staying = [m for m in base.members if m.rank != owner]
    plan = plan_view(base, 1, staying, tables, spec)
    assert plan.view.members[plan.view.placement["t0"][0]].worker_id == buddy
    # Only the new copy of it moves.
    assert plan.moves.num_blocks == tables[0].num_blocks


def test_memory_limit_counts_the_copies():
    tables = tables_of(1_000_000)
    half = table_bytes(tables[0]) // 2
    world = members("a@A", "b@B")
    plan_view(None, 0, world, tables, dataclasses.replace(SPEC, memory_bytes_per_worker=2 * half))
    with pytest.raises(PlanError, match=r"copies for others.*run.failure.recovery"):
        plan_view(None, 0, world, tables, dataclasses.replace(SPEC, memory_bytes_per_worker=2 * half - 1))
    alone = dataclasses.replace(SPEC, replicate=False, memory_bytes_per_worker=half)
    base = plan_view(None, 0, world, tables, alone).view
    with pytest.raises(PlanError, match="'t0' does not fit"):
        plan_view(base, 1, world[:1], tables, alone)


def test_memory_limit_makes_room_where_staying_would_not_fit():
    """Two whole tables on one worker and a limit that only an even placement keeps."""
    tables = tables_of(1000, 1000)
    sharding = {"t0": ShardingType.TABLE_WISE, "t1": ShardingType.TABLE_WISE}
    spec = ViewSpec(run="r", sharding=sharding, memory_bytes_per_worker=table_bytes(tables[0]))
    piled = plan_view(None, 0, members("a@A", "b@B"), tables, dataclasses.replace(spec, memory_bytes_per_worker=None))
    piled = dataclasses.replace(piled.view, placement={"t0": (0,) * 2, "t1": (0,) * 2})
    spread = plan_view(piled, 1, members("a@A", "b@B"), tables, spec).view
    assert {spread.placement["t0"][0], spread.placement["t1"][0]} == {0, 1}


def test_a_table_that_recovery_took_off_its_host_is_a_reason_to_rebalance():
    tables = tables_of(1000)
    spec = dataclasses.replace(SPEC, sharding={"t0": ShardingType.TABLE_ROW_WISE})
    world = members("a@A", "b@A", "c@B", "d@B")
    view = plan_view(None, 0, world, tables, spec).view
    assert needs_rebalance(view, tables, spec) is None
    astray = dataclasses.replace(view, placement={"t0": (0, 2)})
    assert needs_rebalance(astray, tables, spec) == "1 tables belong on one host each, 't0' the first of them"
    after = plan_view(astray, 1, world, tables, spec).view
    assert {after.hosts[rank] for rank in after.placement["t0"]} == {"A"}


def test_loads_are_evened_out_instead_of_bytes_where_they_are_known():
    tables = tables_of(1000, 1000, 1000, 1000)
    kinds = {f"t{i}": ShardingType.TABLE_WISE for i in range(4)}
    spec = dataclasses.replace(SPEC, sharding=kinds, loads={"t0": 3.0, "t1": 1.0, "t2": 1.0, "t3": 1.0})
    view = plan_view(None, 0, members("a@A", "b@B"), tables, spec).view
    busy = view.placement["t0"][0]
    assert [view.placement[f"t{i}"][0] for i in (1, 2, 3)] == [1 - busy] * 3
    assert needs_rebalance(view, tables, spec) is None


# ---- after a loss -------------------------------------------------------------------------------------------------


def holders_in(view: View, living: set[str]):
    """Every living worker of ``view`` brings what it holds in it."""

    def holders(table: str, block: int) -> list[str]:
        owner = view.placement[table][block]
        ranks = [owner, *([view.buddies[owner]] if view.buddies else [])]
        return [view.members[rank].worker_id for rank in ranks if view.members[rank].worker_id in living]

    return holders


@settings(max_examples=150, deadline=None)
@given(hosts=st.lists(st.sampled_from("ABC"), min_size=2, max_size=6), lost=st.data(), num_new=st.integers(0, 2))
def test_failover_moves_only_what_lost_its_owner(hosts, lost, num_new):
    tables = tables_of(100_000, 300, 1)
    world = [NewMember(worker_id=f"w{i}", host=host) for i, host in enumerate(hosts)]
    base = plan_view(None, 0, world, tables, SPEC).view
    gone = lost.draw(st.sets(st.sampled_from([m.worker_id for m in world]), max_size=len(world) - 1))
    living = {m.worker_id for m in world} - gone
    joiners = [NewMember(worker_id=f"n{i}", host="Z") for i in range(min(num_new, len(gone)))]
    replaced = dict(zip((m.worker_id for m in joiners), sorted(gone)))
    survivors = [m for m in world if m.worker_id in living]
    holders = holders_in(base, living)
    plan = failover_view(base, 1, survivors + joiners, tables, SPEC, holders=holders, replaced=replaced)
    check_view(plan.view, survivors + joiners, tables, SPEC)
    heirs = {old: new for new, old in replaced.items()}
    for table, block in BlockSet.of({t.name: range(t.num_blocks) for t in tables}):
        before = base.members[base.placement[table][block]].worker_id
        after = plan.view.members[plan.view.placement[table][block]].worker_id
        if before in living:
            assert after == before  # 6
        elif before in heirs:
            assert after == heirs[before]  # 6
        elif holders(table, block):
            assert after in holders(table, block)  # 6


def test_a_shrunk_view_asks_to_be_evened_out_and_is_then_at_rest():
    tables = tables_of(10**6)
    base = plan_view(None, 0, members("a@A", "b@B", "c@C"), tables, SPEC).view
    shrunk = failover_view(base, 1, members("a@A", "b@B"), tables, SPEC, holders=holders_in(base, {"a", "b"})).view
    assert "times the mean" in (needs_rebalance(shrunk, tables, SPEC) or "")
    even = plan_view(shrunk, 2, shrunk.members, tables, SPEC).view
    check_counts(even, tables, {})
    assert needs_rebalance(even, tables, SPEC) is None
    bare = dataclasses.replace(even, buddies=())
    assert "copies of 2 workers" in (needs_rebalance(bare, tables, SPEC) or "")
    moved = dataclasses.replace(even, placement={"t0": (1, *even.placement["t0"][1:])})
    assert needs_rebalance(moved, tables, SPEC) is None  # one block that somebody has moved is no reason


def test_an_owner_that_lags_gives_its_block_to_who_has_it():
    """A cutover broke off: the joiner owns the block in the decided view, the old owner alone has its rows."""
    tables = tables_of(600)
    base = plan_view(None, 0, members("a@A", "b@B"), tables, SPEC).view
    plan = failover_view(base, 1, members("a@A", "b@B"), tables, SPEC, holders=lambda table, block: ["a"])
    assert set(base.placement["t0"]) == {0, 1}
    assert set(plan.view.placement["t0"]) == {0}


def test_copies_are_given_up_where_memory_does_not_hold_them_after_a_loss():
    tables = tables_of(1_000_000)
    spec = dataclasses.replace(SPEC, memory_bytes_per_worker=table_bytes(tables[0]))
    base = plan_view(None, 0, members("a@A", "b@B", "c@C"), tables, spec).view
    plan = failover_view(base, 1, members("a@A", "b@B"), tables, spec, holders=holders_in(base, {"a", "b"}))
    assert plan.view.buddies == () or "copies" not in plan.reason
    tight = dataclasses.replace(spec, memory_bytes_per_worker=table_bytes(tables[0]) - 1)
    plan = failover_view(base, 1, members("a@A", "b@B"), tables, tight, holders=holders_in(base, {"a", "b"}))
    assert plan.view.buddies == () and "without copies" in plan.reason  # F5: degraded, and said so
