"""Parts that several models share: tables from a short notation, multi-layer perceptrons, the click loss.

Shapes: B batch, F number of sparse features, D embedding width.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.kernels.batch import Batch
from shoal.kernels.errors import ConfigError
from shoal.kernels.spec import PoolingType
from shoal.kernels.tables import EmbeddingBagConfig

_TABLE_FIELDS = ("num_embeddings", "features", "pooling", "init_min", "init_max")


def tables_from_args(tables: Mapping[str, Any], embedding_dim: int) -> list[EmbeddingBagConfig]:
    """Table configs from the notation of job files, in the order given.

    Each value is a number of embeddings (0: any 64-bit id), for a table read by the feature of the same name, or a
    mapping with ``num_embeddings`` and optionally ``features`` (list of names), ``pooling`` (SUM or MEAN),
    ``init_min`` and ``init_max``.

    Raises:
        ConfigError: a key, type or value is wrong; names the table.
    """
    if not isinstance(tables, Mapping) or not tables:
        raise ConfigError(f"model.args.tables is {tables!r}; it must map table names to numbers of embeddings")
    return [_table(str(name), value, embedding_dim) for name, value in tables.items()]


def _table(name: str, value: Any, embedding_dim: int) -> EmbeddingBagConfig:
    where = f"model.args.tables.{name}"
    fields: Any = {"num_embeddings": value} if isinstance(value, int) else value
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{where} is {value!r}; it must be a number of embeddings or a mapping")
    for key in fields:
        if key not in _TABLE_FIELDS:
            close = difflib.get_close_matches(str(key), _TABLE_FIELDS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known here: {', '.join(_TABLE_FIELDS)}"
            raise ConfigError(f"{where}.{key} is not a known key{hint}")
    num_embeddings = fields.get("num_embeddings")
    if not isinstance(num_embeddings, int) or isinstance(num_embeddings, bool) or num_embeddings < 0:
        raise ConfigError(f"{where}.num_embeddings is {num_embeddings!r}; it must be an integer >= 0")
    pooling = str(fields.get("pooling", "SUM")).upper()
    if pooling not in ("SUM", "MEAN"):
        raise ConfigError(f"{where}.pooling is {fields['pooling']!r}; it must be SUM or MEAN")
    features = fields.get("features", [name])
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=num_embeddings,
        embedding_dim=embedding_dim,
        feature_names=[features] if isinstance(features, str) else list(features),
        pooling=PoolingType[pooling],
        weight_init_min=fields.get("init_min"),
        weight_init_max=fields.get("init_max"),
    )


def resized(table: EmbeddingBagConfig, *, name: str, embedding_dim: int, init: float) -> EmbeddingBagConfig:
    """A table for the same features under another name and width, with weights starting in [-init, init)."""
    return dataclasses.replace(
        table, name=name, embedding_dim=embedding_dim, weight_init_min=-init, weight_init_max=init
    )


def perceptron(
    in_features: int,
    layer_sizes: Sequence[int],
    *,
    is_last_linear: bool = False,
    dropout: float = 0.0,
    device: torch.device | str | None = None,
) -> nn.Sequential:
    """Linear layers with ReLU (and dropout) after each, except after the last one if ``is_last_linear``.

    Raises:
        ConfigError: no layers, or a size below 1.
    """
    if not layer_sizes or min(layer_sizes) < 1:
        raise ConfigError(f"layer sizes are {list(layer_sizes)}; at least one layer, each of size >= 1, is needed")
    layers: list[nn.Module] = []
    for i, size in enumerate(layer_sizes):
        layers.append(nn.Linear(in_features, size, device=device))
        if not (is_last_linear and i == len(layer_sizes) - 1):
            layers.append(nn.ReLU())
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
        in_features = size
    return nn.Sequential(*layers)


class ClickTask(nn.Module):
    """What a trainer needs: wraps a model that maps (dense features, sparse features) to logits [B] or [B, 1].

    ``forward(batch)`` returns per-sample losses (binary cross entropy, natural logarithm, unweighted) and predictions
    (probabilities), both float32 [B]; the trainer weighs, sums and divides by the global weight. B may be 0.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.model(batch.dense_features, batch.sparse_features).reshape(-1)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return losses, torch.sigmoid(logits.detach())
