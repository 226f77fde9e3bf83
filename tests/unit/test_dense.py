"""The dense replica: what a checkpoint holds of it, and what it refuses to be restored from."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from shoal.actors.dense import DenseOptimizerSpec, DenseReplica
from shoal.kernels.errors import CheckpointMismatchError


def make(kind: str = "adam", fill: float | None = None) -> DenseReplica:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[2].weight.requires_grad_(False)
    if fill is not None:
        for parameter in model.parameters():
            nn.init.constant_(parameter, fill)
    return DenseReplica(model, DenseOptimizerSpec(kind=kind))


def test_state_survives_with_frozen_parameters_and_optimizer_slots():
    one, two = make(), make(fill=0.0)
    one.grad.fill_(0.5)
    one.step(0.1)
    two.load_state_tensors(one.state_tensors(), one.optimizer_kind)
    assert torch.equal(one.model[2].weight, two.model[2].weight)
    for replica in (one, two):
        replica.grad.fill_(-0.25)
        replica.step(0.1)
    assert torch.equal(one.flat, two.flat)
    assert one.floating_buffers == ("1.running_mean", "1.running_var")


def test_another_optimizer_is_refused_by_name():
    one, two = make("adam"), make("adagrad")
    with pytest.raises(CheckpointMismatchError, match="'adam', this run uses 'adagrad'"):
        two.load_state_tensors(one.state_tensors(), one.optimizer_kind)


def test_a_missing_parameter_is_named():
    tensors = make().state_tensors()
    del tensors["model.2.weight"]
    with pytest.raises(CheckpointMismatchError, match=r"model\.2\.weight: expected \(1, 2\), found nothing"):
        make().load_state_tensors(tensors)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam", "adamw"])
def test_a_step_is_torchs_own(kind):
    replica = make(kind, fill=0.3)
    flat = nn.Parameter(replica.flat.clone())
    optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.get(
        kind, torch.optim.Adagrad
    )([flat], lr=0.1, fused=True)
    for step in range(3):
        replica.grad.copy_(torch.linspace(-1, 1, replica.grad.numel()) * (step + 1))
        flat.grad = replica.grad.clone()
        replica.step(0.1)
        optimizer.step()
        assert torch.equal(replica.flat, flat)


NO_COMPILER = """
import sys, torch
from shoal.actors.dense import DenseOptimizerSpec, DenseReplica
from shoal.actors.embedding import EmbeddingBagCollection, lazy_tables
from shoal.kernels.tables import EmbeddingBagConfig
with lazy_tables():
    table = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["t"])
    EmbeddingBagCollection(tables=[table])
for kind in ("sgd", "adagrad", "adam", "adamw"):
    DenseReplica(torch.nn.Linear(3, 1), DenseOptimizerSpec(kind=kind)).step(0.1)
sys.exit("torch._dynamo" in sys.modules)
"""


def test_a_worker_starts_without_torchs_compiler():
    """Its import takes a third of the CPU time of a start."""
    subprocess.run([sys.executable, "-c", NO_COMPILER], check=True, timeout=120)
