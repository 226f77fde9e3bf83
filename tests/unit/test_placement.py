"""Placement is a pure function with one owner per block; invariants by number."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
