"""ElasticTrainer: train a model with sharded embedding tables, in this process or on a Ray cluster.

The vocabulary is ray.train's. ``ElasticTrainer(...).fit()`` is the Python face of ``shoal train job.yaml``; both end in
the same run plan.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import nn

from shoal.actors.feed import BatchSource
from shoal.actors.worker_spec import Seat
from shoal.jobs import live
from shoal.jobs.connection import connected
from shoal.jobs.progress import Progress
from shoal.jobs.result import Collector, Result, make_result
from shoal.kernels.errors import ClusterError, ConfigError
from shoal.kernels.faults import Schedule
from shoal.platform.auto_tables import has_auto
from shoal.platform.config import (
    DataConfig,
    JobConfig,
    ModelConfig,
    RunConfig,
    ScalingConfig,
    TablesConfig,
    TrainConfig,
)
from shoal.platform.config_ray import run_config, scaling_config
from shoal.platform.host_labels import check_label, host_label
from shoal.platform.job import FactoryModel, Source, choose_sharding, make_plan, open_source, package_versions
from shoal.platform.launch import ClusterSpec
from shoal.platform.launch_local import run_in_process
from shoal.platform.preflight import cluster_problems
from shoal.platform.run_folder import RunRecord
from shoal.platform.run_plan import RunPlan, RunReport
from shoal.platform.storage import Storage

Model: TypeAlias = nn.Module | Callable[[], nn.Module] | ModelConfig | str


@dataclasses.dataclass(frozen=True)
class ClonedModel:
    """Builds the model from an instance: each worker trains a copy of it."""

    module: nn.Module

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self.module)


class ElasticTrainer:
    """Trains any ``nn.Module`` that contains shoal's embedding collections.

    The module's forward takes a ``Batch`` and returns per-sample losses [B], or (losses [B], predictions [B]) with
    predictions as probabilities, which metrics need.

    Args:
        model: a function without arguments that builds the module (best: its tables then never take memory in the
            driver), a module (give its collections ``device="meta"``), a ModelConfig, or "package.module:function".
        data: a DataConfig or a mapping of its fields: files, columns, batch size.
        train: a TrainConfig or a mapping of its fields.
        tables: a TablesConfig or a mapping of its fields.
        scaling: shoal's or ray.train's ScalingConfig, or a mapping. ``num_workers=0`` trains in this process.
        run: shoal's or ray.train's RunConfig (with its FailureConfig and CheckpointConfig), or a mapping.

    Raises ConfigError, before anything starts, naming each wrong field, its value and what is allowed.
    """

    def __init__(
        self,
        *,
        model: Model,
        data: DataConfig | Mapping[str, Any],
        train: TrainConfig | Mapping[str, Any] | None = None,
        tables: TablesConfig | Mapping[str, Any] | None = None,
        scaling: Any = None,
        run: Any = None,
    ) -> None:
        self._build_model = _model_builder(model)
        self.config = JobConfig(
            model=_model_config(model),
            data=_config(DataConfig, data),
            train=_config(TrainConfig, train),
            tables=_config(TablesConfig, tables),
            scaling=_config(ScalingConfig, scaling, scaling_config),
            run=_config(RunConfig, run, run_config),
        )
        self.config.validate()

    @classmethod
    def from_config(cls, config: JobConfig) -> ElasticTrainer:
        """The trainer of a job file's configuration."""
        if not config.model.factory:
            raise ConfigError("model.factory is not set; write 'package.module:function'")
        return cls(
            model=config.model,
            data=config.data,
            train=config.train,
            tables=config.tables,
            scaling=config.scaling,
            run=config.run,
        )

    def fit(
        self,
        *,
        progress: Progress | None = None,
        on_record: Callable[[Any], None] | None = None,
        schedule: Schedule | None = None,
    ) -> Result:
        """Train to the end, or resume and train to the end; returns when all files are written.

        Args:
            progress: where progress is shown; None: a bar on a terminal, plain lines elsewhere.
            on_record: also given every ProgressRecord, evaluation record and event (kind, fields).
            schedule: what goes wrong on purpose (``shoal chaos``), on a Ray cluster.

        Raises the error that ended the run: DataError, BadIdError, CheckpointError, ClusterError, ... KeyboardInterrupt
        when interrupted twice.
        """
        config = self.config
        if not config.data.train:
            raise ConfigError("data.train names no files to train on")
        train = open_source(config, config.data.train, is_training=True)
        if has_auto(config):
            config = self.config = choose_sharding(config, self._build_model, train)
        evaluation = open_source(config, config.data.eval, is_training=False) if config.data.eval else None
        collector = Collector(progress or Progress(), on_record)
        with collector.progress:
            if config.scaling.max_workers == 0:
                plan = self._plan(train, evaluation, train.local_feed)
                report = run_in_process(plan, collector)
            else:
                report = self._fit_on_ray(train, evaluation, collector, schedule)
        return make_result(config.run.run_dir, report, collector)

    def scale(self, num_workers: int) -> str:
        """Change the number of workers while ``fit`` runs in another thread; see ``shoal.scale``."""
        return live.scale(self.config.run.name, num_workers, address=self.config.scaling.address)

    def _plan(self, train: Source, evaluation: Source | None, feed: Callable[[Seat], BatchSource]) -> RunPlan:
        config = self.config
        digest = train.order.fingerprint()["digest"]
        provenance = {"versions": package_versions(), "seed": config.train.seed, "data_fingerprint": digest}
        record = RunRecord(Storage(config.run.run_dir), config, provenance)
        plan = make_plan(config, self._build_model, train, evaluation, feed)
        return dataclasses.replace(plan, record=record)

    def _fit_on_ray(
        self, train: Source, evaluation: Source | None, collector: Collector, schedule: Schedule | None
    ) -> RunReport:
        import ray

        from shoal.actors.runtime import actor_name
        from shoal.platform.feed_actor import FeederMaker, RayFeedMaker
        from shoal.platform.run_actor import run_on_ray

        config = self.config
        scaling = config.scaling
        with connected(scaling.address, scaling.max_workers, scaling.cpus_per_worker, collector) as connection:
            if problems := cluster_problems(config, ray.cluster_resources()):
                # A cluster of our own never grows; another one may, while the pending placement groups ask it to.
                if connection.is_own_cluster:
                    raise ClusterError("; ".join(map(str, problems)))
                collector(("waiting", {"reason": "; ".join(map(str, problems))}))
            label = host_label(scaling.hosts) or ""
            check_label(label, ray.nodes())
            feeder = actor_name(config.run.name, "feeder")
            controller = actor_name(config.run.name, "controller")
            plan = self._plan(train, evaluation, RayFeedMaker(train, feeder))
            plan = dataclasses.replace(plan, worker=dataclasses.replace(plan.worker, faults=schedule))
            bundle = {"CPU": scaling.cpus_per_worker, **scaling.custom_resources}
            if scaling.use_gpu:
                bundle["GPU"] = scaling.gpus_per_worker
            if scaling.memory_per_worker:
                bundle["memory"] = float(scaling.memory_per_worker)
            cluster = ClusterSpec(
                bundle=bundle,
                host_label=label,
                start_feeder=FeederMaker(train, feeder, controller, schedule=schedule),
                orphan_s=config.run.failure.orphan_s,
                driver_grace_s=config.run.failure.driver_grace_s,
            )
            return run_on_ray(plan, cluster, collector)


def _model_builder(model: Model) -> Callable[[], nn.Module]:
    if isinstance(model, ModelConfig):
        return FactoryModel(model.factory, dict(model.args))
    if isinstance(model, str):
        return FactoryModel(model, {})
    if isinstance(model, nn.Module):
        return ClonedModel(model)
    if callable(model):
        return model
    what = "an nn.Module, a function that builds one, or 'package.module:function'"
    raise ConfigError(f"model is {model!r}; it must be {what}")


def _model_config(model: Model) -> ModelConfig:
    if isinstance(model, ModelConfig):
        return model
    return ModelConfig(factory=model if isinstance(model, str) else "")


def _config(cls: type, value: Any, from_ray: Callable[[Any], Any] | None = None) -> Any:
    """``value`` as an object of ``cls``: one already, a mapping of its fields, None, or ray.train's own class."""
    from shoal.platform.config_fields import build

    if value is None:
        return cls()
    if isinstance(value, Mapping):
        return build(cls, value)
    return value if from_ray is None or isinstance(value, cls) else from_ray(value)
