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
from shoal.kernels.errors import ConfigError, ProtocolError
from shoal.kernels.plan import StepPlan
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import DataType, FeatureSpec, IdPolicy, OptimizerKind, TableSpec, WeightDecayMode

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


def batches_of(rng: np.random.Generator, sizes: list[int]) -> list:
    """One batch per rank; the column blocks of a feature read the same ids."""
    tables, features = three_tables(OptimizerKind.SGD)
    return [random_batch(features, tables, size, rng) for size in sizes]


class ColumnWorld(World):
    """A World over tables cut into columns; ``features``: of the uncut tables, whose order the batches have."""

    def __init__(
        self, tables: list[TableSpec], features: list[FeatureSpec], widths, world: int, seed: int, num_threads: int = 1
    ) -> None:
        blocks, cut = cut_all(tables, features, widths)
        super().__init__(blocks, cut, spread(blocks, world, seed), world, num_threads)
        names = [feature.name for feature in features]
        self.columns = np.array([names.index(feature.name) for feature in cut], dtype=np.int32)

    def apply(self, rounds, step: int, lr: float | None = None) -> None:
        super().apply(rounds, step, lr)
        if not self.plans[0].shares_statistics:
            return
        received, sizes, _keep = self._exchange(
            [plan.statistic_bytes_out for plan in self.plans], lambda r, to: self.plans[r].write_statistics(to)
        )
        lrs = np.array([table.optimizer.lr if lr is None else lr for table in self.tables], dtype=np.float32)
        for rank, plan in enumerate(self.plans):
            assert sizes[rank].tolist() == plan.statistic_bytes_in.tolist()
            plan.apply_shared(received[rank], step, lrs)


@pytest.mark.parametrize(("world", "num_threads"), [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("kind", [OptimizerKind.SGD, OptimizerKind.ADAGRAD, OptimizerKind.ADAM])
def test_steps_over_column_blocks_have_the_bits_of_the_uncut_tables(kind, world, num_threads):
    tables, features = three_tables(kind)
    uncut = World(tables, features, spread(tables, world, 3), world, num_threads)
    cut = ColumnWorld(tables, features, WIDTHS, world, 5, num_threads)
    rng = np.random.default_rng(world)
    for step in range(1, 9):
        batches = batches_of(rng, [int(rng.integers(0, 4)) for _ in range(world)])
        ours, theirs = (w.step(batches, step, quadratic_loss) for w in (cut, uncut))
        for a, b in zip(ours, theirs):
            assert len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))
    assert whole_rows(cut) == whole_rows(uncut)


def test_counts_and_gradients_of_weights_are_those_of_the_uncut_tables():
    tables, features = three_tables(OptimizerKind.SGD)
    features = [dataclasses.replace(f, policy=IdPolicy.DROP) for f in features]
    rng = np.random.default_rng(0)
    batch = batches_of(rng, [6])[0]
    batch.values[::7] = 99  # outside the static tables
    results = []
    for world in (
        World(tables, features, spread(tables, 1, 0), 1),
        ColumnWorld(tables, features, WIDTHS, 1, 0),
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
    world = ColumnWorld(tables, features, WIDTHS, 1, 0)
    batch = batches_of(np.random.default_rng(1), [5])[0]
    batch.values[3] = 777
    result = world.plans[0].new_lookup().route(batch.values, batch.offsets, batch.weights, world.columns, 5)
    assert (result.status, result.bad_value, result.bad_position, result.num_dropped) == (1, 777, 3, 1)
    assert world.features[result.bad_feature].name == "a"


def test_a_feature_must_read_all_column_blocks_in_order():
    tables, features = three_tables(OptimizerKind.SGD)
    cut_tables, cut_features = cut_all(tables, features, WIDTHS)
    store = RowStore(cut_tables)
    store.add_all_blocks()
    for wrong in (cut_features[1:], cut_features[:2], [cut_features[1], cut_features[0], *cut_features[2:]]):
        with pytest.raises(ConfigError, match="one after the other"):
            StepPlan(store, cut_tables, wrong, spread(cut_tables, 1, 0), rank=0, world_size=1)


def run(world: World, num_steps: int, seed: int = 0, *, num_lookups: int = 1) -> World:
    rng = np.random.default_rng(seed)
    for step in range(1, num_steps + 1):
        rounds = []
        for _ in range(num_lookups):
            batches = batches_of(rng, [int(rng.integers(0, 4)) for _ in range(world.world)])
            lookups, outputs = world.forward(batches)
            grads = [output_grads(outputs[r], lambda o, r=r: quadratic_loss(r, o)) for r in range(world.world)]
            rounds.append((lookups, *world.backward(lookups, grads)))
        world.apply([(lookups, received) for lookups, received, _keep in rounds], step)
    return world


def rowwise_tables(**optimizer) -> tuple[list[TableSpec], list[FeatureSpec]]:
    tables, features = three_tables(OptimizerKind.ROWWISE_ADAGRAD)
    specs = [dataclasses.replace(t, optimizer=dataclasses.replace(t.optimizer, **optimizer)) for t in tables]
    return specs, features


def rowwise_state(world: World) -> dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]:
    """(logical table, id) -> (weights of all columns, the statistic, which all column blocks must hold alike)."""
    found: dict[tuple[str, int], tuple[bytes, bytes]] = {}
    for (t, row_id), (weights, slots, _, _) in sorted(world.rows().items()):
        key = (world.tables[t].logical_name, row_id)
        before, statistic = found.get(key, (b"", slots))
        assert statistic == slots, key
        found[key] = (before + weights, slots)
    return {key: (np.frombuffer(w, "f4"), np.frombuffer(s, "f4")) for key, (w, s) in found.items()}


