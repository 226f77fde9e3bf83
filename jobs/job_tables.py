"""The tables of a job's model, without training: the model is built with tables that take no memory."""

from __future__ import annotations

from torch import nn

from shoal.actors.embedding import lazy_tables
from shoal.actors.sharded import ModelTables, describe_model
from shoal.kernels.spec import IdPolicy
from shoal.platform.config import JobConfig
from shoal.platform.factory import add_working_dir_to_path, build_model
from shoal.platform.job import TableMaker


def describe_job(config: JobConfig) -> tuple[nn.Module, ModelTables]:
    """The model that ``model.factory`` builds, and its tables with the job's settings applied.

    Raises ConfigError when the factory or a table's settings are wrong.
    """
    add_working_dir_to_path()
    with lazy_tables():
        model = build_model(config.model)
    policies = {name: IdPolicy[policy.upper()] for name, policy in config.data.id_policies.items()}
    return model, describe_model(model, TableMaker(config), policies)


def features_by_table(described: ModelTables) -> dict[str, list[str]]:
    """Table name -> names of the features that read it, in order."""
    features: dict[str, list[str]] = {spec.name: [] for spec in described.tables}
    for feature in described.features:
        features[described.tables[feature.table].name].append(feature.name)
    return features


def checked_sizes(described: ModelTables) -> dict[str, int]:
    """Feature -> ids it may have, where an id outside its table is an error: the smallest table that it reads."""
    sizes: dict[str, int] = {}
    for feature in described.features:
        table = described.tables[feature.table]
        if feature.policy is IdPolicy.ERROR and table.is_static:
            sizes[feature.name] = min(table.num_embeddings, sizes.get(feature.name, table.num_embeddings))
    return sizes
