"""Routing and the ids message against their references: dedup, order, policies, layout, hostile input (S10)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kernels.errors import ConfigError, ProtocolError
from shoal.kernels.plan import Lookup, RouteResult, StepPlan
from shoal.kernels.route import RouteReference, encode_ids_reference, owner_reference, route_reference
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import FeatureSpec, IdPolicy, PoolingType, TableSpec

HUGE = [0, -1, 2**63 - 1, -(2**63), 1, 2**40, -2]


def make_table(name: str = "t", num_embeddings: int = 100, dim: int = 4, num_blocks: int = 4) -> TableSpec:
    return TableSpec(name=name, num_embeddings=num_embeddings, embedding_dim=dim, num_blocks=num_blocks, init_max=1.0)


def make_feature(table: int = 0, policy: IdPolicy = IdPolicy.DROP, name: str = "f") -> FeatureSpec:
    return FeatureSpec(name=name, table=table, collection=0, policy=policy)


def make_plan(
    tables: list[TableSpec], features: list[FeatureSpec], placement: list[np.ndarray], rank: int, world: int
) -> StepPlan:
    store = RowStore(tables, num_threads=2)
    for t, owners in enumerate(placement):
        for block, owner in enumerate(owners):
            if owner == rank:
                store.add_block(t, block)
    return StepPlan(store, tables, features, placement, rank=rank, world_size=world, num_threads=2)


def spread(tables: list[TableSpec], world: int, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, world, table.num_blocks).astype(np.uint16) for table in tables]


def route(
    plan: StepPlan,
    values: list[int],
    lengths: list[int],
    columns: list[int],
    batch_size: int,
    dtype: torch.dtype = torch.int64,
) -> tuple[Lookup, RouteResult]:
    lookup = plan.new_lookup()
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    result = lookup.route(
        torch.tensor(values, dtype=dtype), offsets, None, np.array(columns, dtype=np.int32), batch_size
    )
    return lookup, result


def sections(lookup: Lookup) -> list[bytes]:
    sizes = lookup.id_bytes()
    buffers = [np.zeros(int(n) + 8, dtype=np.uint8) for n in sizes]
    lookup.write_ids(np.array([b.ctypes.data for b in buffers], dtype=np.int64))
    assert all(not b[int(n) :].any() for b, n in zip(buffers, sizes)), "wrote past the announced size"
    return [b[: int(n)].tobytes() for b, n in zip(buffers, sizes)]


def check(plan: StepPlan, values: list[int], lengths: list[int], columns: list[int], batch_size: int) -> RouteReference:
    lookup, result = route(plan, values, lengths, columns, batch_size)
    offsets = np.array([0, *np.cumsum(lengths).tolist()])
    expected = route_reference(
        np.array(values, dtype=np.int64),
        offsets,
        np.array(columns),
        batch_size,
        plan.tables,
        plan.features,
        plan.placement,
        plan.world_size,
    )
    counters = lookup.counters()
    assert counters["table_unique"].tolist() == [len(ids) for ids in expected.unique]
    assert (result.num_dropped, result.num_remapped) == (expected.num_dropped, expected.num_remapped)
    assert result.status == (expected.bad is not None)
    if expected.bad is not None:
        assert (result.bad_feature, result.bad_value, result.bad_position) == expected.bad
    for rank, section in enumerate(sections(lookup)):
        assert section == (b"" if rank == plan.rank else encode_ids_reference(expected.asked[rank], plan.tables))
    widths = [4 * table.embedding_dim for table in plan.tables]
    assert lookup.row_bytes_in().tolist() == [
        0 if rank == plan.rank else sum(widths[t] for t, _ in asked) for rank, asked in enumerate(expected.asked)
    ]
    return expected


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equals_reference_on_random_batches(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 5))
    num_tables = data.draw(st.integers(1, 4))
    tables = [
        make_table(
            f"t{t}",
            data.draw(st.sampled_from([0, 1, 7, 2**31, 2**31 + 1, 2**40])),
            4 * (t + 1),
            data.draw(st.sampled_from([1, 2, 8])),
        )
        for t in range(num_tables)
    ]
    features = []
    for _ in range(data.draw(st.integers(1, 6))):
        table = data.draw(st.integers(0, num_tables - 1))
        policies = [IdPolicy.ERROR, IdPolicy.DROP] + ([IdPolicy.HASH, IdPolicy.OOV] if tables[table].is_static else [])
        features.append(make_feature(table, data.draw(st.sampled_from(policies))))
    plan = make_plan(
        tables,
        features,
        spread(tables, world, data.draw(st.integers(0, 9))),
        data.draw(st.integers(0, world - 1)),
        world,
    )
    batch_size = data.draw(st.integers(0, 4))
    num_keys = data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=num_keys * batch_size, max_size=num_keys * batch_size))
    ids = st.one_of(st.integers(0, 8), st.sampled_from(HUGE), st.integers(-(2**63), 2**63 - 1))
    values = data.draw(st.lists(ids, min_size=sum(lengths), max_size=sum(lengths)))
    columns = [data.draw(st.integers(-1, num_keys - 1)) for _ in features]
    check(plan, values, lengths, columns, batch_size)


@pytest.mark.parametrize("num_ids", [1, 31, 32, 33, 4096])
def test_duplicates_single_and_distinct_ids(num_ids: int) -> None:
    tables = [make_table(num_embeddings=0)]
    plan = make_plan(tables, [make_feature()], spread(tables, 3), 0, 3)
    for values in ([7] * num_ids, list(range(num_ids)), [i % 5 - 2 for i in range(num_ids)]):
        check(plan, values, [num_ids], [0], 1)


def test_a_lookup_is_reusable_after_larger_and_smaller_batches() -> None:
    tables = [make_table(num_embeddings=0), make_table("u", 1000, 8)]
    plan = make_plan(tables, [make_feature(0), make_feature(1)], spread(tables, 2), 1, 2)
    lookup = plan.new_lookup()
    generator = np.random.default_rng(0)
    for size in (5, 3000, 0, 17):
        values = generator.integers(0, 1000, 2 * size)
        offsets = torch.arange(2 * size + 1)
        lookup.route(torch.from_numpy(values), offsets, None, np.array([0, 1], dtype=np.int32), size)
        expected = [len(np.unique(values[:size])), len(np.unique(values[size:]))]
        assert lookup.counters()["table_unique"].tolist() == expected


def test_int32_and_int64_values_give_the_same_route() -> None:
    tables = [make_table(num_embeddings=0)]
    plan = make_plan(tables, [make_feature()], spread(tables, 2), 0, 2)
    values = [5, -1, 2**31 - 1, -(2**31), 5]
    wide, _ = route(plan, values, [2, 3], [0], 2)
    narrow, _ = route(plan, values, [2, 3], [0], 2, torch.int32)
    assert sections(wide) == sections(narrow)


def test_bad_id_names_the_first_feature_and_position_and_the_batch_stays_usable() -> None:
    tables = [make_table(num_embeddings=10), make_table("u", 5)]
    features = [make_feature(1, IdPolicy.ERROR), make_feature(0, IdPolicy.ERROR)]
    plan = make_plan(tables, features, spread(tables, 2), 0, 2)
    expected = check(plan, [3, 10, 1, 7, 9, -4], [2, 1, 1, 2], [1, 0], 2)
    assert expected.bad == (0, 7, 3)


def test_many_ranks_ask_only_the_owners_that_have_rows() -> None:
    world = 65_535
    tables = [make_table(num_embeddings=0, num_blocks=65_536)]
    placement = [(np.arange(65_536) % world).astype(np.uint16)]
    store = RowStore(tables, num_threads=1)
    for block in np.nonzero(placement[0] == world - 1)[0]:
        store.add_block(0, int(block))
    plan = StepPlan(store, tables, [make_feature()], placement, rank=world - 1, world_size=world)
    values = list(range(50))
    lookup, _ = route(plan, values, [50], [0], 1)
    asked = np.nonzero(lookup.id_bytes())[0].tolist()
    owners = {owner_reference(value, placement[0]) for value in values}
    assert asked == sorted(owners - {world - 1})


def test_offsets_that_leave_the_values_or_descend_are_refused() -> None:
    tables = [make_table()]
    plan = make_plan(tables, [make_feature()], spread(tables, 1), 0, 1)
    lookup = plan.new_lookup()
    columns = np.array([0], dtype=np.int32)
    for offsets in ([0, 2, 5], [0, 3, 2], [-1, 0, 1], [2, 1, 3]):
        with pytest.raises(ValueError, match="offsets"):
            lookup.route(torch.arange(3), torch.tensor(offsets), None, columns, 2)
    with pytest.raises(ValueError, match="column"):
        lookup.route(torch.arange(3), torch.tensor([0, 1, 3]), None, np.array([1], dtype=np.int32), 2)
    with pytest.raises(ValueError, match="int64"):
        lookup.route(torch.zeros(3), torch.tensor([0, 1, 3]), None, columns, 2)


def test_plan_hash_changes_with_everything_that_ranks_must_agree_on() -> None:
    tables = [make_table(), make_table("u")]
    features = [make_feature(0), make_feature(1)]
    base = make_plan(tables, features, spread(tables, 2), 0, 2).hash
    assert make_plan(tables, features, spread(tables, 2), 1, 2).hash == base
    others = [
        make_plan(tables, features, spread(tables, 2, seed=5), 0, 2),
        make_plan(tables, features, spread(tables, 2), 0, 3),
        make_plan(tables, [features[0], make_feature(1, IdPolicy.HASH)], spread(tables, 2), 0, 2),
        make_plan([tables[0], make_table("v")], features, spread(tables, 2), 0, 2),
    ]
    assert len({base, *(plan.hash for plan in others)}) == 5


def test_impossible_plans_are_refused() -> None:
    tables = [make_table(), make_table("dynamic", 0)]
    placement = spread(tables, 1)
    for features in (
        [make_feature(2)],
        [make_feature(1, IdPolicy.HASH)],
        [FeatureSpec(name="s", table=0, collection=0, pooling=PoolingType.NONE, is_weighted=True)],
    ):
        with pytest.raises(ConfigError):
            make_plan(tables, features, placement, 0, 1)
    with pytest.raises(ConfigError, match="placed on rank"):
        make_plan(tables, [make_feature()], [placement[0] + np.uint16(3), placement[1]], 0, 1)


# --- the owner's reading of sections: nothing a peer sends may be trusted -------------------------------------------


def owner_plan() -> StepPlan:
    tables = [
        make_table("a", 100, num_blocks=1),
        make_table("b", 0, num_blocks=1),
        make_table("c", 100, num_blocks=1),
        make_table("d", 50, num_blocks=2),
    ]
    placement = [np.zeros(1, np.uint16), np.zeros(1, np.uint16), np.ones(1, np.uint16), np.array([0, 1], np.uint16)]
    return make_plan(tables, [make_feature(t) for t in range(4)], placement, 0, 2)


def receive(plan: StepPlan, section: bytes) -> Lookup:
    lookup, _ = route(plan, [], [0] * 4, [0, 1, 2, 3], 1)
    buffer = np.frombuffer(section + b"\xee" * 64, dtype=np.uint8)
    lookup.resolve(np.array([0, buffer.ctypes.data], np.int64), np.array([0, len(section)], np.int64))
    return lookup


def words(*values: int) -> bytes:
    return np.array(values, dtype="<u4").tobytes()


def test_a_sound_section_is_resolved() -> None:
    plan = owner_plan()
    lookup = receive(plan, words(0xFFFFFFFF, 3, 1, 0, 0, 0) + words(1, 2, 3, 0) + np.array([-9]).tobytes())
    assert lookup.row_bytes_out().tolist() == [0, 4 * 16]
    assert lookup.counters()["table_served"].tolist() == [3, 1, 0, 0]


D0 = next(i for i in range(50) if owner_reference(i, [0, 1]) == 1)
HOSTILE = {
    "cut short": words(1),
    "no room for counts": words(0xFFFFFFFF, 0),
    "more pairs than bytes": words(0x40000000, 0, 1, 0),
    "counts beyond the bytes": words(1, 0, 0xFFFFFFFF, 0),
    "count one too many": words(1, 0, 3, 0) + words(1, 2),
    "bytes left over": words(1, 0, 2, 0) + words(1, 2) + words(0, 0),
    "unknown table": words(1, 9, 1, 0) + words(1, 0),
    "tables descend": words(2, 1, 1, 0, 1, 0) + words(1, 0) * 2,
    "listed table without ids": words(1, 0, 0, 0),
    "id outside a static table": words(1, 0, 1, 0) + words(100, 0),
    "negative id of a static table": words(1, 0, 1, 0) + words(0xFFFFFFFF, 0),
    "table of another rank": words(1, 2, 1, 0) + words(1, 0),
    "block of another rank": words(1, 3, 1, 0) + words(D0, 0),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_section_raises_a_typed_error_and_reserves_nothing(name: str) -> None:
    plan = owner_plan()
    with pytest.raises(ProtocolError, match="rank 1"):
        receive(plan, HOSTILE[name])
    assert sum(plan.store.num_rows(t) for t in range(4)) == 0


def test_the_errors_of_another_native_module_do_not_take_over_ours() -> None:
    # All nanobind modules of a process share their exception translators, and the youngest is asked first.
    code = """
import shoal.kernels._core, shoal.kernels._arrow, shoal.kernels._shm, sys
sys.path.insert(0, sys.argv[1])
import test_route
test_route.test_hostile_section_raises_a_typed_error_and_reserves_nothing("cut short")
"""
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent)], check=True, timeout=120)


@settings(max_examples=200, deadline=None)
@given(section=st.binary(max_size=80))
def test_random_bytes_never_crash(section: bytes) -> None:
    plan = owner_plan()
    with contextlib.suppress(ProtocolError):
        receive(plan, section)
