"""The dense replica: what a checkpoint holds of it, and what it refuses to be restored from."""

from __future__ import annotations

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
