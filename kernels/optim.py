"""Sparse optimizers in torch: the readable reference of the fused native updates (``csrc/core/store/optimizer.h``).

Pure. All state is float32; rows of lower precision are widened, updated and rounded stochastically with bits keyed by
(table seed, id, column, step), so a redo, a migration or another placement gives the same bits.

Sources: Adagrad (Duchi et al., 2011); row-wise Adagrad as FBGEMM's EXACT_ROWWISE_ADAGRAD; Adam (Kingma and Ba, 2015,
algorithm 1) with a global step count, on touched rows only; decoupled decay (Loshchilov and Hutter, 2019).

Legend: N rows, D width, S floats of optimizer state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shoal.kernels import hashing
from shoal.kernels.spec import DataType, OptimizerKind, OptimizerSpec, TableSpec, WeightDecayMode


def initial_state(spec: OptimizerSpec, num_rows: int, embedding_dim: int) -> torch.Tensor:
    """Optimizer state of rows that were never updated: float32[N, S]."""
    is_adagrad = spec.kind in (OptimizerKind.ADAGRAD, OptimizerKind.ROWWISE_ADAGRAD)
    first = spec.initial_accumulator if is_adagrad else 0.0
    return torch.full((num_rows, spec.slot_width(embedding_dim)), first, dtype=torch.float32)


def sum_squares(gradients: torch.Tensor) -> torch.Tensor:
    """sum(g * g) of each row in the written order: element i to lane i mod 8, lanes by a fixed tree. [N, D] -> [N, 1].

    The order is part of the definition, so that every code path gives the same bits.
    """
    num_rows, embedding_dim = gradients.shape
    squares = torch.nn.functional.pad(gradients * gradients, (0, -embedding_dim % 8)).view(num_rows, -1, 8)
    lanes = torch.zeros(num_rows, 8)
    for group in range(squares.shape[1]):
        lanes = lanes + squares[:, group]
    a = [lanes[:, i] for i in range(8)]
    return (((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])))[:, None]


def mean_square(gradients: torch.Tensor) -> torch.Tensor:
    """mean(g * g) of each row, from ``sum_squares``. [N, D] -> [N, 1]."""
    return sum_squares(gradients) / gradients.shape[1]


def shared_mean_square(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """mean(g * g) of rows cut into column blocks (PROTOCOLS S7): their sums are added in block order. -> [N, 1]."""
    total = sum_squares(gradients[0])
    for block in gradients[1:]:
        total = total + sum_squares(block)
    return total / sum(block.shape[1] for block in gradients)


def square_root(values: torch.Tensor) -> torch.Tensor:
    """The correctly rounded square root; torch's own may call MKL's, which is off by one bit now and then."""
    return torch.from_numpy(np.sqrt(values.numpy()))


def update_reference(
    spec: OptimizerSpec,
    weights: torch.Tensor,
    state: torch.Tensor,
    gradients: torch.Tensor,
    *,
    step: int,
    lr: float,
    mean: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One update of N rows: (weights [N, D], state [N, S]) -> their new values; all float32.

    ``gradients`` are the summed gradients of the rows in this step; ``step`` counts from 1 and is Adam's t. ``mean``
    [N, 1]: of a column block with row-wise state, ``shared_mean_square`` of all blocks' gradients, L2 decay included;
    ``gradients`` then have had it too. Constants are rounded to float32 and operations are done in the order written
    here, without fused multiply-add; the native update is bit-equal.
    """
    f32 = torch.float32
    rate, eps = torch.tensor(lr, dtype=f32), torch.tensor(spec.eps, dtype=f32)
    decay = torch.tensor(spec.weight_decay, dtype=f32)
    w, g, dim = weights, gradients, weights.shape[1]
    if spec.weight_decay != 0 and spec.weight_decay_mode == WeightDecayMode.L2 and mean is None:
        g = g + decay * w
    elif spec.weight_decay != 0 and spec.weight_decay_mode == WeightDecayMode.DECOUPLED:
        w = w - (rate * decay) * w
    match spec.kind:
        case OptimizerKind.SGD:
            return w - rate * g, state
        case OptimizerKind.ADAGRAD:
            v = state + g * g
            return w - (rate * g) / (square_root(v) + eps), v
        case OptimizerKind.ROWWISE_ADAGRAD:
            m = state + (mean_square(g) if mean is None else mean)
            return w - (rate / (square_root(m) + eps)) * g, m
        case _:
            beta1, beta2 = torch.tensor(spec.beta1, dtype=f32), torch.tensor(spec.beta2, dtype=f32)
            rest1, rest2 = torch.tensor(1.0 - spec.beta1, dtype=f32), torch.tensor(1.0 - spec.beta2, dtype=f32)
            rate1 = torch.tensor(float(rate) / (1.0 - spec.beta1**step), dtype=f32)
            inverse2 = torch.tensor(1.0 / (1.0 - spec.beta2**step), dtype=f32)
            m = beta1 * state[:, :dim] + rest1 * g
            v = beta2 * state[:, dim:] + (rest2 * g) * g
            return w - (rate1 * m) / (square_root(v * inverse2) + eps), torch.cat([m, v], dim=1)


def round_rows_reference(table: TableSpec, ids: torch.Tensor, values: torch.Tensor, *, step: int) -> torch.Tensor:
    """float32[N, D] -> the table's row type, rounded with the bits of (seed, id, column, step). Step 0: creation."""
    if table.data_type == DataType.FP32:
        return values
    keys = hashing.rounding_keys(table.seed, ids.numpy(), step)
    bits = hashing.column_bits(keys, table.embedding_dim, table.first_column)
    if table.data_type == DataType.BF16:
        patterns = hashing.round_bfloat16_reference(values.numpy(), bits)
        return torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(hashing.round_float16_reference(values.numpy(), bits).view(np.float16))


def initial_rows_reference(table: TableSpec, ids: torch.Tensor) -> torch.Tensor:
    """What rows are created as: int64[N] -> [N, D] in the table's row type."""
    values = hashing.initial_values_reference(
        table.seed, ids.numpy(), table.embedding_dim, table.init_min, table.init_max, table.first_column
    )
    return round_rows_reference(table, ids, torch.from_numpy(values), step=0)


def apply_reference(
    table: TableSpec,
    ids: torch.Tensor,
    weights: torch.Tensor,
    state: torch.Tensor,
    gradients: torch.Tensor,
    *,
    step: int,
    lr: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One update of stored rows: (weights [N, D] in the row type, state float32[N, S]) -> their new values."""
    wide, state = update_reference(table.optimizer, weights.to(torch.float32), state, gradients, step=step, lr=lr)
    return round_rows_reference(table, ids, wide, step=step), state
