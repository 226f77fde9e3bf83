"""Logistic regression on ids and dense features: one weight per id, stored as tables of width 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.actors.embedding import EmbeddingBagCollection
from shoal.jobs.models.layers import ClickTask, tables_from_args
from shoal.kernels.errors import ConfigError
from shoal.kernels.jagged import KeyedJaggedTensor


class LogisticRegression(nn.Module):
    """logit = bias + dense . w + sum over features of the pooled weights of their ids.

    Args:
        embedding_bag_collection: tables of width 1.
        dense_in_features: number of dense features, >= 0.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        widths = {t.name: t.embedding_dim for t in embedding_bag_collection.embedding_bag_configs()}
        if set(widths.values()) != {1}:
            raise ConfigError(f"logistic regression needs tables of width 1, got {widths}")
        self.embedding_bag_collection = embedding_bag_collection
        self.weight = nn.Parameter(torch.zeros(dense_in_features, device=dense_device))
        self.bias = nn.Parameter(torch.zeros(1, device=dense_device))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Logits [B]."""
        ids_part = self.embedding_bag_collection(sparse_features).values().sum(dim=1)
        return self.bias + dense_features @ self.weight + ids_part


def build(*, tables: Mapping[str, Any], num_dense: int, device: torch.device | str | None = None) -> ClickTask:
    """The model of ``model: {factory: shoal.jobs.models.logistic:build, args: {...}}``.

    Args:
        tables: see ``layers.tables_from_args``; weights start near 0 unless init_min and init_max are given.
        num_dense: number of columns in ``data.dense``.
    """
    collection = EmbeddingBagCollection(tables_from_args(tables, 1), device=device)
    return ClickTask(LogisticRegression(collection, num_dense, torch.device(device) if device is not None else None))
