"""ElasticTrainer: train a model with sharded embedding tables, in this process or on a Ray cluster.

The vocabulary is ray.train's. ``ElasticTrainer(...).fit()`` is the Python face of ``shoal train job.yaml``; both end in
the same run plan.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeAlias

from torch import nn

from shoal.actors.feed import BatchSource
from shoal.actors.messages import Progress as EvalRecord
from shoal.actors.worker import Seat
from shoal.jobs.progress import Progress
from shoal.kernels.errors import ClusterError, ConfigError
from shoal.platform.cluster_choice import choose_cluster
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
from shoal.platform.controller import RunPlan, RunReport
from shoal.platform.job import FactoryModel, Source, make_plan, open_source, package_versions
from shoal.platform.launch import ClusterSpec
from shoal.platform.launch_local import run_in_process
from shoal.platform.preflight import cluster_problems
from shoal.platform.run_folder import RunRecord
from shoal.platform.state import RunPhase
from shoal.platform.storage import Storage
from shoal.platform.telemetry import ProgressRecord

Model: TypeAlias = nn.Module | Callable[[], nn.Module] | ModelConfig | str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended; the fields that ray.train's Result has bear its names."""

    #: Last values of the training window and of the last evaluation (``eval/...``). What never happened has no key: a
    #: run that was stopped before its first evaluation has no ``eval/...``; use ``.get``.
    metrics: Mapping[str, float]
    #: The run's folder.
    path: str
    #: Steps applied, over the whole life of the run.
    steps: int
    #: Folder of the newest complete checkpoint, or None.
    checkpoint: str | None
    #: Whether the run was stopped before its last step.
    is_stopped: bool
    #: All progress records of this call, oldest first.
    records: tuple[ProgressRecord, ...] = ()


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

    def fit(self, *, progress: Progress | None = None, on_record: Callable[[Any], None] | None = None) -> Result:
        """Train to the end, or resume and train to the end; returns when all files are written.

        Args:
            progress: where progress is shown; None: a bar on a terminal, plain lines elsewhere.
            on_record: also given every ProgressRecord, evaluation record and event (kind, fields).

        Raises the error that ended the run: DataError, BadIdError, CheckpointError, ClusterError, ... KeyboardInterrupt
        when interrupted twice.
        """
        config = self.config
        if not config.data.train:
            raise ConfigError("data.train names no files to train on")
        train = open_source(config, config.data.train, is_training=True)
        evaluation = open_source(config, config.data.eval, is_training=False) if config.data.eval else None
        collector = _Collector(progress or Progress(), on_record)
        with collector.progress:
            if config.scaling.max_workers == 0:
                plan = self._plan(train, evaluation, train.local_feed)
                report = run_in_process(plan, collector)
            else:
                report = self._fit_on_ray(train, evaluation, collector)
        return self._result(report, collector)

    def _plan(self, train: Source, evaluation: Source | None, feed: Callable[[Seat], BatchSource]) -> RunPlan:
        config = self.config
        digest = train.order.fingerprint()["digest"]
        provenance = {"versions": package_versions(), "seed": config.train.seed, "data_fingerprint": digest}
        record = RunRecord(Storage(config.run.run_dir), config, provenance)
        plan = make_plan(config, self._build_model, train, evaluation, feed)
        return dataclasses.replace(plan, record=record)

    def _fit_on_ray(self, train: Source, evaluation: Source | None, collector: _Collector) -> RunReport:
        import ray

        from shoal.actors.runtime import actor_name
        from shoal.platform.feed_actor import FeederMaker, RayFeedMaker
        from shoal.platform.run_actor import run_on_ray

        config = self.config
        scaling = config.scaling
        with _connected(scaling.address, scaling.max_workers, scaling.cpus_per_worker, collector) as connection:
            if problems := cluster_problems(config, ray.cluster_resources()):
                # A cluster of our own never grows; another one may, while the pending placement groups ask it to.
                if connection.is_own_cluster:
                    raise ClusterError("; ".join(map(str, problems)))
                collector(("waiting", {"reason": "; ".join(map(str, problems))}))
            feeder = actor_name(config.run.name, "feeder")
            controller = actor_name(config.run.name, "controller")
            plan = self._plan(train, evaluation, RayFeedMaker(train, feeder))
            bundle = {"CPU": scaling.cpus_per_worker, **scaling.custom_resources}
            if scaling.use_gpu:
                bundle["GPU"] = scaling.gpus_per_worker
            if scaling.memory_per_worker:
                bundle["memory"] = float(scaling.memory_per_worker)
            cluster = ClusterSpec(bundle=bundle, start_feeder=FeederMaker(train, feeder, controller))
            return run_on_ray(plan, cluster, collector)

    def _result(self, report: RunReport, collector: _Collector) -> Result:
        from shoal.platform.checkpoint import CheckpointState, list_checkpoints

        infos = [i for i in list_checkpoints(self.config.run.run_dir) if i.state is CheckpointState.COMPLETE]
        summary = report.summary or {}
        evaluated = {f"eval/{name}": value for name, value in summary.get("eval", {}).items()}
        return Result(
            # A run that was stopped may have no summary: then what its records said last.
            metrics={**collector.last_values, **summary.get("train", {}), **evaluated},
            path=self.config.run.run_dir,
            steps=int(summary.get("step", report.step)),
            checkpoint=infos[-1].uri if infos else None,
            is_stopped=report.phase is RunPhase.STOPPED,
            records=tuple(collector.records),
        )


