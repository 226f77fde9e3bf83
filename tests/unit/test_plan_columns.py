"""Steps over tables cut into column blocks equal steps over the uncut tables, and count ids once."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from test_plan import RankBatch, World, make_tables, mixed_features, output_grads, quadratic_loss, random_batch, spread

from shoal.kernels.column_blocks import cut_columns
from shoal.kernels.errors import ConfigError, ProtocolError
from shoal.kernels.optim import initial_state, round_rows_reference, shared_mean_square, update_reference
from shoal.kernels.plan import StepPlan
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import DataType, FeatureSpec, IdPolicy, OptimizerKind, OptimizerSpec, TableSpec, WeightDecayMode

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


def test_a_step_cut_off_before_its_statistics_is_rolled_back_and_done_again():
    """F4: rows that ``apply`` has updated and rows that wait for their statistic go back to the same step."""
    tables, features = three_tables(OptimizerKind.ADAGRAD)
    optimizer = OptimizerSpec(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=0.05)
    tables[0] = dataclasses.replace(tables[0], optimizer=optimizer)
    world = run(ColumnWorld(tables, features, WIDTHS, 2, 0), 3)
    before = world.rows()
    cuts = [plan.store.cut() for plan in world.plans]
    batches = batches_of(np.random.default_rng(9), [4, 4])
    results = []
    for is_cut_off in (True, False):
        lookups, outputs = world.forward(batches)
        grads = [output_grads(outputs[r], lambda o, r=r: quadratic_loss(r, o)) for r in range(2)]
        received, _keep = world.backward(lookups, grads)
        (World if is_cut_off else ColumnWorld).apply(world, [(lookups, received)], 4)
        results.append(world.rows())
        if is_cut_off:
            for plan, cut in zip(world.plans, cuts):
                plan.store.rollback(cut, 3)
            assert world.rows() == before
    expected = run(ColumnWorld(tables, features, WIDTHS, 2, 1), 3)
    expected.step(batches, 4, quadratic_loss)
    assert results[0] != results[1] == expected.rows()


@pytest.mark.parametrize("decay", list(WeightDecayMode))
@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16, DataType.BF16])
def test_one_shared_update_has_the_bits_of_its_reference(data_type, decay):
    optimizer = OptimizerSpec(
        kind=OptimizerKind.ROWWISE_ADAGRAD, weight_decay=0.0 if decay is WeightDecayMode.NONE else 0.2,
        weight_decay_mode=decay, initial_accumulator=0.1,
    )  # fmt: skip
    widths = (9, 4, 20)
    table = TableSpec(
        name="t", num_embeddings=0, embedding_dim=33, num_blocks=4, init_min=-1, init_max=1,
        data_type=data_type, optimizer=optimizer,
    )  # fmt: skip
    world = ColumnWorld([table], [FeatureSpec(name="f", table=0, collection=0)], [widths], 2, 0)
    ids = torch.tensor([3, -1, 2**62, 17, 5])
    ones = RankBatch(ids, torch.arange(6), torch.ones(5), 5)
    none = RankBatch(ids[:0], torch.zeros(1, dtype=torch.int64), torch.ones(0), 0)
    lookups, outputs = world.forward([ones, none])
    before = outputs[0][0].split(widths, dim=1)
    gradient = torch.randn(5, 33, generator=torch.Generator().manual_seed(0))
    received, _keep = world.backward(lookups, [[gradient], [outputs[1][0]]])
    world.apply([(lookups, received)], 1, lr=0.3)
    parts = list(gradient.split(widths, dim=1))
    if decay is WeightDecayMode.L2:
        parts = [g + torch.tensor(0.2) * w for g, w in zip(parts, before)]
    mean = shared_mean_square(parts)
    rows = world.rows()
    for t, (spec, w, g) in enumerate(zip(world.tables, before, parts)):
        wide, state = update_reference(
            optimizer, w, initial_state(optimizer, 5, len(w[0])), g, step=1, lr=0.3, mean=mean
        )
        stored = round_rows_reference(spec, ids, wide, step=1)
        for i, row_id in enumerate(ids.tolist()):
            assert rows[t, row_id][0] == stored[i].contiguous().view(torch.uint8).numpy().tobytes(), (t, row_id)
            assert rows[t, row_id][1] == state[i].numpy().tobytes()


@st.composite
def partitions(draw, total: int) -> tuple[int, ...]:
    widths: list[int] = []
    while sum(widths) < total:
        widths.append(draw(st.integers(1, total - sum(widths))))
    return tuple(widths)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_random_cuts_of_random_tables_equal_the_uncut_tables(data):
    """Elementwise optimizers bit for bit, row-wise ones within 1e-5; any world size, placement and batch sizes."""
    kind = data.draw(st.sampled_from(list(OptimizerKind)))
    world = data.draw(st.integers(1, 4))
    dims = data.draw(st.lists(st.integers(1, 20), min_size=2, max_size=3))
    widths = [data.draw(partitions(dim)) for dim in dims]
    tables = make_tables([kind] * len(dims), dims, [30, 0, 25][: len(dims)], blocks=data.draw(st.sampled_from([1, 4])))
    tables = [
        dataclasses.replace(t, optimizer=dataclasses.replace(t.optimizer, initial_accumulator=0.1)) for t in tables
    ]
    features = mixed_features(tables)
    uncut = World(tables, features, spread(tables, world, 0), world)
    cut = ColumnWorld(tables, features, widths, world, 1)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for step in range(1, 4):
        batches = [random_batch(features, tables, int(rng.integers(0, 3)), rng) for _ in range(world)]
        for ours, theirs in zip(cut.step(batches, step, quadratic_loss), uncut.step(batches, step, quadratic_loss)):
            for a, b in zip(ours, theirs):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    if kind is not OptimizerKind.ROWWISE_ADAGRAD:
        assert whole_rows(cut) == whole_rows(uncut)
        return
    ours, theirs = rowwise_state(cut), rowwise_state(uncut)
    assert ours.keys() == theirs.keys()
    for key, (weights, statistic) in theirs.items():
        np.testing.assert_allclose(ours[key][0], weights, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(ours[key][1], statistic, rtol=1e-5)
