"""Steps over tables cut into column blocks equal steps over the uncut tables, and count ids once."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from test_plan import World, make_tables, mixed_features, output_grads, quadratic_loss, random_batch, spread

from shoal.kernels.column_blocks import cut_columns
from shoal.kernels.errors import ConfigError
from shoal.kernels.plan import StepPlan
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import FeatureSpec, IdPolicy, OptimizerKind, TableSpec

#: Of the two tables of these tests.
WIDTHS = [(4, 3, 1), (12,), (5, 7)]


def cut_all(
    tables: list[TableSpec], features: list[FeatureSpec], widths: list[tuple[int, ...]]
) -> tuple[list[TableSpec], list[FeatureSpec]]:
    """The tables' column blocks, and the features that read them."""
    blocks = [cut_columns(table, w) for table, w in zip(tables, widths)]
    first = np.cumsum([0, *map(len, blocks)])
    cut = [
        dataclasses.replace(feature, table=int(first[feature.table]) + block)
        for feature in features
        for block in range(len(blocks[feature.table]))
    ]
    return [block for group in blocks for block in group], cut


def three_tables(kind: OptimizerKind) -> tuple[list[TableSpec], list[FeatureSpec]]:
    tables = make_tables([kind] * 3, [8, 12, 12], [40, 30, 0])
    return tables, [*mixed_features(tables), FeatureSpec(name="g", table=1, collection=0)]


def whole_rows(world: World) -> dict[tuple[str, int], tuple[bytes, ...]]:
    """(logical table, id) -> (weights and elementwise state of all columns, last step, count)."""
    found: dict[tuple[str, int], list] = {}
    for (t, row_id), (weights, slots, last_step, count) in sorted(world.rows().items()):
        spec = world.tables[t]
        row = found.setdefault((spec.logical_name, row_id), [b"", b"", b"", last_step, count])
        assert row[3:] == [last_step, count]
        half = 4 * spec.embedding_dim
        row[0] += weights
        row[1], row[2] = row[1] + slots[:half], row[2] + slots[half:]
    return {key: tuple(row) for key, row in found.items()}


def batches_of(world: World, rng: np.random.Generator, sizes: list[int]) -> list:
    """One batch per rank; the column blocks of a feature read the same ids."""
    tables, features = three_tables(OptimizerKind.SGD)
    return [random_batch(features, tables, size, rng) for size in sizes]


def bind_columns(world: World, features: list[FeatureSpec]) -> World:
    """Features of the plan read the batch's columns by name."""
    names = [feature.name for feature in features]
    world.columns = np.array([names.index(feature.name) for feature in world.features], dtype=np.int32)
    return world


@pytest.mark.parametrize(("world", "num_threads"), [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("kind", [OptimizerKind.SGD, OptimizerKind.ADAGRAD, OptimizerKind.ADAM])
def test_steps_over_column_blocks_have_the_bits_of_the_uncut_tables(kind, world, num_threads):
    tables, features = three_tables(kind)
    uncut = World(tables, features, spread(tables, world, 3), world, num_threads)
    cut_tables, cut_features = cut_all(tables, features, WIDTHS)
    cut = World(cut_tables, cut_features, spread(cut_tables, world, 5), world, num_threads)
    bind_columns(cut, features)
    rng = np.random.default_rng(world)
    for step in range(1, 9):
        batches = batches_of(cut, rng, [int(rng.integers(0, 4)) for _ in range(world)])
        ours, theirs = (w.step(batches, step, quadratic_loss) for w in (cut, uncut))
        for a, b in zip(ours, theirs):
            assert len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))
    assert whole_rows(cut) == whole_rows(uncut)


def test_counts_and_gradients_of_weights_are_those_of_the_uncut_tables():
    tables, features = three_tables(OptimizerKind.SGD)
    features = [dataclasses.replace(f, policy=IdPolicy.DROP) for f in features]
    cut_tables, cut_features = cut_all(tables, features, WIDTHS)
    rng = np.random.default_rng(0)
    batch = batches_of(None, rng, [6])[0]
    batch.values[::7] = 99  # outside the static tables
    results = []
    for world in (
        World(tables, features, spread(tables, 1, 0), 1),
        bind_columns(World(cut_tables, cut_features, spread(cut_tables, 1, 0), 1), features),
    ):
        lookup = world.plans[0].new_lookup()
        route = lookup.route(batch.values, batch.offsets, batch.weights, world.columns, 6)
        counters = lookup.counters()
        counts = [counters[k] for k in ("num_ids", "num_unique", "num_dropped", "num_remapped")]
        nothing = np.zeros(1, dtype=np.int64)
        lookup.resolve(nothing, nothing)
        outputs = lookup.new_outputs()
        lookup.pool(nothing, outputs)
        grads = output_grads(outputs, lambda o: quadratic_loss(0, o))
        results.append((route[:4], counts, lookup.weight_grad(grads)))
    assert results[0][:2] == results[1][:2] and results[0][1][2] > 0
    torch.testing.assert_close(results[0][2], results[1][2], rtol=1e-5, atol=1e-6)


def test_a_bad_id_is_reported_once_for_all_column_blocks():
    tables, features = three_tables(OptimizerKind.SGD)
    cut_tables, cut_features = cut_all(tables, features, WIDTHS)
    world = bind_columns(World(cut_tables, cut_features, spread(cut_tables, 1, 0), 1), features)
    batch = batches_of(world, np.random.default_rng(1), [5])[0]
    batch.values[3] = 777
    result = world.plans[0].new_lookup().route(batch.values, batch.offsets, batch.weights, world.columns, 5)
    assert (result.status, result.bad_value, result.bad_position, result.num_dropped) == (1, 777, 3, 1)
    assert cut_features[result.bad_feature].name == "a"


def test_a_feature_must_read_all_column_blocks_in_order():
    tables, features = three_tables(OptimizerKind.SGD)
    cut_tables, cut_features = cut_all(tables, features, WIDTHS)
    store = RowStore(cut_tables)
    store.add_all_blocks()
    for wrong in (cut_features[1:], cut_features[:2], [cut_features[1], cut_features[0], *cut_features[2:]]):
        with pytest.raises(ConfigError, match="one after the other"):
            StepPlan(store, cut_tables, wrong, spread(cut_tables, 1, 0), rank=0, world_size=1)
