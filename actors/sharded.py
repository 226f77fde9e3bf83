"""From a model that contains our collections to what the data plane needs: tables, features, collections in one order.

Pure but for reading the modules. The order is that of ``model.named_modules()``, tables in configuration order, their
column blocks in column order and features in each table's order: the same on every rank, because every rank builds the
same model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from shoal.actors.embedding import EmbeddingBagCollection, EmbeddingCollection
from shoal.kernels.column_blocks import check_tables
from shoal.kernels.errors import ConfigError
from shoal.kernels.spec import FeatureSpec, IdPolicy, PoolingType, TableSpec
from shoal.kernels.tables import BaseEmbeddingConfig

Collection = EmbeddingBagCollection | EmbeddingCollection


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelTables:
    """The data plane's view of a model."""

    tables: tuple[TableSpec, ...]
    features: tuple[FeatureSpec, ...]
    #: (module path, module), index = FeatureSpec.collection.
    collections: tuple[tuple[str, Collection], ...]


def describe_model(
    model: nn.Module,
    make_spec: Callable[[BaseEmbeddingConfig], TableSpec | Sequence[TableSpec]],
    policies: Mapping[str, IdPolicy],
) -> ModelTables:
    """Walk ``model`` and describe its collections.

    Args:
        make_spec: the job's settings applied to a table's config: the table, or the column blocks it is cut into
            (``column_blocks.cut_columns``), each of which then is a table, and every feature that reads it as many.
        policies: what becomes of ids outside a table, per feature name; ERROR where absent.

    Raises: ConfigError when two tables have the same name (checkpoints name tables, so names are unique in a model,
        those of column blocks too), when the model has no collection, or when a table's config cannot be trained.
    """
    tables: list[TableSpec] = []
    features: list[FeatureSpec] = []
    collections: list[tuple[str, Collection]] = []
    owner: dict[str, str] = {}
    has_collection = False
    for path, module in model.named_modules():
        if not isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            continue
        has_collection = True
        is_pooled = isinstance(module, EmbeddingBagCollection)
        configs = module.embedding_bag_configs() if is_pooled else module.embedding_configs()
        if not configs:
            continue  # nothing to look up: it stays as it is
        for config in configs:
            if config.name in owner:
                raise ConfigError(
                    f"table {config.name!r} is defined by {owner[config.name]!r} and {path!r}; "
                    "give tables of one model different names"
                )
            owner[config.name] = path
            made = make_spec(config)
            blocks = (made,) if isinstance(made, TableSpec) else tuple(made)
            features.extend(
                FeatureSpec(
                    name=name,
                    table=len(tables) + block,
                    collection=len(collections),
                    pooling=config.pooling if is_pooled else PoolingType.NONE,
                    is_weighted=is_pooled and module.is_weighted(),
                    policy=policies.get(name, IdPolicy.ERROR),
                )
                for name in config.feature_names
                for block in range(len(blocks))
            )
            tables.extend(blocks)
        collections.append((path, module))
    if not has_collection:
        raise ConfigError(
            "the model has no shoal EmbeddingBagCollection or EmbeddingCollection; "
            "plain nn.EmbeddingBag modules are dense parameters and are not sharded"
        )
    check_tables(tables)
    return ModelTables(tables=tuple(tables), features=tuple(features), collections=tuple(collections))
