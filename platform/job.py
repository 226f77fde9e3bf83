"""From a job's configuration to what the controller and the workers need: the schema, the feeds, the run plan.

The small classes here are picklable functions: they travel to workers inside a WorkerSpec.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import nn

from shoal.actors.dataset import Dataset, scan_dataset
from shoal.actors.dense import DenseOptimizerSpec
from shoal.actors.embedding import lazy_tables
from shoal.actors.feed import Assignment, BatchSource, LocalFeed
from shoal.actors.sharded import describe_model
from shoal.actors.trainer import LoopSpec
from shoal.actors.worker_spec import ElasticSpec, Seat, WorkerSpec
from shoal.kernels.errors import ConfigError
from shoal.kernels.schema import Schema
from shoal.kernels.spec import IdPolicy, TableSpec, WireCodecs
from shoal.kernels.tables import BaseEmbeddingConfig, table_seed
from shoal.platform.auto_tables import job_topology, plan_job_tables, resolve_auto
from shoal.platform.cluster_choice import choose_cluster
from shoal.platform.config import DataConfig, JobConfig, ModelConfig
from shoal.platform.data_sample import sample_dataset
from shoal.platform.factory import build_model
from shoal.platform.host_labels import host_label
from shoal.platform.manifest import CheckpointName
from shoal.platform.order import OrderSpec, VirtualOrder
from shoal.platform.placement import ShardingType, table_bytes
from shoal.platform.run_plan import RunPlan
from shoal.platform.storage import Storage

#: Whose versions a run records.
_PACKAGES = ("shoal", "torch", "ray", "pyarrow", "numpy")


def make_schema(data: DataConfig) -> Schema:
    """The declared columns of the data section."""
    schema = data.schema()
    schema.validate()
    return schema


@dataclasses.dataclass(frozen=True)
class FactoryModel:
    """Builds the model that ``model.factory`` names."""

    factory: str
    args: dict[str, Any]

    def __call__(self) -> nn.Module:
        model = build_model(ModelConfig(factory=self.factory, args=self.args))
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model.factory {self.factory!r} returned {type(model).__name__}, not an nn.Module")
        return model


@dataclasses.dataclass(frozen=True)
class TableMaker:
    """Applies the job's settings to a table's config."""

    config: JobConfig

    def __call__(self, table: BaseEmbeddingConfig) -> tuple[TableSpec, ...]:
        spec = self.config.table_spec(
            table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            data_type=table.data_type.value,
            init_min=table.weight_init_min,
            init_max=table.weight_init_max,
            seed=table_seed(self.config.train.seed, table.name),
        )
        return self.config.tables.of(table.name).cut(spec)


class JobLearningRates:
    """The job's schedules; each distinct schedule is evaluated once per step."""

    def __init__(self, config: JobConfig, tables: Sequence[TableSpec]) -> None:
        self._config = config
        self._base = np.array([table.optimizer.lr for table in tables], dtype=np.float32)
        schedules = [config.table_schedule(table.logical_name) for table in tables]
        distinct = list(dict.fromkeys(schedules))
        self._schedules = distinct
        self._index = np.array([distinct.index(schedule) for schedule in schedules], dtype=np.int64)

    def tables(self, step: int) -> np.ndarray:
        """float32 [num tables] at ``step``, counted from 0."""
        factors = np.array([schedule.factor(step) for schedule in self._schedules], dtype=np.float32)
        return self._base * factors[self._index]

    def dense(self, step: int) -> float:
        return self._config.dense_lr(step)


@dataclasses.dataclass(frozen=True)
class LearningRatesMaker:
    """Makes the schedules once a worker knows its tables."""

    config: JobConfig

    def __call__(self, tables: Sequence[TableSpec]) -> JobLearningRates:
        return JobLearningRates(self.config, tables)


