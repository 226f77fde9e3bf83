"""DLRM (Naumov et al., 2019, arXiv:1906.00091) with TorchRec's constructor.

Shapes: B batch, F number of sparse features, D embedding width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.actors.embedding import EmbeddingBagCollection
from shoal.jobs.models.layers import ClickTask, perceptron, tables_from_args
from shoal.kernels.errors import ConfigError
from shoal.kernels.interaction import dot_interaction
from shoal.kernels.jagged import KeyedJaggedTensor


class DLRM(nn.Module):
    """Dense and sparse features to one logit.

    Args:
        embedding_bag_collection: all tables of one width D; its features are interacted in its output order.
        dense_in_features: number of dense features; 0 is allowed and makes the dense vector a learned constant.
        dense_arch_layer_sizes: sizes of the layers over the dense features; the last is D.
        over_arch_layer_sizes: sizes of the layers over the interactions; the last is the number of logits.
        dense_device: device of the layers; None: torch's default.
        dropout: dropout after each hidden layer of the over arch.

    Raises:
        ValueError: the tables differ in width, or the last dense layer is not of that width.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        dense_device: torch.device | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        tables = embedding_bag_collection.embedding_bag_configs()
        widths = {table.name: table.embedding_dim for table in tables}
        if len(set(widths.values())) != 1:
            raise ConfigError(f"DLRM needs tables of one width, got {widths}")
        self.embedding_dim = tables[0].embedding_dim
        self.num_sparse_features = sum(len(table.feature_names) for table in tables)
        if not dense_arch_layer_sizes or dense_arch_layer_sizes[-1] != self.embedding_dim:
            raise ConfigError(
                f"the last layer of dense_arch_layer_sizes {list(dense_arch_layer_sizes)} must have the tables' width, "
                f"{self.embedding_dim}"
            )
        num_vectors = self.num_sparse_features + 1
        over_in_features = self.embedding_dim + num_vectors * (num_vectors - 1) // 2
        self.embedding_bag_collection = embedding_bag_collection
        self.dense_arch = perceptron(dense_in_features, dense_arch_layer_sizes, device=dense_device)
        self.over_arch = perceptron(
            over_in_features, over_arch_layer_sizes, is_last_linear=True, dropout=dropout, device=dense_device
        )

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Logits [B, over_arch_layer_sizes[-1]] from float32 [B, dense_in_features] and ids."""
        dense_BD = self.dense_arch(dense_features)
        pooled = self.embedding_bag_collection(sparse_features).values()
        sparse_BFD = pooled.reshape(-1, self.num_sparse_features, self.embedding_dim)
        return self.over_arch(dot_interaction(dense_BD, sparse_BFD))


class DLRMTrain(ClickTask):
    """DLRM with the click loss; ``forward(batch)`` returns (losses [B], predictions [B])."""

    def __init__(self, dlrm_module: DLRM) -> None:
        super().__init__(dlrm_module)


def build(
    *,
    tables: Mapping[str, Any],
    num_dense: int,
    embedding_dim: int = 16,
    dense_arch: Sequence[int] = (64,),
    over_arch: Sequence[int] = (64, 32),
    dropout: float = 0.0,
    device: torch.device | str | None = None,
) -> DLRMTrain:
    """The model of ``model: {factory: shoal.jobs.models.dlrm:build, args: {...}}`` in a job file.

    Args:
        tables: see ``layers.tables_from_args``.
        num_dense: number of columns in ``data.dense``.
        embedding_dim: width of all tables.
        dense_arch: hidden layers over the dense features; the last one, of width embedding_dim, is added.
        over_arch: hidden layers over the interactions; the last one, of one logit, is added.
        dropout: after each hidden layer of the over arch, in [0, 1).
        device: of the layers and of the tables, where they are not sharded.
    """
    collection = EmbeddingBagCollection(tables_from_args(tables, embedding_dim), device=device)
    where = torch.device(device) if device is not None else None
    dlrm = DLRM(collection, num_dense, [*dense_arch, embedding_dim], [*over_arch, 1], where, dropout)
    return DLRMTrain(dlrm)
