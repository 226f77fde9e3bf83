"""bfloat16 for the dense part (issue 4.4)."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from session_ranks import build_ranks, trainer_of

from shoal.actors import precision
from shoal.actors.embedding import EmbeddingBagCollection
from shoal.kernels.batch import Batch
from shoal.kernels.jagged import KeyedJaggedTensor
from shoal.kernels.spec import OptimizerKind, OptimizerSpec
from shoal.kernels.tables import EmbeddingBagConfig, table_seed, table_spec


def test_a_cpu_with_bf16_units_is_recognised_by_its_flags() -> None:
    assert precision.has_bf16_units("processor: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_tile\n")
    assert precision.has_bf16_units("Features\t: fp asimd bf16 i8mm\n")
    assert not precision.has_bf16_units("flags\t\t: fpu avx2 avx512f\n")


def test_autocast_runs_linear_layers_in_bfloat16_and_leaves_float32_alone() -> None:
    layer = nn.Linear(4, 4)
    with precision.autocast("bf16"):
        assert layer(torch.ones(2, 4)).dtype is torch.bfloat16
    with precision.autocast("fp32"):
        assert layer(torch.ones(2, 4)).dtype is torch.float32


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_cpu_without_bf16_units_is_warned_of_once_with_the_measured_ratio(has_gpu, monkeypatch, caplog) -> None:
    """Whether the machine has a GPU, too, makes no difference: the dense part runs on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(precision, "has_bf16_units", lambda: False)
    with caplog.at_level(logging.WARNING):
        precision.warn_if_slow("fp32")
        precision.warn_if_slow("bf16")
    (record,) = caplog.records
    ratio = float(record.getMessage().partition("matmul_time_over_fp32=")[2].split()[0])
    assert ratio > 0


class _Mlp(nn.Module):
    """Bags and two layers; remembers its mean loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(num_embeddings=50, embedding_dim=16, name="t", feature_names=["f"])
        self.bags = EmbeddingBagCollection([config])
        self.over = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
        self.losses: list[float] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        logits = self.over(self.bags(batch.sparse_features).values()).squeeze(1)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        self.losses.append(float(losses.detach().mean()))
        return losses


def _labelled(step: int) -> Batch:
    """Samples whose label their ids tell."""
    ids = torch.from_numpy(np.random.default_rng(step).integers(0, 50, (64, 2)))
    kjt = KeyedJaggedTensor(keys=["f"], values=ids.reshape(-1), lengths=torch.full((64,), 2))
    return Batch(torch.empty(64, 0), kjt, (ids.sum(dim=1) % 3 == 0).float())


def test_losses_under_bf16_follow_those_of_fp32() -> None:
    """bfloat16 has 8 bits, 0.4 % of a value: each step's loss is within 5 % of fp32's, their mean within 1.5 %."""
    optimizer = OptimizerSpec(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=0.1)
    losses = {}
    for kind in ("fp32", "bf16"):
        (rank,) = build_ranks("a", _Mlp, lambda c: table_spec(c, seed=table_seed(0, c.name), optimizer=optimizer))
        trainer = trainer_of(rank, [_labelled(step) for step in range(60)], precision=kind)
        for _ in range(60):
            trainer.train_step()
        losses[kind] = np.array(rank.model.losses)
    assert losses["fp32"][-10:].mean() < 0.9 * losses["fp32"][:10].mean(), "nothing was learned"
    assert (losses["fp32"] != losses["bf16"]).any()
    np.testing.assert_allclose(losses["bf16"], losses["fp32"], rtol=0.05)
    np.testing.assert_allclose(losses["bf16"].mean(), losses["fp32"].mean(), rtol=0.015)
