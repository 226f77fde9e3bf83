"""From a model that contains our collections to what the data plane needs: tables, features, collections in one order.

Pure but for reading the modules. The order is that of ``model.named_modules()``, tables in configuration order and
features in each table's order: the same on every rank, because every rank builds the same model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import nn

from shoal.actors.embedding import EmbeddingBagCollection, EmbeddingCollection
from shoal.kernels.errors import ConfigError
from shoal.kernels.spec import FeatureSpec, IdPolicy, OptimizerSpec, PoolingType, TableSpec
from shoal.kernels.tables import table_spec

Collection = EmbeddingBagCollection | EmbeddingCollection


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableOptions:
    """What a job says of a table beyond its TorchRec config; None takes the job's default."""

    optimizer: OptimizerSpec | None = None
    #: Row blocks, a power of two; None: by size.
    num_blocks: int | None = None
    #: "row_wise" or "table_wise".
    sharding: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelTables:
    """The data plane's view of a model."""

    tables: tuple[TableSpec, ...]
    features: tuple[FeatureSpec, ...]
    #: (module path, module), index = FeatureSpec.collection.
    collections: tuple[tuple[str, Collection], ...]

    def is_pooled(self, collection: int) -> bool:
        """Whether the collection returns one vector per bag (EmbeddingBagCollection) or one per id."""
        return isinstance(self.collections[collection][1], EmbeddingBagCollection)

    def features_of(self, collection: int) -> list[tuple[int, FeatureSpec]]:
        """(feature index, feature) of one collection, in output order."""
        return [(i, f) for i, f in enumerate(self.features) if f.collection == collection]


def default_num_blocks(num_embeddings: int) -> int:
    """Row blocks of a table nobody configured: 64, fewer where a block would hold under 256 rows; a power of two."""
    if num_embeddings == 0:
        return 64
    blocks = 1
    while blocks < 64 and num_embeddings // (blocks * 2) >= 256:
        blocks *= 2
    return blocks


def describe_model(
    model: nn.Module,
    *,
    seed: int,
    optimizer: OptimizerSpec,
    options: Mapping[str, TableOptions] | None = None,
    policies: Mapping[str, IdPolicy] | None = None,
) -> ModelTables:
    """Walk ``model`` and describe its collections.

    Args:
        seed: the run's seed; each table's own seed derives from it and the table's name.
        optimizer: sparse optimizer of tables whose options name none.
        options: per table name; a name that no collection has is refused.
        policies: what becomes of ids outside a table, per feature name; ERROR where absent.

    Raises: ConfigError when two collections define a table of the same name (checkpoints name tables, so names are
        unique in a model), when options name an unknown table, or when a table's config cannot be trained.
    """
    options = options or {}
    policies = policies or {}
    tables: list[TableSpec] = []
    features: list[FeatureSpec] = []
    collections: list[tuple[str, Collection]] = []
    owner: dict[str, str] = {}
    for path, module in model.named_modules():
        if not isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            continue
        is_pooled = isinstance(module, EmbeddingBagCollection)
        configs = module.embedding_bag_configs() if is_pooled else module.embedding_configs()
        for config in configs:
            if config.name in owner:
                raise ConfigError(
                    f"table {config.name!r} is defined by {owner[config.name]!r} and {path!r}; "
                    "give tables of one model different names"
                )
            owner[config.name] = path
            mine = options.get(config.name, TableOptions())
            spec = table_spec(
                config,
                seed=seed,
                optimizer=mine.optimizer or optimizer,
                num_blocks=mine.num_blocks or default_num_blocks(config.num_embeddings),
            )
            spec.validate()
            features.extend(
                FeatureSpec(
                    name=name,
                    table=len(tables),
                    collection=len(collections),
                    pooling=config.pooling if is_pooled else PoolingType.NONE,
                    is_weighted=is_pooled and module.is_weighted(),
                    policy=policies.get(name, IdPolicy.ERROR),
                )
                for name in config.feature_names
            )
            tables.append(spec)
        collections.append((path, module))
    unknown = sorted(set(options) - set(owner))
    if unknown:
        raise ConfigError(f"options name tables the model does not have: {unknown}; it has {sorted(owner)}")
    return ModelTables(tables=tuple(tables), features=tuple(features), collections=tuple(collections))