@dataclasses.dataclass(frozen=True)
class Source:
    """A scanned data set in its order."""

    dataset: Dataset
    order: VirtualOrder
    schema: Schema
    #: Steps after which the feed ends.
    num_steps: int
    prefetch_batches: int
    timeout_s: float

    def local_feed(self, seat: Seat) -> BatchSource:
        """This rank's batches, read in its own process."""
        return LocalFeed(
            self.dataset,
            self.order,
            self.schema,
            assignment=Assignment(seat.rank, seat.world_size, None if seat.world_size == 1 else seat.shares),
            start_step=seat.start_step,
            stop_step=self.num_steps,
            prefetch_batches=self.prefetch_batches,
            timeout_s=self.timeout_s,
        )


def open_source(config: JobConfig, paths: Sequence[str], *, is_training: bool) -> Source:
    """Scan the files behind ``paths`` and put them in order; errors name what is wrong before anything starts."""
    data, train = config.data, config.train
    schema = make_schema(data)
    dataset = scan_dataset(list(paths), schema, max_bad_files=data.max_bad_files)
    spec = OrderSpec(
        batch_size=data.batch_size,
        seed=train.seed,
        shuffle=data.shuffle and is_training,
        window_rows=data.window_rows,
        num_lanes=data.lanes,
    )
    order = VirtualOrder(dataset.files, spec)
    num_steps = order.batches_per_epoch
    if is_training:
        num_steps *= train.epochs
        num_steps = min(num_steps, train.max_steps or num_steps)
    return Source(dataset, order, schema, num_steps, data.prefetch_batches, config.run.timeouts.feed_timeout_s)


@dataclasses.dataclass(frozen=True)
class ShardingOf:
    """How each table, or column block of one, is spread over workers."""

    config: JobConfig

    def __call__(self, table: TableSpec) -> ShardingType:
        return self.config.tables.of(table.logical_name).placement


@dataclasses.dataclass(frozen=True)
class CodecsOf:
    """How rows and gradients of each table, or column block of one, travel."""

    config: JobConfig

    def __call__(self, table: TableSpec) -> WireCodecs:
        return self.config.tables.of(table.logical_name).codecs


@dataclasses.dataclass(frozen=True)
class LoadOf:
    """What placement evens out of each table, or column block of one."""

    config: JobConfig

    def __call__(self, table: TableSpec) -> float:
        return table_bytes(table) * (self.config.tables.of(table.logical_name).load_factor or 1.0)


def choose_sharding(config: JobConfig, build: Callable[[], nn.Module], train: Source) -> JobConfig:
    """The configuration with the planner's choices in place of ``auto``, from a sample of the training data.

    Raises PlanError where the tables do not fit, ConfigError and DataError as training would.
    """
    with lazy_tables():
        model = build()
    described = describe_model(model, TableMaker(config), {})
    world_size = max(1, config.scaling.max_workers)
    sample = sample_dataset(train.dataset, train.schema, batch_rows=math.ceil(config.data.batch_size / world_size))
    is_one_host = config.scaling.max_workers == 0 or choose_cluster(config.scaling.address, os.environ).is_local
    topology = job_topology(config, world_size, is_one_host=is_one_host)
    return resolve_auto(config, plan_job_tables(config, described.tables, described.features, sample, topology))


def checkpoint_directory(epoch: int, step: int) -> str:
    """Folder of a checkpoint within the run's."""
    return CheckpointName(epoch, step).directory


def dense_optimizer_spec(config: JobConfig) -> DenseOptimizerSpec:
    """The dense optimizer with torch's own keyword arguments."""
    dense = config.train.dense_optimizer
    options: dict[str, Any] = {"weight_decay": dense.weight_decay}
    if dense.betas is not None:
        options["betas"] = dense.betas
    if dense.kind == "sgd":
        options["momentum"] = dense.momentum
    if dense.eps is not None:
        options["eps"] = dense.eps
    return DenseOptimizerSpec(kind=dense.kind, lr=config.dense_lr(0), options=options)


