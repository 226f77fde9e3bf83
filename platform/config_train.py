"""Configuration of tables, optimizers and the training loop. Pure; see ``config`` for the rest and the conventions."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Literal

from shoal.kernels.column_blocks import column_widths, cut_columns
from shoal.kernels.spec import (
    DIM_MAX,
    Codec,
    DataType,
    Flow,
    OptimizerKind,
    OptimizerSpec,
    TableSpec,
    WeightDecayMode,
    WireCodecs,
)
from shoal.platform.config_fields import ByteSize, Config, Problem, bounded
from shoal.platform.placement import ShardingType, default_num_blocks
from shoal.platform.topology import LOCAL_BYTES_PER_S, MEMORY_BYTES_PER_S, NETWORK_BYTES_PER_S


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Config):
    """A learning-rate schedule: a factor that is a pure function of the step."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: ``constant``, or falling ``linear``-ly or as a ``cosine`` to min_factor."""
    warmup_steps: int = bounded(0, low=0)
    """Steps over which the rate rises linearly to its full value."""
    decay_steps: int | None = bounded(None, low=1)
    """Steps after the warm-up over which the rate falls; needed unless constant."""
    min_factor: float = bounded(0.0, low=0, high=1)
    """Factor at and after the end of the fall."""

    def rules(self) -> Iterator[Problem]:
        if self.kind != "constant" and self.decay_steps is None:
            yield Problem("decay_steps", f"is needed by the {self.kind} schedule")

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by at ``step``, counted from 0; in [0, 1]."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant" or self.decay_steps is None:
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / self.decay_steps)
        fall = 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_factor + (1.0 - self.min_factor) * fall


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config):
    """A sparse optimizer: applied once per step to each row that the step touched. Null fields are inherited: a
    table's optimizer from ``train.sparse_optimizer``, and that from the defaults named below."""

    kind: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] | None = None
    """Update rule; rowwise_adagrad by default (one accumulator per row)."""
    lr: float | None = bounded(None, low=0)
    """Learning rate; by default train.lr."""
    eps: float | None = bounded(None, low=0)
    """Added to the denominator; 1e-8 by default."""
    betas: tuple[float, float] | None = bounded(None, low=0, below=1)
    """Adam's decay rates; [0.9, 0.999] by default."""
    initial_accumulator: float | None = bounded(None, low=0)
    """First value of Adagrad's accumulators; 0 by default."""
    weight_decay: float | None = bounded(None, low=0)
    """Weight decay of touched rows; 0 by default."""
    weight_decay_mode: Literal["l2", "decoupled"] | None = None
    """``l2``: added to the gradient (default); ``decoupled``: taken from the weights."""
    schedule: ScheduleConfig | None = None
    """Learning-rate schedule; by default train.schedule."""

    def over(self, base: OptimizerConfig) -> OptimizerConfig:
        """These settings, with ``base``'s where a field is null."""
        return _over(self, base)

    def spec(self, lr: float) -> OptimizerSpec:
        """The data plane's optimizer, with ``lr`` where none is set."""
        defaults = OptimizerSpec()
        betas = self.betas or (defaults.beta1, defaults.beta2)
        decay = self.weight_decay or 0.0
        mode = WeightDecayMode[(self.weight_decay_mode or "l2").upper()] if decay else WeightDecayMode.NONE
        return OptimizerSpec(
            kind=OptimizerKind[(self.kind or "rowwise_adagrad").upper()],
            lr=_first(self.lr, lr),
            eps=_first(self.eps, defaults.eps),
            beta1=betas[0],
            beta2=betas[1],
            initial_accumulator=_first(self.initial_accumulator, defaults.initial_accumulator),
            weight_decay=decay,
            weight_decay_mode=mode,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseOptimizerConfig(Config):
    """The optimizer of the dense part: torch's own class of that name."""

    kind: Literal["sgd", "adagrad", "adam", "adamw"] = "adam"
    """torch.optim.SGD, Adagrad, Adam or AdamW."""
    lr: float | None = bounded(None, low=0)
    """Learning rate; null: train.lr."""
    eps: float | None = bounded(None, low=0)
    """Added to the denominator; null: torch's default for the kind. sgd has none."""
    betas: tuple[float, float] | None = bounded(None, low=0, below=1)
    """Decay rates of adam and adamw; null: [0.9, 0.999]."""
    momentum: float = bounded(0.0, low=0, below=1)
    """Momentum of sgd."""
    weight_decay: float = bounded(0.0, low=0)
    """Weight decay as torch's class applies it."""
    schedule: ScheduleConfig | None = None
    """Learning-rate schedule; null: train.schedule."""

    def rules(self) -> Iterator[Problem]:
        if self.momentum and self.kind != "sgd":
            yield Problem("momentum", f"is {self.momentum}, which only sgd has; kind is {self.kind}")
        if self.eps is not None and self.kind == "sgd":
            yield Problem("eps", f"is {self.eps}, which sgd does not have; leave it out or choose another kind")
        if self.betas is not None and self.kind not in ("adam", "adamw"):
            yield Problem("betas", f"is {list(self.betas)}, which only adam and adamw have; kind is {self.kind}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableConfig(Config):
    """How one table is stored, sharded and optimized. Null fields are inherited from ``tables.defaults``, then from
    the model's own EmbeddingBagConfig. The width of a table is the model's affair and is not set here."""

    num_embeddings: int | None = bounded(None, low=0)
    """Ids are 0 to num_embeddings - 1; 0: dynamic, any 64-bit id, rows appear as they are trained."""
    data_type: Literal["fp32", "fp16", "bf16"] | None = None
    """Type of stored weights; fp16 and bf16 round stochastically, optimizer state stays fp32."""
    sharding_type: (
        Literal[
            "auto",
            "row_wise",
            "table_wise",
            "column_wise",
            "table_row_wise",
            "table_column_wise",
            "grid_shard",
            "data_parallel",
        ]
        | None
    ) = None
    """``row_wise`` (default): row blocks spread over all workers; ``table_wise``: all on one worker; ``column_wise``:
    each column block on one worker; ``table_row_wise``: row blocks spread over the workers of one host;
    ``table_column_wise``: each column block on one worker, all on one host; ``grid_shard``: each column block spread by
    rows over the workers of one host, a host each; ``data_parallel``: row_wise, and every worker keeps the values of
    all rows to read, as fp32: for small tables of fixed size; ``auto``: what the planner finds best for a sample of the
    training data (``shoal plan`` shows it), kept in the run's config.yaml."""
    column_blocks: int | None = bounded(None, low=1, high=DIM_MAX)
    """Into how many parts the columns are cut, as even as multiples of 4 allow; each is placed on its own, by rows
    where row_wise. By default 1; when column_wise, table_column_wise or grid_shard, as many as parts of at least 128
    columns give (TorchRec's rule)."""
    optimizer_scope: Literal["table", "shard"] | None = None
    """Row-wise optimizer state of a table that is cut into columns. ``table`` (default): one value per row, as of the
    uncut table, for one small exchange more a step. ``shard``: one per column block, as in TorchRec: results then
    depend on the cut and no longer equal those of the uncut table."""
    values_codec: Literal["fp32", "fp16", "bf16", "int8"] | None = None
    """How rows travel to the workers that ask for them; fp32 by default. ``int8``: 256 levels over each row. What is
    rounded is rounded for a worker's own rows, too. Stored rows and optimizer state keep their type."""
    gradients_codec: Literal["fp32", "fp16", "bf16", "int8"] | None = None
    """How the summed gradients of rows travel to their owners; fp32 by default. ``fp16`` loses what is below 6e-8."""
    flow: Literal["auto", "rows", "pooled"] | None = None
    """What a row's owner returns: ``rows`` (default): each row once, for bags made by the worker that asks. ``pooled``:
    partial sums of each bag, one per row block: fewer bytes for long bags over few row blocks (num_blocks 1, or
    placement_exact false). It needs pooled features without learned weights. ``auto``: the cheaper one for a sample of
    the training data (``rows`` for weighted features), kept in the run's config.yaml. A run never changes its flow, as
    that would change its numbers in rounding; it measures both, and event ``flow_advice`` says what to set."""
    placement_exact: bool | None = None
    """With flow pooled: false sums per worker instead of per row block. Results then differ in rounding when rows move
    or the number of workers changes. True by default."""
    num_blocks: int | None = bounded(None, low=1, high=65_536)
    """Row blocks, a power of two: the units of placement and migration, fixed for the table's life. By default 1 where
    they are all on one worker, else 64, or fewer for a small table."""
    load_factor: float | None = bounded(None, above=0)
    """How much busier the table is than its bytes say: placement evens out bytes times this. 1 by default; set for all
    tables by the planner when one of them is ``auto``."""
    init_min: float | None = None
    """Lower end of the uniform initial weights; by default -sqrt(1 / num_embeddings)."""
    init_max: float | None = None
    """Upper end of the uniform initial weights; by default sqrt(1 / num_embeddings)."""
    optimizer: OptimizerConfig | None = None
    """Sparse optimizer of the table; null fields come from train.sparse_optimizer."""

    def rules(self) -> Iterator[Problem]:
        if self.num_blocks is not None and self.num_blocks & (self.num_blocks - 1):
            yield Problem("num_blocks", f"is {self.num_blocks}; it must be a power of two")
        if self.sharding_type == "data_parallel" and self.num_embeddings == 0:
            yield Problem("sharding_type", "is data_parallel, which needs a fixed number of rows: set num_embeddings")
        if self.sharding_type == "data_parallel" and self.flow == "pooled":
            yield Problem("flow", "is pooled; a data_parallel table is read where it is")
        if self.sharding_type == "data_parallel" and (self.column_blocks or 1) > 1:
            yield Problem("column_blocks", f"is {self.column_blocks}; a data_parallel table is kept whole")
        if (self.init_min is None) != (self.init_max is None):
            yield Problem("init_min", "and init_max must be set together")
        elif self.init_min is not None and self.init_max is not None and not self.init_min <= self.init_max:
            yield Problem("init_min", f"is {self.init_min}, above init_max, {self.init_max}")

    def over(self, base: TableConfig) -> TableConfig:
        """These settings, with ``base``'s where a field is null."""
        merged = _over(self, base)
        if self.optimizer is not None and base.optimizer is not None:
            merged = merged.replace(optimizer=self.optimizer.over(base.optimizer))
        return merged

    @property
    def is_table_wise(self) -> bool:
        """Whether all rows, or those of a column block, are on one worker."""
        return self.placement.is_whole

    @property
    def placement(self) -> ShardingType:
        """What placement is to do with the table, or with each of its column blocks, which are tables to it."""
        is_open = self.sharding_type in (None, "auto")
        return ShardingType.ROW_WISE if is_open else ShardingType(self.sharding_type)

    @property
    def codecs(self) -> WireCodecs:
        """Wire formats and flow of the table."""
        flow = Flow.ROWS
        if self.flow == "pooled":
            flow = Flow.POOLED_BY_OWNER if self.placement_exact is False else Flow.POOLED
        values, gradients = (Codec[(codec or "fp32").upper()] for codec in (self.values_codec, self.gradients_codec))
        return WireCodecs(values, gradients, flow)

    def cut(self, spec: TableSpec) -> tuple[TableSpec, ...]:
        """The column blocks of a table of these settings; the table itself where it is not cut. Raises ConfigError
        where it has fewer columns than blocks."""
        if self.column_blocks is None and not self.placement.cuts_columns:
            return (spec,)
        widths = column_widths(spec.embedding_dim, self.column_blocks, table=spec.name)
        return cut_columns(spec, widths, has_own_statistic=self.optimizer_scope == "shard")

    def spec(
        self,
        name: str,
        *,
        num_embeddings: int,
        embedding_dim: int,
        data_type: str | None,
        init_min: float | None,
        init_max: float | None,
        seed: int,
        optimizer: OptimizerSpec,
    ) -> TableSpec:
        """The data plane's table: these settings, with the arguments where a field is null."""
        num_embeddings = _first(self.num_embeddings, num_embeddings)
        # A dynamic table has no size to take the bound from; its rows start as those of a table of 10,000 ids.
        bound = math.sqrt(1.0 / (num_embeddings or 10_000))
        return TableSpec(
            name=name,
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            data_type=DataType[(self.data_type or data_type or "fp32").upper()],
            optimizer=optimizer,
            init_min=_first(self.init_min, init_min, -bound),
            init_max=_first(self.init_max, init_max, bound),
            seed=seed,
            num_blocks=self.num_blocks or (1 if self.is_table_wise else default_num_blocks(num_embeddings)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerConfig(Config):
    """What the planner assumes of the machines. Its choices depend on the ratios of the speeds; the defaults are
    assumptions about common servers, not measurements."""

    workers_per_host: int | None = bounded(None, low=1)
    """Workers on one host; null: all of them where Ray runs on this machine only, else one."""
    memory_bytes_per_s: ByteSize = bounded(MEMORY_BYTES_PER_S, low=1)  # noqa: RUF009
    """What one worker reads and writes of rows at random."""
    local_bytes_per_s: ByteSize = bounded(LOCAL_BYTES_PER_S, low=1)  # noqa: RUF009
    """What one worker exchanges with others on its host."""
    network_bytes_per_s: ByteSize = bounded(NETWORK_BYTES_PER_S, low=1)  # noqa: RUF009
    """What one worker exchanges with other hosts (10 Gbit/s by default)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablesConfig(Config):
    """Settings of all tables, and of single ones by name."""

    defaults: TableConfig = dataclasses.field(default_factory=TableConfig)
    """Settings of every table that does not have its own."""
    overrides: dict[str, TableConfig] = dataclasses.field(default_factory=dict)
    """Settings by table name; null fields come from the defaults."""
    planner: PlannerConfig = dataclasses.field(default_factory=PlannerConfig)
    """What ``auto`` and ``shoal plan`` assume of the machines."""

    @property
    def has_load_factors(self) -> bool:
        """Whether placement evens out something other than bytes."""
        return any(table.load_factor is not None for table in (self.defaults, *self.overrides.values()))

    def of(self, name: str) -> TableConfig:
        """The settings of one table: its own over the defaults."""
        return self.overrides[name].over(self.defaults) if name in self.overrides else self.defaults


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """The training loop."""

    epochs: int = bounded(1, low=1)
    """Passes over data.train."""
    max_steps: int | None = bounded(None, low=1)
    """Stop after this many steps; null: after the epochs."""
    seed: int = bounded(0, low=0, high=2**63 - 1)
    """Seed of the data order, the row initialisation, dropout and the dense initialisation."""
    lr: float = bounded(0.01, low=0)
    """Learning rate of both optimizers, unless they set their own."""
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    """Learning-rate schedule of both optimizers, unless they set their own."""
    sparse_optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """Optimizer of the embedding tables."""
    dense_optimizer: DenseOptimizerConfig = dataclasses.field(default_factory=DenseOptimizerConfig)
    """Optimizer of everything else."""
    eval_every_steps: int | None = bounded(None, low=1)
    """Steps between evaluations on data.eval; null: once, when training ends."""
    log_every_steps: int = bounded(50, low=1)
    """Steps between progress records: console line, TensorBoard, events."""
    gradient_accumulation_steps: int = bounded(1, low=1, high=1024)
    """Micro-batches of a step: a worker runs the model on one after the other and keeps the activations of one at a
    time. data.batch_size stays what one update is made of; rows are fetched, and gradients exchanged, once per step."""
    clip_grad_norm: float | None = bounded(None, low=1e-6)
    """Scale a step's gradients, dense and of rows together, so that their global norm is at most this; null: never. The
    norm is that of the unsharded model. It takes one small exchange more a step, and is logged as grad_norm."""
    overlap: bool | None = None
    """Whether the ids of later batches travel with the rows and gradients of the present one, as in TorchRec's
    TrainPipelineSparseDist: two exchanges a step instead of four, and the same numbers to the last bit. Signals such as
    a stop take effect up to two steps later. null: where the workers are on several hosts. scaling.exchange
    hierarchical and transport nccl run one step after the other."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the dense part: ``bf16`` runs the model under torch's autocast. Parameters, optimizers, rows and losses stay
    fp32."""
    max_skipped_steps: int = bounded(0, low=0)
    """Steps with a NaN or infinite loss or gradient that are skipped, on all ranks, before the run stops."""
    num_threads: int | None = bounded(None, low=1, high=1024)
    """Threads of each worker; null: one per CPU in scaling.resources_per_worker, so 1 by default, also with
    num_workers 0. Rows do not depend on it; the dense part may in its last bits, as torch divides its work."""


ConfigT = typing.TypeVar("ConfigT", bound=Config)


def _over(own: ConfigT, base: ConfigT) -> ConfigT:
    fields = dataclasses.fields(own)  # type: ignore[arg-type]
    return own.replace(**{f.name: _first(getattr(own, f.name), getattr(base, f.name)) for f in fields})


def _first(*values: typing.Any) -> typing.Any:
    return next((value for value in values if value is not None), None)