@pytest.mark.parametrize("decay", list(WeightDecayMode))
@pytest.mark.parametrize(("world", "num_threads"), [(1, 1), (2, 2), (3, 1), (4, 1)])
def test_row_wise_adagrad_over_column_blocks_equals_the_uncut_table(world, num_threads, decay):
    """S7: 1e-5 relative after 50 steps, weights and the statistic."""
    tables, features = rowwise_tables(weight_decay=0.1, weight_decay_mode=decay)
    uncut = rowwise_state(run(World(tables, features, spread(tables, world, 3), world, num_threads), 50))
    cut = rowwise_state(run(ColumnWorld(tables, features, WIDTHS, world, 5, num_threads), 50))
    assert cut.keys() == uncut.keys()
    for key, (weights, statistic) in uncut.items():
        np.testing.assert_allclose(cut[key][0], weights, rtol=1e-5, atol=2e-6, err_msg=str(key))
        np.testing.assert_allclose(cut[key][1], statistic, rtol=1e-5, err_msg=str(key))


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.BF16])
def test_placement_of_column_blocks_leaves_no_trace_in_row_wise_state(data_type):
    """S5: sums of squares are added in block order, whoever owns the blocks; also with several lookups a step."""
    tables, features = rowwise_tables()
    tables = [dataclasses.replace(table, data_type=data_type) for table in tables]
    worlds = [ColumnWorld(tables, features, WIDTHS, 3, seed) for seed in (0, 1, 2)]
    first, *others = [run(world, 8, num_lookups=2).rows() for world in worlds]
    assert all(rows == first for rows in others)


def test_a_statistic_of_its_own_depends_on_the_cut():
    tables, features = rowwise_tables()
    world = ColumnWorld(tables, features, WIDTHS, 2, 0)
    assert world.plans[0].shares_statistics
    own, cut = cut_all(tables, features, WIDTHS)
    own = [
        t
        if t.columns is None
        else dataclasses.replace(t, columns=dataclasses.replace(t.columns, has_own_statistic=True))
        for t in own
    ]
    alone = World(own, cut, spread(own, 2, 0), 2)
    alone.columns = world.columns
    assert not alone.plans[0].shares_statistics
    run(alone, 10)
    statistics: dict[tuple[str, int], set[bytes]] = {}
    for (t, row_id), row in alone.rows().items():
        statistics.setdefault((own[t].logical_name, row_id), set()).add(row[1])
    assert any(len(found) > 1 for found in statistics.values())


def test_sums_of_squares_of_other_rows_are_refused():
    tables, features = rowwise_tables()
    world = ColumnWorld(tables, features, WIDTHS, 2, 0)
    lookups, outputs = world.forward(batches_of(np.random.default_rng(0), [4, 4]))
    grads = [output_grads(outputs[r], lambda o, r=r: quadratic_loss(r, o)) for r in range(2)]
    received, _keep = world.backward(lookups, grads)
    World.apply(world, [(lookups, received)], 1)
    before = world.rows()
    received, _, memory = world._exchange(
        [plan.statistic_bytes_out for plan in world.plans], lambda r, to: world.plans[r].write_statistics(to)
    )
    memory[1][(memory[1] != 0xAB)] ^= 1
    with pytest.raises(ProtocolError, match="from rank 1 are about other rows"):
        world.plans[0].apply_shared(received[0], 1, np.ones(len(world.tables), dtype=np.float32))
    assert world.rows() == before
