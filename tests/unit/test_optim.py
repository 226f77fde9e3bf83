"""Sparse optimizers: native equals the torch reference bit for bit, and the peers' formulas closely."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kernels.errors import ConfigError
from shoal.kernels.optim import apply_reference, initial_rows_reference, initial_state, mean_square, update_reference
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import DataType, OptimizerKind, OptimizerSpec, TableSpec, WeightDecayMode

ROW_TYPES = [DataType.FP32, DataType.FP16, DataType.BF16]
KINDS = list(OptimizerKind)
DIMS = [1, 3, 8, 13, 16, 64, 100]


def make_table(kind=OptimizerKind.SGD, dim=8, data_type=DataType.FP32, **optimizer) -> TableSpec:
    return TableSpec(
        name="t", num_embeddings=0, embedding_dim=dim, data_type=data_type, seed=11, init_min=-0.3, init_max=0.3,
        optimizer=OptimizerSpec(kind=kind, **optimizer),
    )  # fmt: skip


def make_store(table: TableSpec, **options) -> RowStore:
    store = RowStore([table], **options)
    store.add_all_blocks()
    return store


def assert_training_matches(table: TableSpec, num_steps: int = 4, seed: int = 0) -> None:
    """Train some rows natively and by the reference; all state must be equal bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    store = make_store(table)
    ids = torch.tensor([0, 5, -1, 2**63 - 1, -(2**63), 77, 78, 79, 80], dtype=torch.int64)
    weights, state = initial_rows_reference(table, ids), initial_state(table.optimizer, len(ids), table.embedding_dim)
    for step in range(1, num_steps + 1):
        touched = torch.randperm(len(ids), generator=generator)[: 3 + step]
        gradients = torch.randn(len(touched), table.embedding_dim, generator=generator)
        lr = 0.05 / step
        store.apply(0, ids[touched], gradients, step=step, lr=lr)
        store.commit(step)
        new_weights, new_state = apply_reference(
            table, ids[touched], weights[touched], state[touched], gradients, step=step, lr=lr
        )
        weights[touched], state[touched] = new_weights, new_state
    rows = store.export_block(0, 0)
    order = {int(i): at for at, i in enumerate(ids)}
    at = torch.tensor([order[int(i)] for i in rows.ids])
    assert torch.equal(rows.weights, weights[at])
    assert torch.equal(rows.slots, state[at])


@pytest.mark.parametrize("kind, data_type", itertools.product(KINDS, ROW_TYPES))
@pytest.mark.parametrize("decay", list(WeightDecayMode))
def test_native_update_equals_reference_bit_for_bit(kind, data_type, decay):
    for dim in DIMS:
        table = make_table(
            kind, dim, data_type, weight_decay=0.02, weight_decay_mode=decay, initial_accumulator=0.01, eps=1e-6
        )
        assert_training_matches(table, seed=dim)


@given(
    dim=st.integers(1, 70),
    kind=st.sampled_from(KINDS),
    data_type=st.sampled_from(ROW_TYPES),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_native_update_equals_reference_for_any_width(dim, kind, data_type, seed):
    assert_training_matches(make_table(kind, dim, data_type), num_steps=2, seed=seed)


def test_mean_square_reduces_in_the_written_order():
    values = torch.randn(5, 21, generator=torch.Generator().manual_seed(1))
    for row, expected in zip(values, mean_square(values)[:, 0]):
        lanes = [torch.tensor(0.0)] * 8
        for i, x in enumerate(row):
            lanes[i % 8] = lanes[i % 8] + x * x
        a = lanes
        total = ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
        assert total / 21 == expected


def test_row_state_does_not_depend_on_the_order_of_rows_in_an_update():
    table = make_table(OptimizerKind.ADAM, 12, DataType.BF16)
    ids = torch.arange(100)
    gradients = torch.randn(100, 12, generator=torch.Generator().manual_seed(2))
    one, other = make_store(table), make_store(table)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(3))
    one.apply(0, ids, gradients, step=1, lr=0.1)
    other.apply(0, ids[order], gradients[order], step=1, lr=0.1)
    assert torch.equal(one.export_block(0, 0).weights, other.export_block(0, 0).weights)


FBGEMM_OPTIMIZERS = {
    OptimizerKind.SGD: "EXACT_SGD",
    OptimizerKind.ADAGRAD: "EXACT_ADAGRAD",
    OptimizerKind.ROWWISE_ADAGRAD: "EXACT_ROWWISE_ADAGRAD",
}


