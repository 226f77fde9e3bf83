"""What a worker holds beside its tables: formulas in bytes, from a configuration and a sample. Pure.

Everything is an estimate from above, except where a sample of the data says how many ids differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shoal.kernels.spec import TableSpec
from shoal.platform.buddies import plan_buddies
from shoal.platform.config import JobConfig
from shoal.platform.data_sample import DataSample
from shoal.platform.placement import DYNAMIC_ROWS_ESTIMATE, ROW_METADATA_BYTES

#: Snapshots whose older row versions a worker keeps at once: the one in progress and the one before (C2).
OPEN_SNAPSHOTS = 2


def dense_bytes(config: JobConfig, num_parameters: int) -> int:
    """Parameters, gradients, the flat reduction buffer, and the optimizer's state."""
    num_slots = {"sgd": 1 if config.train.dense_optimizer.momentum else 0, "adagrad": 1, "adam": 2, "adamw": 2}
    return 4 * num_parameters * (3 + num_slots[config.train.dense_optimizer.kind])


def batch_bytes(config: JobConfig, world_size: int, sample: DataSample | None) -> int:
    """Batches a worker holds: those prepared ahead, the one in use, and the lanes of two windows they are cut from."""
    ids = sum(
        sample.features[feature.name].ids_per_row if sample and feature.name in sample.features else 1.0
        for feature in config.data.sparse
    )
    weighted = any(feature.weights_column for feature in config.data.sparse)
    row_bytes = ids * (12 if weighted else 8) + 8 * len(config.data.sparse) + 4 * len(config.data.dense) + 8
    rows = config.data.batch_size / world_size * (config.data.prefetch_batches + 2)
    windows = 2 * min(config.data.window_rows, sample.total_rows if sample else config.data.window_rows) / world_size
    return round((rows + windows) * row_bytes)


def exchange_bytes(
    config: JobConfig,
    world_size: int,
    specs: Sequence[TableSpec],
    features: Mapping[str, Sequence[str]],
    sample: DataSample | None,
) -> int:
    """Send and receive buffers, two of each: ids and float32 rows of one step's distinct ids that live elsewhere."""
    local_rows = math.ceil(config.data.batch_size / world_size)
    total = 0
    for spec in specs:
        for name in features.get(spec.name, ()):
            is_sampled = sample is not None and name in sample.features
            unique = sample.features[name].unique_per_batch if sample and is_sampled else local_rows
            total += unique * (8 + 4 * spec.embedding_dim)
    return round(4 * total * (world_size - 1) / world_size)


def snapshot_bytes(
    config: JobConfig, specs: Sequence[TableSpec], features: Mapping[str, Sequence[str]], sample: DataSample | None
) -> dict[str, int]:
    """Table -> bytes of its rows that change between two snapshots, on all workers together.

    Distinct ids of protect_every_steps batches, from the sample; without one, one id per row and feature, all distinct.
    """
    rows = config.run.failure.protect_every_steps * config.data.batch_size
    changed = {}
    for spec in specs:
        unique = 0
        for name in features.get(spec.name, ()):
            is_sampled = sample is not None and name in sample.features
            unique += sample.features[name].unique_of(rows, sample.rows) if sample and is_sampled else rows
        num_rows = min(unique, spec.num_embeddings or max(unique, DYNAMIC_ROWS_ESTIMATE))
        changed[spec.name] = num_rows * (spec.row_bytes + ROW_METADATA_BYTES)
    return changed


def version_bytes(
    config: JobConfig, owned_parts: Sequence[Mapping[str, float]], changed: Mapping[str, int], *, keeps_copies: bool
) -> list[int]:
    """Older row versions of every worker, and what it has staged for the worker whose copies it keeps.

    Args:
        owned_parts: for every worker, table -> the part of the table that it owns.
        changed: ``snapshot_bytes``.
    """
    own = [sum(part * changed[table] for table, part in parts.items()) for parts in owned_parts]
    limit = config.run.failure.version_bytes_max
    versions = [min(OPEN_SNAPSHOTS * size, math.inf if limit is None else limit) for size in own]
    staged = copies_held([round(size) for size in own], keeps_copies=keeps_copies)
    return [round(kept + extra) for kept, extra in zip(versions, staged)]


def copies_held(owned: Sequence[int], *, keeps_copies: bool) -> list[int]:
    """What every worker holds for others, if each worker were on a host of its own: ``owned`` of those it serves."""
    held = [0] * len(owned)
    if keeps_copies:
        for ward, buddy in enumerate(plan_buddies([str(rank) for rank in range(len(owned))])):
            held[buddy] += owned[ward]
    return held
