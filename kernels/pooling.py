"""Readable references of pooling and of its gradients, in torch.

The native code (csrc/core/step/pooling.cpp, segments.cpp) must equal these functions; ``plan.Lookup`` is what runs.
Legend: B batch size, N ids of one feature, U unique rows, D width.
"""

from __future__ import annotations

import torch

from shoal.kernels.spec import PoolingType

#: Positions summed from left to right before a row's sum is cut into another segment (part of the numerics).
SEGMENT = 512


def pool_reference(
    rows_ND: torch.Tensor,
    lengths_B: torch.Tensor,
    pooling: PoolingType,
    weights_N: torch.Tensor | None = None,
    is_kept_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Bags of consecutive rows -> [B, D]; for NONE the rows themselves. Differentiable in rows and weights.

    SUM: sum of weight * row. MEAN: that over the number of kept ids of the bag. Empty bags are 0; ids that are not
    kept count nowhere.
    """
    kept_N1 = (torch.ones(len(rows_ND)) if is_kept_N is None else is_kept_N.float()).unsqueeze(1)
    scaled_ND = rows_ND * kept_N1
    if weights_N is not None:
        scaled_ND = scaled_ND * weights_N.unsqueeze(1)
    if pooling is PoolingType.NONE:
        return scaled_ND
    bag_N = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
    zeros_BD = torch.zeros(len(lengths_B), rows_ND.shape[1], dtype=rows_ND.dtype)
    sums_BD = zeros_BD.index_add(0, bag_N, scaled_ND)
    if pooling is PoolingType.SUM:
        return sums_BD
    counts_B1 = torch.zeros(len(lengths_B), 1).index_add(0, bag_N, kept_N1)
    return sums_BD / counts_B1.clamp(min=1)


def segment_sum_reference(grads_ND: torch.Tensor, inverse_N: torch.Tensor, num_unique: int) -> torch.Tensor:
    """Sum the gradients of the positions of each unique row, in the native order of additions (bit-equal): [U, D].

    Positions in order; a row with more than ``SEGMENT`` positions in segments, each from left to right, then the
    segments' sums from left to right. ``inverse_N`` is -1 where an id was dropped.
    """
    sums_UD = torch.zeros(num_unique, grads_ND.shape[1])
    for unique in range(num_unique):
        positions = torch.nonzero(inverse_N == unique).flatten()
        total = None
        for begin in range(0, len(positions), SEGMENT):
            segment = positions[begin : begin + SEGMENT]
            partial = grads_ND[segment[0]].clone()
            for position in segment[1:]:
                partial = partial + grads_ND[position]
            total = partial if total is None else total + partial
        if total is not None:
            sums_UD[unique] = total
    return sums_UD
