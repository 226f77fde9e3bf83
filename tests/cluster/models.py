"""A model for the cluster tests, importable in workers by its path."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from shoal.actors.embedding import EmbeddingBagCollection
from shoal.kernels.batch import Batch
from shoal.kernels.tables import EmbeddingBagConfig


class Clicks(nn.Module):
    """Two tables and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=n, embedding_dim=8, feature_names=[name])
                for name, n in (("user", 500), ("item", 800))
            ]
        )
        self.over = nn.Linear(16 + 3, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pooled = self.bags(batch.sparse_features).values()
        logits = self.over(torch.cat([pooled, batch.dense_features], dim=1)).squeeze(1)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return losses, torch.sigmoid(logits)


def build() -> nn.Module:
    return Clicks()


class SlowClicks(Clicks):
    """Takes a few milliseconds a step, so that a run is long in time and short in data."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        time.sleep(0.01)
        return super().forward(batch)


def build_slow() -> nn.Module:
    return SlowClicks()


class StandingClicks(Clicks):
    """Takes a second a step, so that something can happen within one."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        time.sleep(1.0)
        return super().forward(batch)


def build_standing() -> nn.Module:
    return StandingClicks()
