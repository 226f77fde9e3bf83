"""Placement is a pure function with one owner per block; invariants by number."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kernels.column_blocks import cut_columns
from shoal.kernels.errors import PlanError
from shoal.kernels.spec import TableSpec
from shoal.platform.placement import ShardingType, default_num_blocks, plan_placement, table_bytes


def _tables(sizes: list[int]) -> list[TableSpec]:
    return [
        TableSpec(name=f"t{i}", num_embeddings=n, embedding_dim=8, num_blocks=default_num_blocks(n))
        for i, n in enumerate(sizes)
    ]


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 10**6), max_size=8),
    world=st.integers(1, 9),
    table_wise=st.sets(st.integers(0, 7)),
)
def test_every_block_has_one_owner_and_plans_repeat(sizes, world, table_wise):
    tables = _tables(sizes)
    sharding = {f"t{i}": ShardingType.TABLE_WISE for i in table_wise}
    plan = plan_placement(tables, world, sharding=sharding)
    assert plan == plan_placement(tables, world, sharding=sharding)  # invariant 2
    for spec, load in zip(tables, plan):
        assert len(load.owners) == spec.num_blocks and all(0 <= o < world for o in load.owners)  # invariant 1
        counts = [load.owners.count(r) for r in range(world)]
        if load.sharding is ShardingType.TABLE_WISE:
            assert len(set(load.owners)) == 1  # invariant 3
        else:
            held = [c for c in counts if c] if spec.num_blocks < world else counts
            assert max(held) - min(held) <= 1  # invariant 3


def test_impossible_plan_names_table_and_bytes():
    tables = _tables([100, 10**6])
    with pytest.raises(PlanError, match=r"'t1'.*bytes free: worker 0: 1000000, worker 1: 1000000"):
        plan_placement(tables, 2, memory_bytes_per_worker=10**6)  # invariant 4
    assert plan_placement(tables, 2, memory_bytes_per_worker=table_bytes(tables[1]))


def test_small_tables_get_few_blocks_and_dynamic_ones_many():
    assert default_num_blocks(0) == 64 and default_num_blocks(1) == 1 and default_num_blocks(10**9) == 64


HOSTS = ["a", "a", "a", "b", "c", "c"]


def test_column_blocks_of_a_grid_are_on_hosts_of_their_own():
    blocks = cut_columns(TableSpec(name="t", num_embeddings=10**6, embedding_dim=12, num_blocks=64), [4, 4, 4])
    kinds = {block.name: ShardingType.GRID_SHARD for block in blocks}
    plan = plan_placement(blocks, len(HOSTS), sharding=kinds, hosts=HOSTS)
    hosts = [{HOSTS[rank] for rank in table.owners} for table in plan]
    assert sorted(map(sorted, hosts)) == [["a"], ["b"], ["c"]]
    assert all(len(set(table.owners)) == HOSTS.count(min(host)) for table, host in zip(plan, hosts))


def test_column_blocks_of_table_column_wise_share_a_host_with_room_for_all_of_them():
    spec = TableSpec(name="t", num_embeddings=1000, embedding_dim=12)
    blocks = cut_columns(spec, [4, 4, 4])
    kinds = {block.name: ShardingType.TABLE_COLUMN_WISE for block in blocks}
    limit = table_bytes(blocks[0])
    plan = plan_placement(
        blocks, 6, sharding=kinds, hosts=["c", "c", "b", "a", "a", "a"], memory_bytes_per_worker=limit
    )
    assert sorted(table.owners for table in plan) == [(3,), (4,), (5,)]  # invariants 3 and 4
    with pytest.raises(PlanError, match="does not fit"):
        plan_placement(blocks, 2, sharding=kinds, hosts=["a", "b"], memory_bytes_per_worker=2 * limit)


def test_levelling_by_load_leaves_nobody_with_more_bytes_than_the_limit():
    tables = _tables([100, 1000, 1000, 100])
    kinds = {f"t{i}": ShardingType.TABLE_WISE for i in range(4)}
    loads = {"t0": 50.0, "t1": 1.0, "t2": 1.0, "t3": 40.0}
    limit = table_bytes(tables[1]) + table_bytes(tables[0])
    plan = plan_placement(tables, 2, sharding=kinds, loads=loads, memory_bytes_per_worker=limit)
    assert plan[1].owners[0] != plan[2].owners[0] and plan[0].owners[0] != plan[3].owners[0]
    used = [sum(table.bytes_per_worker[rank] for table in plan) for rank in range(2)]
    assert max(used) <= limit  # invariant 4
