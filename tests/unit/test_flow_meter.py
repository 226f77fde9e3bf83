"""What a run measures of its flows: counts as a plain loop makes them, bytes by the rule, advice (DESIGN 4)."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import test_row_exchange as ranks_of
from test_plan import random_batch

from shoal.actors.flow_meter import count_flows, flow_costs
from shoal.actors.messages import FlowCost
from shoal.kernels.flow_rule import FlowCounts, flow_bytes
from shoal.kernels.hashing import row_blocks
from shoal.kernels.plan import Lookup, StepPlan
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import Codec, FeatureSpec, Flow, TableSpec, WireCodecs
from shoal.platform.flow_advice import advise_flows

_COLUMNS = np.arange(4, dtype=np.int32)


def _lookup(rng: np.random.Generator, codecs: list[WireCodecs] | None = None) -> tuple[Lookup, list[np.ndarray]]:
    """A routed batch on rank 0 of 3, which owns nothing, with its placement."""
    tables = ranks_of._tables()
    placement = [rng.integers(1, 3, 8).astype(np.uint16) for _ in tables]
    plan = StepPlan(RowStore(tables), tables, ranks_of._FEATURES, placement, rank=0, world_size=3, codecs=codecs)
    lookup = plan.new_lookup()
    batch = random_batch(ranks_of._FEATURES, tables, 40, rng)
    lookup.route(batch.values, batch.offsets, batch.weights, _COLUMNS, batch.batch_size)
    lookup.batch = batch  # type: ignore[attr-defined]
    return lookup, placement


@pytest.mark.parametrize("seed", [1, 2])
def test_counts_are_those_of_a_plain_loop(seed: int) -> None:
    lookup, placement = _lookup(np.random.default_rng(seed))
    expected = np.zeros((3, 4), np.int64)
    unique: list[set[int]] = [set(), set(), set()]
    for f, feature in enumerate(ranks_of._FEATURES):
        ids, _, lengths = lookup.batch.column(f)  # type: ignore[attr-defined]
        for bag in torch.split(ids, lengths.tolist()):
            blocks = row_blocks(bag.numpy(), 8)
            owners = placement[feature.table][blocks]
            unique[feature.table] |= set(bag.tolist())
            expected[feature.table, 1:] += [len(bag), len(set(blocks.tolist())), len(set(owners.tolist()))]
    expected[:, 0] = [len(ids) for ids in unique]
    np.testing.assert_array_equal(lookup.flow_counts(), expected)


@pytest.mark.parametrize("flow", [Flow.POOLED, Flow.POOLED_BY_OWNER])
def test_partial_sums_that_are_counted_are_those_that_travel(flow: Flow) -> None:
    codecs = [WireCodecs(Codec.FP32, Codec.FP32, flow)] * 2 + [WireCodecs()]
    lookup, _ = _lookup(np.random.default_rng(3), codecs)
    counts = lookup.flow_counts()
    column = 2 if flow is Flow.POOLED else 3
    dims = [table.embedding_dim for table in ranks_of._tables()]
    rows = int(counts[2, 0]) * dims[2]
    assert int(lookup.row_bytes_in().sum()) == 4 * (rows + sum(int(counts[t, column]) * dims[t] for t in (0, 1)))


def test_costs_are_by_the_rule_and_name_what_cannot_be_pooled() -> None:
    lookup, _ = _lookup(np.random.default_rng(4), [WireCodecs(Codec.INT8, Codec.BF16)] * 3)
    counts = lookup.flow_counts()
    costs = flow_costs(lookup.plan, count_flows(lookup.plan, [lookup, lookup]))
    # "static" has a weighted feature, whose weights may be learned; "words" is a sequence.
    assert {table: cost.pooled_bytes is None for table, cost in costs.items()} == {
        "static": True, "dynamic": False, "words": True,
    }  # fmt: skip
    wire = WireCodecs(Codec.INT8, Codec.BF16)
    found = FlowCounts(*(2.0 * counts[1, :3]))
    assert costs["dynamic"] == FlowCost(
        "rows", flow_bytes(Flow.ROWS, found, 5, wire), flow_bytes(Flow.POOLED, found, 5, wire)
    )
    assert costs["dynamic"].bytes_now == costs["dynamic"].rows_bytes
    assert flow_costs(lookup.plan, []) == {}


def test_column_blocks_count_under_their_logical_table() -> None:
    from shoal.kernels.column_blocks import cut_columns

    tables = cut_columns(TableSpec(name="t", num_embeddings=50, embedding_dim=16, num_blocks=1), [8, 8])
    features = [FeatureSpec(name="f", table=t, collection=0) for t in range(2)]
    costs = []
    for specs in (tables, [TableSpec(name="t", num_embeddings=50, embedding_dim=16, num_blocks=1)]):
        plan = StepPlan(
            RowStore(specs), specs, features[: len(specs)], [np.ones(1, np.uint16)] * len(specs), rank=0, world_size=2
        )
        lookup = plan.new_lookup()
        values, offsets = torch.arange(30) % 20, torch.arange(0, 31, 3)
        lookup.route(values, offsets, None, np.zeros(len(specs), np.int32), 10)
        costs.append(flow_costs(plan, count_flows(plan, [lookup])))
    (blocks,), (whole,) = (cost.values() for cost in costs)
    # Ids and what bags they are in are told to the owner of each block.
    assert blocks.rows_bytes - whole.rows_bytes == 20 * 8
    assert blocks.pooled_bytes is not None and whole.pooled_bytes is not None
    assert blocks.pooled_bytes - whole.pooled_bytes == 20 * 8 + 4 * 30 + 4 * 10


def test_advice_is_for_tables_with_much_to_gain_the_greatest_first() -> None:
    costs = {
        "some": FlowCost("rows", 1000.0, 700.0),
        "most": FlowCost("pooled", 100.0, 2000.0),
        "little": FlowCost("rows", 1000.0, 900.0),
        "small": FlowCost("rows", 50.0, 5.0),
        "sequence": FlowCost("rows", 1000.0, None),
    }
    advice = advise_flows(costs)
    assert [(found.table, found.flow) for found in advice] == [("most", "rows"), ("some", "pooled")]
    assert advice[0].reason == "flow rows would take 95% fewer bytes of rows and gradients"
    assert advise_flows({}) == () and advise_flows({"empty": FlowCost("rows", 0.0, 0.0)}) == ()
