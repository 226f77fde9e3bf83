"""DLRM's pairwise dot interaction, forward and backward, on the CPU in native code.

Legend: B batch, F sparse features, D width, N = F + 1 vectors per sample (the dense one first).

The result is TorchRec's ``InteractionArch`` (torchrec/models/dlrm.py): the dense vector, then the dot products of all
pairs (i, j), i < j, in the order of ``torch.triu_indices(N, N, offset=1)``: B x (D + N (N - 1) / 2). Sums run in one
fixed order (columns ascending; in backward, partners ascending), so results do not depend on the number of threads.
Cost: B N^2 D / 2 fused multiply-adds forward, B N^2 D backward.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.kernels import _core

#: Most sparse features per sample that the native kernel takes.
NUM_SPARSE_MAX: int = _core.INTERACTION_SPARSE_MAX


def dot_interaction_reference(dense_BD: torch.Tensor, sparse_BFD: torch.Tensor) -> torch.Tensor:
    """The same in plain torch, differentiable: the oracle of the native kernel and the path of other devices."""
    num_vectors = sparse_BFD.shape[1] + 1
    if num_vectors == 1:
        return dense_BD
    vectors_BND = torch.cat((dense_BD.unsqueeze(1), sparse_BFD), dim=1)
    products_BNN = torch.bmm(vectors_BND, vectors_BND.transpose(1, 2))
    i, j = torch.triu_indices(num_vectors, num_vectors, offset=1, device=dense_BD.device)
    return torch.cat((dense_BD, products_BNN[:, i, j]), dim=1)


class _DotInteraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        batch, num_sparse, dim = sparse.shape
        num_vectors = num_sparse + 1
        out = dense.new_empty((batch, dim + num_vectors * (num_vectors - 1) // 2))
        _core.interaction_forward(
            dense.data_ptr(), sparse.data_ptr(), batch, num_sparse, dim, out.data_ptr(), torch.get_num_threads()
        )
        ctx.save_for_backward(dense, sparse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dense, sparse = ctx.saved_tensors
        batch, num_sparse, dim = sparse.shape
        grad_out = grad_out.contiguous()
        grad_dense, grad_sparse = torch.empty_like(dense), torch.empty_like(sparse)
        _core.interaction_backward(
            dense.data_ptr(),
            sparse.data_ptr(),
            grad_out.data_ptr(),
            batch,
            num_sparse,
            dim,
            grad_dense.data_ptr(),
            grad_sparse.data_ptr(),
            torch.get_num_threads(),
        )
        return grad_dense, grad_sparse


def dot_interaction(dense_BD: torch.Tensor, sparse_BFD: torch.Tensor) -> torch.Tensor:
    """Dense vector and all pairwise dot products: float32 [B, D + N (N - 1) / 2], differentiable once.

    Args:
        dense_BD: [B, D] output of the dense tower.
        sparse_BFD: [B, F, D] one vector per sparse feature, F >= 0.

    Other devices and dtypes, and more than ``NUM_SPARSE_MAX`` features, take the torch path with the same result up
    to rounding. Raises ValueError when the shapes do not fit together.
    """
    if dense_BD.dim() != 2 or sparse_BFD.dim() != 3 or sparse_BFD.shape[::2] != dense_BD.shape:
        raise ValueError(
            f"dense {tuple(dense_BD.shape)} and sparse {tuple(sparse_BFD.shape)} must be [B, D] and [B, F, D]"
        )
    is_native = (
        dense_BD.device.type == sparse_BFD.device.type == "cpu"
        and dense_BD.dtype == sparse_BFD.dtype == torch.float32
        and 0 < sparse_BFD.shape[1] <= NUM_SPARSE_MAX
    )
    if not is_native:
        return dot_interaction_reference(dense_BD, sparse_BFD)
    return _DotInteraction.apply(dense_BD.contiguous(), sparse_BFD.contiguous())
