"""The configuration of a job: what ``shoal train job.yaml`` reads and ``shoal.ElasticTrainer`` takes.

Pure: no torch, ray or numpy, no I/O. The vocabulary is ray.train's (``ScalingConfig``, ``RunConfig``,
``CheckpointConfig``) and TorchRec's (``sharding_type``, ``num_embeddings``). Every field is documented by the text
that follows it; ``docs/config.md`` and the JSON schema are generated from these texts. ``config_train`` holds the
classes for tables and optimizers, ``config_file`` reads and writes YAML.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from shoal.kernels.schema import Schema, SparseColumn
from shoal.kernels.spec import TableSpec
from shoal.platform.config_failure import FailureConfig
from shoal.platform.config_fields import ByteSize, Config, Problem, bounded
from shoal.platform.config_train import (
    DenseOptimizerConfig,
    OptimizerConfig,
    ScheduleConfig,
    TableConfig,
    TablesConfig,
    TrainConfig,
)
from shoal.platform.host_labels import host_label
from shoal.platform.secrets import secret_problems

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DenseOptimizerConfig",
    "FailureConfig",
    "JobConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "ScalingConfig",
    "ScheduleConfig",
    "SparseColumnConfig",
    "TableConfig",
    "TablesConfig",
    "TimeoutConfig",
    "TrainConfig",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """The model: a function that builds an ``nn.Module`` with our embedding collections inside."""

    SHORT_FORM: ClassVar[str] = "factory"

    factory: str = ""
    """``package.module:function``; it is called with ``args`` and returns a module whose forward takes a Batch and
    returns per-sample losses (and predictions)."""
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of the factory."""

    def rules(self) -> Iterator[Problem]:
        if self.factory and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", self.factory):
            yield Problem("factory", f"is {self.factory!r}; it must look like 'package.module:function'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseColumnConfig(Config):
    """One sparse feature: a column of ids, of lists of ids, or of text. A plain name stands for ``{name: ...}``."""

    SHORT_FORM: ClassVar[str] = "name"

    name: str
    """Name of the feature: the key in the KeyedJaggedTensor and in a table's ``feature_names``."""
    column: str | None = None
    """Column of the data set; null: the feature's name."""
    kind: Literal["auto", "id", "list", "string"] = "auto"
    """``id``: one integer a row; ``list``: a list of integers or text; ``string``: text, hashed the same way in every
    language; ``auto``: as the files declare it. Floating-point ids are always refused."""
    weights_column: str | None = None
    """List column of per-id weights, as long as the ids of the same row; null: no weights."""
    max_length: int | None = bounded(None, low=1)
    """Keep at most this many ids of a row, the first ones; null: all."""
    null_policy: Literal["drop", "oov", "error"] = "drop"
    """A null id, or a null list: ``drop`` it; ``oov``: make it the id -1, on which id_policy then decides; ``error``:
    stop. All are counted."""
    id_policy: Literal["error", "hash", "oov", "drop"] = "error"
    """An id outside a table of fixed size: ``error``: stop on all ranks before any row changes; ``hash``: mixed hash
    modulo num_embeddings; ``oov``: the table's last row; ``drop`` it. All are counted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """Where the samples come from and what their columns mean."""

    train: tuple[str, ...] = ()
    """Parquet files, folders or globs to train on, local or by URI (``s3://...``)."""
    eval: tuple[str, ...] = ()
    """Parquet files, folders or globs to evaluate on during and after training."""
    test: tuple[str, ...] = ()
    """Parquet files, folders or globs for ``shoal eval`` after training."""
    label: str = "label"
    """Column with the label."""
    label_kind: Literal["binary", "regression"] = "binary"
    """``binary``: labels are exactly 0 or 1; ``regression``: any finite number; the loss is then the only metric, for
    the others are defined for binary labels."""
    weight: str | None = None
    """Column with a non-negative sample weight; null: every sample weighs 1."""
    dense: tuple[str, ...] = ()
    """Numeric columns, in the order of the model's dense input."""
    dense_missing: Literal["error", "zero"] = "error"
    """A null, NaN or infinite dense value: ``error``: stop; ``zero``: read 0, counted."""
    sparse: tuple[SparseColumnConfig, ...] = ()
    """Sparse features, in the order of the KeyedJaggedTensor's keys."""
    extras: tuple[str, ...] = ()
    """Further columns of one id a row, handed to the model in ``Batch.extras``."""
    batch_size: int = bounded(1024, low=1)
    """Samples per step over all workers (the global batch); the last batch of an epoch may be shorter."""
    shuffle: bool = True
    """Permute row groups, and rows within a window, by (seed, epoch). False: the order of the files."""
    lanes: int = bounded(8, low=1, high=1024)
    """Fixed slices of every global batch, the unit in which input is transported; fixed for the run's life."""
    window_rows: int = bounded(131_072, low=1)
    """Rows that are shuffled together; fixed for the run's life."""
    prefetch_batches: int = bounded(2, low=1, high=64)
    """Batches each worker prepares ahead of the step that uses them."""
    max_bad_files: int = bounded(0, low=0)
    """Files that may be unreadable and are then left out, with an event each; one more stops the run."""

    def rules(self) -> Iterator[Problem]:
        yield from _duplicates("sparse", [feature.name for feature in self.sparse], "the feature")
        yield from _duplicates("dense", list(self.dense), "the column")
        if self.label in self.dense:
            yield Problem("dense", f"contains the label {self.label!r}: the model would read the answer")
        for i, feature in enumerate(self.sparse):
            if (feature.column or feature.name) == self.label:
                yield Problem(f"sparse.{i}", f"reads the label {self.label!r}: the model would read the answer")
        for name in ("train", "eval", "test"):
            if any(not path.strip() for path in getattr(self, name)):
                yield Problem(name, "contains an empty path")

    def schema(self) -> Schema:
        """The columns and their roles, as the feed takes them."""
        taken = {field.name for field in dataclasses.fields(SparseColumn)}
        columns = (dataclasses.asdict(feature) for feature in self.sparse)
        sparse = [SparseColumn(**{k: v for k, v in column.items() if k in taken}) for column in columns]
        return Schema(
            label=self.label,
            label_kind=self.label_kind,
            dense=self.dense,
            dense_missing=self.dense_missing,
            sparse=tuple(sparse),
            weight=self.weight,
            extras=self.extras,
        )

    @property
    def id_policies(self) -> dict[str, str]:
        """Feature name -> policy for ids outside a table of fixed size."""
        return {feature.name: feature.id_policy for feature in self.sparse}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingConfig(Config):
    """How many workers and what each of them gets (ray.train's vocabulary)."""

    num_workers: int | tuple[int, int] = bounded(1, low=0, high=65_536)
    """Worker processes. 0: train in the calling process, without Ray, with the same numbers. ``[min, max]``: as many as
    the cluster has room for, changing while the run trains; below min it pauses."""
    elastic_resize_monitor_interval_s: float = bounded(10.0, low=0, high=86_400)
    """Least time between two changes of the number of workers that follow the cluster's room, in seconds. Losses,
    draining nodes and ``shoal scale`` do not wait for it."""
    use_gpu: bool = False
    """Whether a GPU is reserved for each worker. Only the exchange between workers uses it, with transport nccl: the
    model, its rows and the optimizers stay on the CPU."""
    resources_per_worker: dict[str, float] = dataclasses.field(default_factory=dict)
    """Resources of one worker as Ray names them: ``CPU`` (default 1, more than 0), ``GPU`` (default 1 with use_gpu),
    custom ones. Memory has its own field."""
    memory_per_worker: ByteSize | None = bounded(None, low=0)  # noqa: RUF009
    """Heap memory of one worker, in bytes or as ``8GiB``: reserved with Ray and used by ``shoal plan``; null: the
    planner divides the host's memory."""
    transport: Literal["auto", "shm", "gloo", "nccl"] = "auto"
    """How ranks exchange rows: ``auto``: shared memory among the ranks of a host, Gloo between hosts; ``shm`` or
    ``gloo``: that one everywhere; ``nccl``: rows over NCCL, from CPU memory through the GPU, all else as auto."""
    exchange: Literal["auto", "flat", "hierarchical"] = "auto"
    """The way of rows between workers: ``flat``: straight to their owners; ``hierarchical``: ranks of a host merge what
    they ask of other hosts, so that a row and its gradient cross the network once per host; ``auto``: flat. The two
    differ in rounding. With one host, or one worker on each, they are the same. Tables of flow pooled go straight."""
    hosts: str = "auto"
    """What a host is, to ``exchange``, to tables that stay on one and to copies, which are kept on another: ``auto``: a
    Ray node; ``label:NAME``: all nodes with the same value of the node label NAME (``ray start --labels``), a rack for
    instance. Workers are then placed on nodes with that label only. With a single such host copies may share a node."""
    address: str | None = None
    """Address of the Ray cluster. null: the job's own cluster inside ``ray job submit``, else a local one that is
    started for this run."""

    @property
    def min_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers follows the cluster's room."""
        return self.min_workers < self.max_workers

    @property
    def cpus_per_worker(self) -> float:
        return self.resources_per_worker.get("CPU", 1.0)

    @property
    def gpus_per_worker(self) -> float:
        return self.resources_per_worker.get("GPU", 1.0 if self.use_gpu else 0.0)

    @property
    def custom_resources(self) -> dict[str, float]:
        """What a worker needs beside CPU, GPU and memory."""
        return {name: n for name, n in self.resources_per_worker.items() if name not in ("CPU", "GPU")}

    def rules(self) -> Iterator[Problem]:
        pair = [self.min_workers, self.max_workers]
        if self.min_workers > self.max_workers:
            yield Problem("num_workers", f"is {pair}: min is greater than max; write [min, max]")
        elif self.is_elastic and self.min_workers == 0:
            yield Problem("num_workers", f"is {pair}: min must be >= 1; 0 stands for training in this process")
        for name, amount in self.resources_per_worker.items():
            if not amount >= 0:
                yield Problem(f"resources_per_worker.{name}", f"is {amount}; it must be >= 0")
        if self.resources_per_worker.get("CPU") == 0:
            yield Problem("resources_per_worker.CPU", "is 0; a worker needs a CPU: give it 1 or more, or leave it out")
        if "memory" in self.resources_per_worker:
            yield Problem("resources_per_worker.memory", "has its own field: set memory_per_worker")
        if self.use_gpu and self.gpus_per_worker <= 0:
            yield Problem("resources_per_worker.GPU", "is 0 although use_gpu is true: drop one of them")
        if not self.use_gpu and self.gpus_per_worker > 0:
            yield Problem("use_gpu", "is false although resources_per_worker asks for a GPU: set it to true")
        if host_label(self.hosts) is None:
            yield Problem("hosts", f"is {self.hosts!r}; it must be auto, or label: and a Ray node label")
        if self.transport == "nccl" and not self.use_gpu:
            yield Problem("transport", "is nccl, which needs GPUs: set use_gpu to true, or use auto, shm or gloo")
        if self.transport == "nccl" and self.exchange == "hierarchical":
            yield Problem("exchange", "is hierarchical, which merges rows in CPU memory: use flat with transport nccl")
        if self.transport == "shm" and self.use_gpu:
            yield Problem("transport", "is shm, which serves CPU ranks only: use auto or nccl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config):
    """When checkpoints are written and how many stay."""

    every_steps: int | None = bounded(None, low=1)
    """Steps between checkpoints; null: none during training."""
    num_to_keep: int | None = bounded(2, low=1)
    """Complete checkpoints to keep, the newest, and those that they build on; null: all."""
    full_every: int = bounded(1, low=1, high=1000)
    """Every how many checkpoints one holds all rows; those between hold what changed since the one before, and need it.
    1: all are full, so that each stands alone: none is lost with another, and a copied folder is enough."""
    max_failed: int | None = bounded(3, low=1)
    """Stop the run when this many checkpoints in a row could not be written; null: never."""
    at_end: bool = True
    """Whether a checkpoint of the last step is written when training ends."""
    rate_limit_bytes_per_s: ByteSize | None = bounded(None, low=1)  # noqa: RUF009
    """Upper bound on the bytes each worker writes per second while training goes on, such as ``200MB``; null: none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeoutConfig(Config):
    """Deadlines, in seconds. Nothing waits without one; an error names who was missing."""

    op_timeout_s: float = bounded(10.0, above=0, high=3600)
    """One exchange between ranks during training."""
    start_timeout_s: float = bounded(180.0, above=0, high=86_400)
    """Placing and starting all workers, up to the first step's header."""
    feed_timeout_s: float = bounded(300.0, above=0, high=86_400)
    """The next batch of the feed."""
    checkpoint_timeout_s: float = bounded(3600.0, above=0)
    """Writing one checkpoint."""
    stop_timeout_s: float = bounded(30.0, above=0, high=3600)
    """The end of a run, or its orderly stop after an interrupt, before the processes that remain are killed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """A run's name, its folder, its checkpoints and its deadlines."""

    name: str = ""
    """Name of the run: its folder under storage_path. A job file's name without its ending, if not given."""
    storage_path: str = "runs"
    """Folder of all runs: a local path (shared by all hosts, if there are several) or a URI (``s3://bucket/path``).
    Credentials come from the environment, never from here."""
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    """Checkpoints: how often, how many."""
    resume: Literal["auto", "must", "never"] | int = "auto"
    """``auto``: go on from the newest complete checkpoint, if any; ``must``: fail without one; ``never``: start at
    step 0; a number: go on from the checkpoint of exactly that step."""
    failure: FailureConfig = dataclasses.field(default_factory=FailureConfig)
    """What happens when workers are lost, and how rows are kept safe from that."""
    timeouts: TimeoutConfig = dataclasses.field(default_factory=TimeoutConfig)
    """Deadlines of everything that waits."""

    @property
    def run_dir(self) -> str:
        """``<storage_path>/<name>``; options after a URI's ``?`` stay at its end."""
        base, mark, options = (
            self.storage_path.partition("?") if "://" in self.storage_path else (self.storage_path, "", "")
        )
        return f"{base.rstrip('/')}/{self.name}{mark}{options}"

    def rules(self) -> Iterator[Problem]:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", self.name):
            allowed = "1 to 128 letters, digits, '_', '-' or '.', not starting with '-' or '.'"
            yield Problem("name", f"is {self.name!r}; it must be {allowed}")
        if not self.storage_path.strip():
            yield Problem("storage_path", "is empty; name a folder or a URI")
        if isinstance(self.resume, int) and self.resume < 0:
            yield Problem("resume", f"is {self.resume}; a step must be >= 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig(Config):
    """A whole job: model, data, tables, training, scaling, run."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    """The model to train."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """The samples to train and evaluate on."""
    tables: TablesConfig = dataclasses.field(default_factory=TablesConfig)
    """How the model's embedding tables are stored, sharded and optimized."""
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    """Epochs, optimizers, evaluation, logging."""
    scaling: ScalingConfig = dataclasses.field(default_factory=ScalingConfig)
    """Workers and their resources."""
    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    """Name, folder, checkpoints, deadlines."""

    def rules(self) -> Iterator[Problem]:
        yield from secret_problems(self.to_dict())
        if self.train.eval_every_steps is not None and not self.data.eval:
            yield Problem("train.eval_every_steps", "is set but data.eval names no files to evaluate on")
        for field, value in (("exchange", "hierarchical"), ("transport", "nccl")):
            if self.train.overlap and getattr(self.scaling, field) == value:
                why = f"is true, but scaling.{field} {value} runs one step after the other: leave it out"
                yield Problem("train.overlap", why)

    @property
    def num_threads(self) -> int:
        """Threads of one worker: train.num_threads, or one per CPU in scaling.resources_per_worker (1 by default)."""
        return self.train.num_threads or max(1, int(self.scaling.cpus_per_worker))

    def table_spec(
        self,
        name: str,
        *,
        num_embeddings: int,
        embedding_dim: int,
        data_type: str | None = None,
        init_min: float | None = None,
        init_max: float | None = None,
        seed: int = 0,
    ) -> TableSpec:
        """The data plane's view of a table that the model declares, with this job's settings for it applied.

        The arguments are the model's (an EmbeddingBagConfig's); ``data_type`` is a name such as ``FP32`` and ``seed``
        the table's own seed. What ``tables`` sets for the table wins. Raises ConfigError for a value out of range.
        """
        table = self.tables.of(name)
        optimizer = (table.optimizer or OptimizerConfig()).over(self.train.sparse_optimizer)
        spec = table.spec(
            name,
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            data_type=data_type,
            init_min=init_min,
            init_max=init_max,
            seed=seed,
            optimizer=optimizer.spec(self.train.lr),
        )
        spec.validate()
        return spec

    def table_schedule(self, name: str) -> ScheduleConfig:
        """The learning-rate schedule of a table: its own, else train.sparse_optimizer's, else train.schedule."""
        table = self.tables.of(name)
        optimizer = (table.optimizer or OptimizerConfig()).over(self.train.sparse_optimizer)
        return optimizer.schedule or self.train.schedule

    def table_lr(self, name: str, step: int) -> float:
        """Learning rate of a table at ``step``, counted from 0: a pure function of the step (S9)."""
        table = self.tables.of(name)
        optimizer = (table.optimizer or OptimizerConfig()).over(self.train.sparse_optimizer)
        return optimizer.spec(self.train.lr).lr * self.table_schedule(name).factor(step)

    def dense_lr(self, step: int) -> float:
        """Learning rate of the dense optimizer at ``step``, counted from 0: a pure function of the step (S9)."""
        dense = self.train.dense_optimizer
        lr = self.train.lr if dense.lr is None else dense.lr
        return lr * (dense.schedule or self.train.schedule).factor(step)


def _duplicates(path: str, names: list[str], what: str) -> Iterator[Problem]:
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(path, f"names {what} {name!r} twice")