def elastic_spec(config: JobConfig) -> ElasticSpec | None:
    """How workers change views and recover; None where the run is one process, whose world never changes."""
    failure = config.run.failure
    if config.scaling.max_workers == 0:
        return None
    return ElasticSpec(
        protect_every_steps=None if failure.recovery == "checkpoint" else failure.protect_every_steps,
        has_local_snapshots=failure.recovery == "partial",
        copy_bytes_per_s=float(failure.copy_rate_limit_bytes_per_s or 0),
        copy_rounds_max=failure.copy_rounds_max,
        pause_max_s=failure.pause_max_s,
        write_lease_s=failure.lease_s,
        # The protocol asks for some time between parking and ending.
        lease_s=failure.controller_lease_s,
        orphan_s=max(failure.orphan_s, failure.controller_lease_s + 1.0),
        version_bytes_max=failure.version_bytes_max,
    )


def package_versions() -> dict[str, str]:
    """Versions of what a run's numbers depend on."""
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def make_plan(
    config: JobConfig,
    build_model: Callable[[], nn.Module],
    train: Source,
    evaluation: Source | None,
    train_feed: Callable[[Seat], BatchSource],
) -> RunPlan:
    """The run plan of a validated configuration."""
    run, timeouts, checkpoint = config.run, config.run.timeouts, config.run.checkpoint
    storage = Storage(run.run_dir)
    worker = WorkerSpec(
        run=run.name,
        build_model=build_model,
        make_table=TableMaker(config),
        policies={name: IdPolicy[policy.upper()] for name, policy in config.data.id_policies.items()},
        learning_rates=LearningRatesMaker(config),
        dense_optimizer=dense_optimizer_spec(config),
        loop=LoopSpec(
            seed=config.train.seed,
            total_steps=train.num_steps,
            log_every_steps=config.train.log_every_steps,
            eval_every_steps=config.train.eval_every_steps,
            checkpoint_every_steps=checkpoint.every_steps,
            checkpoint_at_end=checkpoint.at_end,
            max_skipped_steps=config.train.max_skipped_steps,
            precision=config.train.precision,
            overlap=config.train.overlap,
            clip_grad_norm=config.train.clip_grad_norm,
            accumulation_steps=config.train.gradient_accumulation_steps,
            eval_steps=0 if evaluation is None else evaluation.num_steps,
        ),
        train_feed=train_feed,
        eval_feed=None if evaluation is None else evaluation.local_feed,
        storage=storage,
        checkpoint_directory=checkpoint_directory,
        checkpoint_bytes_per_s=float(checkpoint.rate_limit_bytes_per_s or 0),
        num_threads=config.num_threads,
        op_timeout_s=timeouts.op_timeout_s,
        start_timeout_s=timeouts.start_timeout_s,
        checkpoint_timeout_s=timeouts.checkpoint_timeout_s,
        feed_timeout_s=timeouts.feed_timeout_s,
        elastic=elastic_spec(config),
        host_label=host_label(config.scaling.hosts) or "",
    )
    return RunPlan(
        name=run.name,
        scaling=config.scaling,
        failure=run.failure,
        worker=worker,
        storage=storage,
        steps_total=train.num_steps,
        sharding=ShardingOf(config),
        loads=LoadOf(config) if config.tables.has_load_factors else None,
        codecs=CodecsOf(config),
        resume=run.resume,
        num_to_keep=checkpoint.num_to_keep,
        full_every=checkpoint.full_every,
        max_failed_checkpoints=checkpoint.max_failed,
        data_fingerprint=train.order.fingerprint(),
        check_fingerprint=train.order.check_fingerprint,
        op_timeout_s=timeouts.op_timeout_s,
        start_timeout_s=timeouts.start_timeout_s,
        stop_timeout_s=timeouts.stop_timeout_s,
        checkpoint_timeout_s=timeouts.checkpoint_timeout_s,
        versions=package_versions(),
    )
