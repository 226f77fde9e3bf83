"""Pooling, sequences and their gradients against the torch references: shapes, weights, drops, exact order of sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.kernels.outputs import StepMemory
from shoal.kernels.plan import Lookup, StepPlan
from shoal.kernels.pooling import SEGMENT, pool_reference, segment_sum_reference
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import DataType, FeatureSpec, IdPolicy, OptimizerKind, OptimizerSpec, PoolingType, TableSpec

ALONE = np.zeros(1, dtype=np.int64)
DIMS = [1, 2, 4, 5, 8, 12, 16, 24, 32, 48, 64, 68, 100, 128, 256, 260, 512]


def make_plan(
    dim: int,
    pooling: PoolingType,
    *,
    is_weighted: bool = False,
    policy: IdPolicy = IdPolicy.ERROR,
    data_type: DataType = DataType.FP32,
    num_threads: int = 1,
) -> StepPlan:
    table = TableSpec(
        name="t",
        num_embeddings=100,
        embedding_dim=dim,
        data_type=data_type,
        init_min=-1,
        init_max=1,
        optimizer=OptimizerSpec(kind=OptimizerKind.SGD, lr=1.0),
    )
    feature = FeatureSpec(name="f", table=0, collection=0, pooling=pooling, is_weighted=is_weighted, policy=policy)
    store = RowStore([table], num_threads=num_threads)
    store.add_block(0, 0)
    return StepPlan(store, [table], [feature], [np.zeros(1, np.uint16)], rank=0, world_size=1, num_threads=num_threads)


def forward(
    plan: StepPlan, ids: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None = None
) -> tuple[Lookup, torch.Tensor]:
    lookup = plan.new_lookup()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    lookup.route(ids, offsets, weights, np.zeros(1, np.int32), len(lengths))
    lookup.resolve(ALONE, ALONE)
    (output,) = outputs = lookup.new_outputs()
    lookup.pool(ALONE, outputs)
    return lookup, output


def random_bags(
    seed: int, batch: int = 23, length_max: int = 6, id_max: int = 100
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, length_max + 1, (batch,), generator=generator)
    ids = torch.randint(0, id_max, (int(lengths.sum()),), generator=generator)
    return ids, lengths, torch.rand(len(ids), generator=generator) + 0.5


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("dim", DIMS)
def test_pooling_and_gradients_equal_the_reference(dim: int, pooling: PoolingType, is_weighted: bool) -> None:
    plan = make_plan(dim, pooling, is_weighted=is_weighted)
    ids, lengths, weights = random_bags(dim)
    lookup, output = forward(plan, ids, lengths, weights)
    table = plan.store.lookup(0, torch.arange(100)).requires_grad_(True)
    leaf = weights.clone().requires_grad_(True)
    expected = pool_reference(table[ids], lengths, pooling, leaf if is_weighted else None)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(7))
    expected.backward(grad)
    if is_weighted:
        torch.testing.assert_close(lookup.weight_grad([grad]), leaf.grad, rtol=1e-5, atol=1e-5)
    else:
        assert not lookup.weight_grad([grad]).any()
    lookup.segment_sum([grad], ALONE)
    before = table.detach().clone()
    plan.apply([lookup], [ALONE], 1, np.ones(1, np.float32))
    torch.testing.assert_close(before - plan.store.lookup(0, torch.arange(100)), table.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16, DataType.BF16])
@pytest.mark.parametrize("dim", [3, 8, 64])
def test_sequences_return_rows_in_position_order(dim: int, data_type: DataType) -> None:
    plan = make_plan(dim, PoolingType.NONE, data_type=data_type)
    ids, lengths, _ = random_bags(1)
    lookup, output = forward(plan, ids, lengths)
    assert torch.equal(output, plan.store.lookup(0, ids))
    if data_type is DataType.FP32:
        before = plan.store.lookup(0, torch.arange(100))
        grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
        lookup.segment_sum([grad], ALONE)
        plan.apply([lookup], [ALONE], 1, np.ones(1, np.float32))
        expected = torch.zeros(100, dim).index_add(0, ids, grad)
        torch.testing.assert_close(before - plan.store.lookup(0, torch.arange(100)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pooling", list(PoolingType))
def test_dropped_ids_count_nowhere(pooling: PoolingType) -> None:
    plan = make_plan(8, pooling, is_weighted=pooling is not PoolingType.NONE, policy=IdPolicy.DROP)
    ids, lengths, weights = random_bags(2)
    ids[::3] = -5
    lookup, output = forward(plan, ids, lengths, weights)
    kept = ids >= 0
    rows = plan.store.lookup(0, ids.clamp(min=0))
    leaf = weights.clone().requires_grad_(True)
    expected = pool_reference(rows, lengths, pooling, None if pooling is PoolingType.NONE else leaf, kept)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    if pooling is not PoolingType.NONE:
        expected.sum().backward()
        torch.testing.assert_close(lookup.weight_grad([torch.ones_like(output)]), leaf.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("count", [1, 2, SEGMENT, SEGMENT + 1, 2 * SEGMENT, 3 * SEGMENT + 7])
def test_hot_rows_are_summed_in_the_declared_order(count: int, num_threads: int) -> None:
    """Bit-equal to the reference: from left to right in segments, then the segments (S5)."""
    plan = make_plan(12, PoolingType.SUM, num_threads=num_threads)
    ids = torch.zeros(count + 40, dtype=torch.int64)
    ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))[:40]] = torch.arange(40) % 7 + 1
    before = torch.zeros(100, 12)
    lookup, output = forward(plan, ids, torch.ones(len(ids), dtype=torch.int64))
    before = plan.store.lookup(0, torch.arange(100))
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(count))
    lookup.segment_sum([grad], ALONE)
    plan.apply([lookup], [ALONE], 1, np.ones(1, np.float32))
    sums = segment_sum_reference(grad, ids, 8)
    assert torch.equal(plan.store.lookup(0, torch.arange(8)), before[:8] - sums)


def test_large_outputs_written_past_the_caches_are_the_same() -> None:
    plan = make_plan(256, PoolingType.SUM)
    ids = torch.arange(20_000) % 100
    _, output = forward(plan, ids, torch.ones(20_000, dtype=torch.int64))
    assert torch.equal(output, plan.store.lookup(0, torch.arange(100))[ids])


def test_empty_batch_and_empty_bags() -> None:
    plan = make_plan(8, PoolingType.MEAN)
    _, output = forward(plan, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert output.shape == (0, 8)
    _, output = forward(plan, torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    assert torch.equal(output, torch.zeros(3, 8))


def test_a_batch_without_the_feature_gives_empty_bags() -> None:
    plan = make_plan(8, PoolingType.SUM)
    lookup = plan.new_lookup()
    lookup.route(torch.arange(4), torch.arange(5), None, np.array([-1], np.int32), 4)
    lookup.resolve(ALONE, ALONE)
    outputs = lookup.new_outputs()
    lookup.pool(ALONE, outputs)
    assert torch.equal(outputs[0], torch.zeros(4, 8))


def test_inputs_are_never_written_to() -> None:
    plan = make_plan(8, PoolingType.MEAN, is_weighted=True, policy=IdPolicy.HASH)
    ids, lengths, weights = random_bags(4, id_max=300)
    grad = torch.randn(len(lengths), 8)
    copies = ids.clone(), lengths.clone(), weights.clone(), grad.clone()
    lookup, _ = forward(plan, ids, lengths, weights)
    lookup.weight_grad([grad])
    lookup.segment_sum([grad], ALONE)
    plan.apply([lookup], [ALONE], 1, np.ones(1, np.float32))
    assert all(torch.equal(a, b) for a, b in zip(copies, (ids, lengths, weights, grad)))


def test_step_memory_is_reused_only_when_nobody_holds_it() -> None:
    memory = StepMemory()
    first = memory.take((4, 8))
    address, view = first.data_ptr(), first[1:]
    second = memory.take((4, 8))
    assert second.data_ptr() != address, "first is held"
    del first, second
    assert memory.take((2, 8)).data_ptr() != address, "a view of first is held"
    del view
    third = memory.take((3, 8))
    kept = third.data_ptr()
    del third
    again = memory.take((2, 4))
    assert again.data_ptr() == kept and not again._is_view() and again.shape == (2, 4)