class _Collector:
    """Shows what a run tells, and keeps its records."""

    def __init__(self, progress: Progress, on_record: Callable[[Any], None] | None) -> None:
        self.progress = progress
        self.records: list[ProgressRecord] = []
        #: Metric -> its last value among all records.
        self.last_values: dict[str, float] = {}
        self._on_record = on_record

    def __call__(self, item: Any) -> None:
        if isinstance(item, ProgressRecord):
            self.records.append(item)
            shown = ("loss", "ne", "auc", "calibration", "samples_per_s", "exchange_ms")
            values = {name: getattr(item, name) for name in shown}
            self.last_values |= {name: value for name, value in values.items() if value is not None}
            self.progress.update(item)
        elif isinstance(item, EvalRecord):
            self.last_values |= item.values
            shown = ("auc", "log_loss", "ne", "calibration", "num_samples")
            text = " ".join(f"{name}={item.values[f'eval/{name}']:.6g}" for name in shown)
            self.progress.note(f"eval step={item.step} {text}")
        else:
            kind, fields = item
            self.progress.note(" ".join([f"event={kind}", *(f"{k}={v}" for k, v in fields.items())]))
        if self._on_record is not None:
            self._on_record(item)


class _connected:
    """A connection to the chosen Ray cluster; a cluster of our own is ended afterwards, an existing one is kept."""

    def __init__(self, address: str | None, num_workers: int, cpus_per_worker: float, collector: _Collector) -> None:
        self._address = address
        self._num_cpus = int(num_workers * max(1.0, cpus_per_worker)) + 2
        self._collector = collector
        self._is_ours = False
        #: Whether the cluster was started here, for this run.
        self.is_own_cluster = False

    def __enter__(self) -> Self:
        import ray

        if ray.is_initialized():
            return self
        choice = choose_cluster(self._address, os.environ)
        self._collector(("cluster", {"address": choice.address, "reason": choice.reason}))
        # Workers import the user's model from where the driver does.
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        # Ray's own start-up lines would break the progress bar; its errors still come through.
        options: dict[str, Any] = {"log_to_driver": False, "namespace": "shoal", "logging_level": logging.ERROR}
        if choice.is_local:
            # Logical CPUs: a laptop may run more workers than it has cores, more slowly.
            options |= {"num_cpus": max(self._num_cpus, os.cpu_count() or 1), "include_dashboard": False}
        try:
            ray.init(address=choice.address, **options)
        except ConnectionError as error:
            where = f"the Ray cluster at {choice.address}"
            raise ClusterError(f"cannot reach {where}: {error}; try `shoal doctor`") from error
        self._is_ours = True
        self.is_own_cluster = choice.is_local
        return self

    def __exit__(self, *exc: object) -> None:
        import ray

        if self._is_ours:
            ray.shutdown()


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
