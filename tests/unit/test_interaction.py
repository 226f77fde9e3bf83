"""The dot interaction against torch and TorchRec's order: values, gradients, shapes, threads."""

from __future__ import annotations

import pytest
import torch

from shoal.kernels.interaction import NUM_SPARSE_MAX, dot_interaction, dot_interaction_reference


def _inputs(batch: int, num_sparse: int, dim: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(batch, dim, generator=generator, requires_grad=True)
    sparse = torch.randn(batch, num_sparse, dim, generator=generator, requires_grad=True)
    return dense, sparse


SHAPES = [
    (0, 3, 8), (1, 1, 4), (2, 1, 1), (5, 2, 3), (7, 26, 32), (3, 27, 64), (4, 3, 16), (2, 8, 40), (3, 31, 128),
    (2, 40, 7), (17, 5, 100), (1, 100, 16), (1, NUM_SPARSE_MAX, 4),
]  # fmt: skip


@pytest.mark.parametrize(("batch", "num_sparse", "dim"), SHAPES)
def test_equals_reference_forward_and_backward(batch: int, num_sparse: int, dim: int) -> None:
    dense, sparse = _inputs(batch, num_sparse, dim)
    out = dot_interaction(dense, sparse)
    expected = dot_interaction_reference(dense, sparse)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, (dense, sparse), grad_out)
    expected_grads = torch.autograd.grad(expected, (dense, sparse), grad_out)
    for grad, expected_grad in zip(grads, expected_grads):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-4)


def test_no_sparse_features_returns_the_dense_vector() -> None:
    dense, sparse = _inputs(3, 0, 5)
    assert torch.equal(dot_interaction(dense, sparse), dense)


def test_pairs_come_in_the_order_of_an_upper_triangle() -> None:
    dense = torch.tensor([[2.0]])
    sparse = torch.tensor([[[3.0], [5.0], [7.0]]])
    assert dot_interaction(dense, sparse).tolist() == [[2, 6, 10, 14, 15, 21, 35]]


def test_result_does_not_depend_on_threads() -> None:
    dense, sparse = _inputs(100, 26, 32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = dot_interaction(dense, sparse)
            results.append((out, *torch.autograd.grad(out.square().sum(), (dense, sparse))))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_views_and_expanded_gradients_are_accepted() -> None:
    dense, sparse = _inputs(6, 4, 8)
    wide = torch.cat([sparse, sparse], dim=2)
    out = dot_interaction(dense, wide[:, :, :8])
    (grad,) = torch.autograd.grad(out.sum(), dense)
    (expected,) = torch.autograd.grad(dot_interaction_reference(dense, sparse).sum(), dense)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5)


def test_inputs_are_never_written_to() -> None:
    dense, sparse = _inputs(9, 5, 12)
    before = dense.detach().clone(), sparse.detach().clone()
    dot_interaction(dense, sparse).sum().backward()
    assert torch.equal(dense.detach(), before[0]) and torch.equal(sparse.detach(), before[1])


def test_other_dtypes_take_the_torch_path() -> None:
    dense, sparse = _inputs(2, 3, 4)
    dense64 = dense.detach().double().requires_grad_(True)
    sparse64 = sparse.detach().double().requires_grad_(True)
    assert dot_interaction(dense64, sparse64).dtype == torch.float64
    torch.autograd.gradcheck(dot_interaction, (dense64, sparse64))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="must be"):
        dot_interaction(torch.zeros(2, 3), torch.zeros(2, 5, 4))


def test_equals_torchrec() -> None:
    dlrm = pytest.importorskip("torchrec.models.dlrm")
    dense, sparse = _inputs(4, 6, 16)
    expected = dlrm.InteractionArch(num_sparse_features=6)(dense, sparse)
    torch.testing.assert_close(dot_interaction(dense, sparse), expected, rtol=1e-5, atol=1e-5)
