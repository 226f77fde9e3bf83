"""Gradients that are finite on every rank and whose sums are not: all ranks skip the step, or none (S4)."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from session_ranks import Rank, build_ranks, on_ranks, rows_of

from shoal.actors.embedding import EmbeddingBagCollection
from shoal.actors.session import StepEnd
from shoal.kernels.jagged import KeyedJaggedTensor
from shoal.kernels.plan import squares_of
from shoal.kernels.spec import OptimizerKind, OptimizerSpec
from shoal.kernels.tables import EmbeddingBagConfig, table_seed, table_spec

#: Finite, its double is not.
HUGE = 3e38
DIM = 4


class OneTable(nn.Module):
    """A table of 8 rows, of which each rank reads the same four, and a dense parameter."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(num_embeddings=8, embedding_dim=DIM, name="t", feature_names=["f"])
        self.bags = EmbeddingBagCollection([config])
        self.dense = nn.Parameter(torch.ones(3))


def _ranks(world: int) -> list[Rank]:
    optimizer = OptimizerSpec(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=0.5)

    def spec(config):
        return table_spec(config, seed=table_seed(0, config.name), optimizer=optimizer, num_blocks=4)

    return build_ranks("a" * world, OneTable, spec)


def _step(rank: Rank, step: int, row_grads: float, dense_grads: float, clip_norm: float | None) -> StepEnd:
    """A step whose gradients are given: of each element of each row on this rank, and of the dense part."""
    kjt = KeyedJaggedTensor(keys=["f"], values=torch.arange(4), lengths=torch.ones(4, dtype=torch.int32))
    rank.session.begin(step, kjt, is_training=True, loss_weight=4.0)
    output = rank.model.bags(kjt).values()
    output.backward(torch.full_like(output, row_grads))
    rank.dense.grad.fill_(dense_grads)
    return rank.session.end(dense_grad=rank.dense.grad, learning_rates=rank.rates, clip_norm=clip_norm)


def _train(world: int, steps: list[tuple[float, float]], clip_norm: float | None) -> tuple[list[Rank], list[StepEnd]]:
    """Steps of (row gradient, dense gradient) on every rank; what each step ended with, equal on all ranks."""
    ranks = _ranks(world)

    def body(rank: Rank) -> list[StepEnd]:
        return [_step(rank, s, rows, dense, clip_norm) for s, (rows, dense) in enumerate(steps)]

    ends = on_ranks(ranks, body)
    assert all(other == ends[0] for other in ends)
    assert all(rank.session.exchange.applied == len(steps) - 1 for rank in ranks)
    return ranks, ends[0]


def _same(a: list[Rank], b: list[Rank]) -> None:
    ours, theirs = rows_of(a)["t"], rows_of(b)["t"]
    assert ours.keys() == theirs.keys()
    for row_id, (weights, slots) in ours.items():
        np.testing.assert_array_equal(weights, theirs[row_id][0])
        np.testing.assert_array_equal(slots, theirs[row_id][1])
        assert np.isfinite(weights).all() and np.isfinite(slots).all()


@pytest.mark.parametrize(
    ("rows", "dense"),
    [
        pytest.param(HUGE, 1.0, id="the sum of a row is infinite"),
        pytest.param(1.0, HUGE, id="the sum of the dense gradients is infinite"),
        pytest.param(HUGE, HUGE, id="both"),
        pytest.param(1e30, 1.0, id="squares of all rows at the bound, which used to wrap"),
    ],
)
@pytest.mark.parametrize("world", [2, 3])
def test_s4_with_clipping_all_ranks_skip_a_step_whose_summed_gradients_are_not_finite(world, rows, dense):
    ranks, ends = _train(world, [(1.0, 1.0), (rows, dense), (-0.5, 0.5)], 0.1)
    assert [end.is_applied for end in ends] == [True, False, True]
    assert ends[1].non_finite_ranks and ends[1].grad_norm is None
    assert ends[0].grad_norm > 0.1 and math.isfinite(ends[2].grad_norm)
    # Adagrad's accumulator has seen the first and the third step only, whatever their number.
    plain, _ = _train(world, [(1.0, 1.0), (-0.5, 0.5)], 0.1)
    _same(ranks, plain)
    for rank in ranks:
        assert torch.isfinite(rank.dense.grad).all()
        assert torch.equal(rank.dense.grad, plain[0].dense.grad)


def test_s4_a_row_sum_that_is_not_a_number_is_found_by_its_owner():
    """Infinity of rank 0's positions and minus infinity of rank 1's: segment sums of finite gradients."""
    ranks = _ranks(2)

    def body(rank: Rank) -> StepEnd:
        kjt = KeyedJaggedTensor(keys=["f"], values=torch.zeros(2, dtype=torch.int64), lengths=torch.tensor([1, 1]))
        rank.session.begin(0, kjt, is_training=True, loss_weight=4.0)
        output = rank.model.bags(kjt).values()
        output.backward(torch.full_like(output, HUGE if rank.rank == 0 else -HUGE))
        return rank.session.end(dense_grad=None, learning_rates=rank.rates, clip_norm=1.0)

    first, second = on_ranks(ranks, body)
    assert first == second == StepEnd(is_applied=False, non_finite_ranks=first.non_finite_ranks)
    assert len(first.non_finite_ranks) == 1
    assert not rows_of(ranks)["t"], "a row exists once a step that uses it is applied"


def test_s4_without_clipping_all_ranks_skip_a_step_whose_dense_sum_is_not_finite():
    ranks, ends = _train(2, [(1.0, 1.0), (1.0, HUGE), (-0.5, 0.5)], None)
    assert [end.is_applied for end in ends] == [True, False, True]
    assert ends[1].non_finite_ranks == (0, 1)
    _same(ranks, _train(2, [(1.0, 1.0), (-0.5, 0.5)], None)[0])


def test_squares_of_many_owners_saturate_instead_of_wrapping():
    at_the_bound = [0.0, 0.0, 0.0, float(2**30)]
    assert squares_of([2.0**31, 0.0, 0.0, 0.0]) == 2.0**-33
    assert squares_of(at_the_bound) == math.inf
    assert squares_of([70_000 * number for number in at_the_bound]) == math.inf
    assert squares_of([2.0**32 - 1, 2.0**32 - 1, 2.0**32 - 1, 2.0**30 - 1]) == 2.0**62


def test_held_gradients_check_what_they_are_given():
    (rank,) = _ranks(1)
    plan = rank.session.plan
    with pytest.raises(ValueError, match="hold comes first"):
        plan.apply_held([], 1.0, 1, rank.rates)
    with pytest.raises(ValueError, match="0 lookups but gradients of 1"):
        plan.hold([], [np.zeros(1, np.int64)])
    plan.hold([], [])
    with pytest.raises(ValueError, match="scale is inf"):
        plan.apply_held([], math.inf, 1, rank.rates)
    with pytest.raises(ValueError, match=r"lrs must be float32 \[1\]"):
        plan.apply_held([], 1.0, 1, rank.rates.astype(np.float64))
