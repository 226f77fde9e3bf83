"""DeepFM (Guo et al., IJCAI 2017, arXiv:1703.04247): linear weights, a factorization machine and a perceptron.

Shapes: B batch, F number of sparse features, D embedding width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.actors.embedding import EmbeddingBagCollection
from shoal.jobs.models.layers import ClickTask, perceptron, resized, tables_from_args
from shoal.jobs.models.logistic import LogisticRegression
from shoal.kernels.errors import ConfigError
from shoal.kernels.jagged import KeyedJaggedTensor


class DeepFM(nn.Module):
    """logit = linear + sum over pairs of features of the dot product of their vectors + perceptron(vectors, dense).

    Args:
        embedding_bag_collection: tables of one width D.
        linear: the first-order part, over tables of its own.
        dense_in_features: number of dense features, >= 0.
        hidden_layer_sizes: of the perceptron; empty leaves a factorization machine.
        dropout: after each hidden layer, in [0, 1).
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        linear: LogisticRegression,
        dense_in_features: int,
        hidden_layer_sizes: Sequence[int],
        dense_device: torch.device | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        tables = embedding_bag_collection.embedding_bag_configs()
        widths = {table.name: table.embedding_dim for table in tables}
        if len(set(widths.values())) != 1:
            raise ConfigError(f"DeepFM needs tables of one width, got {widths}")
        self.embedding_dim = tables[0].embedding_dim
        self.num_sparse_features = sum(len(table.feature_names) for table in tables)
        self.embedding_bag_collection = embedding_bag_collection
        self.linear = linear
        in_features = self.num_sparse_features * self.embedding_dim + dense_in_features
        self.deep = (
            perceptron(in_features, [*hidden_layer_sizes, 1], is_last_linear=True, dropout=dropout, device=dense_device)
            if hidden_layer_sizes
            else None
        )

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Logits [B]."""
        pooled = self.embedding_bag_collection(sparse_features).values()
        vectors_BFD = pooled.reshape(-1, self.num_sparse_features, self.embedding_dim)
        # The sum over pairs is half of (square of the sum - sum of the squares).
        pairs = 0.5 * (vectors_BFD.sum(1).square() - vectors_BFD.square().sum(1)).sum(1)
        logit = self.linear(dense_features, sparse_features) + pairs
        if self.deep is not None:
            logit = logit + self.deep(torch.cat((pooled, dense_features), dim=1)).squeeze(1)
        return logit


def build(
    *,
    tables: Mapping[str, Any],
    num_dense: int,
    embedding_dim: int = 16,
    hidden: Sequence[int] = (64, 32),
    dropout: float = 0.0,
    linear_init: float = 0.01,
    device: torch.device | str | None = None,
) -> ClickTask:
    """The model of ``model: {factory: shoal.jobs.models.deepfm:build, args: {...}}``.

    Args:
        tables: see ``layers.tables_from_args``. Each gets a companion ``<name>_linear`` of width 1.
        num_dense: number of columns in ``data.dense``.
        embedding_dim: width of the tables.
        hidden: hidden layers of the perceptron; [] leaves a factorization machine.
        linear_init: first-order weights start uniform in [-linear_init, linear_init).
    """
    where = torch.device(device) if device is not None else None
    configs = tables_from_args(tables, embedding_dim)
    linear_configs = [resized(t, name=f"{t.name}_linear", embedding_dim=1, init=linear_init) for t in configs]
    linear = LogisticRegression(EmbeddingBagCollection(linear_configs, device=device), num_dense, where)
    vectors = EmbeddingBagCollection(configs, device=device)
    return ClickTask(DeepFM(vectors, linear, num_dense, hidden, where, dropout))