@pytest.mark.parametrize("kind", list(FBGEMM_OPTIMIZERS))
def test_training_equals_fbgemm(kind):
    training = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    if not hasattr(configs.EmbOptimType, FBGEMM_OPTIMIZERS[kind]):
        pytest.skip("this FBGEMM has no such optimizer on the CPU")
    dim, num_rows, lr = 16, 30, 0.1
    table = make_table(kind, dim)
    store = make_store(table)
    peer = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(num_rows, dim, common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)],
        optimizer=getattr(configs.EmbOptimType, FBGEMM_OPTIMIZERS[kind]),
        learning_rate=lr,
        eps=table.optimizer.eps,
        pooling_mode=common.PoolingMode.SUM,
    )
    everything = torch.arange(num_rows)
    peer.split_embedding_weights()[0].copy_(store.lookup(0, everything))
    generator = torch.Generator().manual_seed(4)
    for step in range(1, 6):
        bag = torch.randint(0, num_rows, (40,), generator=generator)
        grad = torch.randn(40, dim, generator=generator)
        peer(bag, torch.arange(41)).backward(grad)
        unique, inverse = torch.unique(bag, return_inverse=True)
        summed = torch.zeros(len(unique), dim).index_add_(0, inverse, grad)
        store.apply(0, unique, summed, step=step, lr=lr)
        store.commit(step)
    torch.testing.assert_close(store.lookup(0, everything), peer.split_embedding_weights()[0], rtol=1e-5, atol=1e-6)


def test_adam_equals_the_published_formula_in_double():
    spec = OptimizerSpec(kind=OptimizerKind.ADAM, eps=1e-8)
    generator = torch.Generator().manual_seed(5)
    w = torch.randn(6, 10, generator=generator)
    state = initial_state(spec, 6, 10)
    exact_w, m, v = w.double(), torch.zeros(6, 10).double(), torch.zeros(6, 10).double()
    for step in range(1, 30):
        g = torch.randn(6, 10, generator=generator)
        w, state = update_reference(spec, w, state, g, step=step, lr=0.01)
        m, v = 0.9 * m + 0.1 * g.double(), 0.999 * v + 0.001 * g.double() ** 2
        exact_w = exact_w - 0.01 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    torch.testing.assert_close(w.double(), exact_w, rtol=1e-5, atol=1e-6)


def test_adam_equals_torch_sparse_adam_when_every_row_is_touched():
    table = make_table(OptimizerKind.ADAM, 8, eps=1e-12)
    store, ids = make_store(table), torch.arange(5)
    weight = torch.nn.Parameter(store.lookup(0, ids))
    peer = torch.optim.SparseAdam([weight], lr=0.02, eps=1e-12)
    generator = torch.Generator().manual_seed(6)
    for step in range(1, 8):
        grad = torch.randn(5, 8, generator=generator)
        weight.grad = torch.sparse_coo_tensor(ids[None], grad, weight.shape).coalesce()
        peer.step()
        store.apply(0, ids, grad, step=step, lr=0.02)
        store.commit(step)
    torch.testing.assert_close(store.lookup(0, ids), weight.detach(), rtol=1e-5, atol=1e-6)


def test_low_precision_rows_move_by_their_mean_and_redo_gives_the_same_bits():
    """Round-to-nearest would lose every one of these updates (FBGEMM on the CPU does)."""
    for data_type in (DataType.FP16, DataType.BF16):
        table = make_table(OptimizerKind.SGD, 64, data_type)
        store, ids = make_store(table), torch.arange(50)
        before = store.lookup(0, ids)
        first = None
        for step in range(1, 101):
            store.apply(0, ids, torch.full((50, 64), 1e-3), step=step, lr=0.01)
            if step == 50:
                first = store.export_block(0, 0).weights
                store.undo(step)
                store.apply(0, ids, torch.full((50, 64), 1e-3), step=step, lr=0.01)
                assert torch.equal(first, store.export_block(0, 0).weights)
            store.commit(step)
        moved = (store.lookup(0, ids) - before).mean()
        assert abs(float(moved) + 1e-3) < 2e-4


def test_wrong_constants_are_refused_by_name():
    with pytest.raises(ConfigError, match="beta1"):
        RowStore([make_table(OptimizerKind.ADAM, beta1=1.5)])
