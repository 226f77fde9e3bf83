"""What a table, a feature and a sparse optimizer are: immutable values shared by every layer.

Pure: no tensors, no I/O. The names follow TorchRec (``DataType``, ``PoolingType``); see ``jagged`` and ``tables`` for
the TorchRec-compatible classes that users construct.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import NamedTuple

from shoal.kernels.errors import ConfigError


class DataType(enum.Enum):
    """Element type of stored rows. Only FP32, FP16 and BF16 can be trained; the others name serving formats."""

    FP32 = "FP32"
    FP16 = "FP16"
    FP8 = "FP8"
    NFP8 = "NFP8"
    INT64 = "INT64"
    INT32 = "INT32"
    INT8 = "INT8"
    UINT8 = "UINT8"
    INT4 = "INT4"
    INT2 = "INT2"
    BF16 = "BF16"

    def __str__(self) -> str:
        return self.value


#: The widest table.
DIM_MAX = 4096
#: Bytes per element of the trainable row types.
ROW_DTYPE_BYTES = {DataType.FP32: 4, DataType.FP16: 2, DataType.BF16: 2}


class PoolingType(enum.Enum):
    """How the rows of a bag become one vector. NONE: not at all (a sequence)."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


class OptimizerKind(enum.IntEnum):
    """Sparse optimizers; the values are part of the native ABI."""

    SGD = 0
    ADAGRAD = 1
    ROWWISE_ADAGRAD = 2
    ADAM = 3


class WeightDecayMode(enum.IntEnum):
    """NONE; L2: added to the gradient; DECOUPLED: w -= lr * decay * w. Touched rows only."""

    NONE = 0
    L2 = 1
    DECOUPLED = 2


class IdPolicy(enum.IntEnum):
    """What becomes of an id outside a static table's range [0, num_embeddings).

    ERROR: every rank raises BadIdError before any row changes. HASH: mixed hash modulo num_embeddings. OOV: the last
    row, num_embeddings - 1, which is reserved for it by declaration. DROP: the id leaves its bag. All are counted.
    """

    ERROR = 0
    HASH = 1
    OOV = 2
    DROP = 3


class Codec(enum.IntEnum):
    """Wire formats of rows and gradients (``codec``); the values are part of the native ABI."""

    FP32 = 0
    FP16 = 1
    BF16 = 2
    INT8 = 3


def encoded_bytes(codec: Codec, embedding_dim: int) -> int:
    """Bytes of one row on the wire (PROTOCOLS S10); as the native codec has it."""
    match codec:
        case Codec.FP32:
            return 4 * embedding_dim
        case Codec.FP16 | Codec.BF16:
            return -(-2 * embedding_dim // 4) * 4
        case Codec.INT8:
            return 4 + -(-embedding_dim // 4) * 4


class Flow(enum.IntEnum):
    """What owners return to those who look rows up; the values are part of the native ABI."""

    #: Each row once; bags are made where they are asked for.
    ROWS = 0
    #: The partial sum of each bag's rows per row block; gradients of bags come back.
    POOLED = 1
    #: As POOLED, but per owner: fewer sums, whose bits depend on the placement (promise 2 is withdrawn).
    POOLED_BY_OWNER = 2


class WireCodecs(NamedTuple):
    """How the values of a table's rows and their gradients travel. In the pooled flow the codecs are those of partial
    sums and of gradients of bags."""

    values: Codec = Codec.FP32
    gradients: Codec = Codec.FP32
    flow: Flow = Flow.ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """A sparse optimizer and its constants; all its state is stored in the row, as float32.

    With g the summed gradient of a row in a step (after L2 decay g += weight_decay * w):

    * ``sgd``: w -= lr * g
    * ``adagrad``: v += g * g; w -= lr * g / (sqrt(v) + eps)
    * ``rowwise_adagrad``: m += mean(g * g); w -= lr * g / (sqrt(m) + eps)   (FBGEMM's EXACT_ROWWISE_ADAGRAD)
    * ``adam``: t = number of the global step, from 1; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g*g;
      w -= lr * (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps). Untouched rows do not decay.

    Decoupled decay first does w -= lr * weight_decay * w.
    """

    kind: OptimizerKind = OptimizerKind.ROWWISE_ADAGRAD
    #: Learning rate, > 0; a schedule may replace it per step.
    lr: float = 0.01
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    #: First value of the Adagrad accumulators, >= 0.
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0
    weight_decay_mode: WeightDecayMode = WeightDecayMode.NONE

    def slots(self, embedding_dim: int) -> tuple[tuple[str, int], ...]:
        """Names and widths (in float32) of the state of one row, in storage order."""
        match self.kind:
            case OptimizerKind.SGD:
                return ()
            case OptimizerKind.ADAGRAD:
                return (("sum", embedding_dim),)
            case OptimizerKind.ROWWISE_ADAGRAD:
                return (("momentum1", 1),)
            case OptimizerKind.ADAM:
                return (("exp_avg", embedding_dim), ("exp_avg_sq", embedding_dim))

    @property
    def has_row_state(self) -> bool:
        """Whether state is one value per row, of all its columns; else it is one or more values per column."""
        return self.kind is OptimizerKind.ROWWISE_ADAGRAD

    def slot_width(self, embedding_dim: int) -> int:
        """Number of float32 values of optimizer state per row."""
        return sum(width for _, width in self.slots(embedding_dim))

    def validate(self, where: str) -> None:
        """Raise ConfigError naming ``where``, the field, its value and the allowed range."""
        checks = (
            ("lr", self.lr, self.lr >= 0, ">= 0"),
            ("eps", self.eps, self.eps >= 0, ">= 0"),
            ("beta1", self.beta1, 0 <= self.beta1 < 1, "in [0, 1)"),
            ("beta2", self.beta2, 0 <= self.beta2 < 1, "in [0, 1)"),
            ("initial_accumulator", self.initial_accumulator, self.initial_accumulator >= 0, ">= 0"),
            ("weight_decay", self.weight_decay, self.weight_decay >= 0, ">= 0"),
        )
        for name, value, ok, allowed in checks:
            if not (ok and math.isfinite(value)):
                raise ConfigError(f"{where}.{name} is {value}; it must be {allowed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnBlock:
    """Which columns of a logical table a TableSpec is: a table of its own to the data plane, placed on its own.

    Its rows have the ids of the logical table's, and their values are those of its columns: initial values and
    stochastic rounding are functions of the logical table's seed and the column's number in it.
    """

    #: Name of the logical table, its width, this block's number in it and the block's first column.
    table: str
    table_dim: int
    index: int
    first_column: int
    #: Whether row-wise optimizer state is of this block's columns alone (TorchRec's behaviour, which depends on the cut
    #: and so gives up parity with the uncut table) and not of the whole row (PROTOCOLS S7).
    has_own_statistic: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableSpec:
    """One table as the data plane sees it: whole, or one column block of a logical table.

    ``num_blocks`` never changes during the table's life.
    """

    name: str
    #: Ids are 0 .. num_embeddings-1; 0 means dynamic: any 64-bit id, rows appear as they are trained.
    num_embeddings: int
    embedding_dim: int
    data_type: DataType = DataType.FP32
    optimizer: OptimizerSpec = dataclasses.field(default_factory=OptimizerSpec)
    #: Rows start uniform in [init_min, init_max), a pure function of (seed, id, column).
    init_min: float = 0.0
    init_max: float = 0.0
    seed: int = 0
    #: Number of row blocks, a power of two: the units of placement and migration.
    num_blocks: int = 1
    #: Of a table that is cut into columns (``column_blocks.cut_columns``); then ``seed`` is the logical table's.
    columns: ColumnBlock | None = None

    @property
    def logical_name(self) -> str:
        """The name that users know: of the table that this is, or is a column block of."""
        return self.columns.table if self.columns else self.name

    @property
    def first_column(self) -> int:
        """The number that column 0 has in the logical table."""
        return self.columns.first_column if self.columns else 0

    @property
    def logical_dim(self) -> int:
        """Width of the logical table."""
        return self.columns.table_dim if self.columns else self.embedding_dim

    @property
    def shares_statistic(self) -> bool:
        """Whether the update needs a sum over the column blocks of a row (S7): owners exchange it before they apply."""
        return self.columns is not None and self.optimizer.has_row_state and not self.columns.has_own_statistic

    @property
    def is_static(self) -> bool:
        return self.num_embeddings > 0

    @property
    def row_bytes(self) -> int:
        """Bytes of weights and optimizer state of one row (the store adds its metadata)."""
        return self.embedding_dim * ROW_DTYPE_BYTES[self.data_type] + 4 * self.optimizer.slot_width(self.embedding_dim)

    def validate(self) -> None:
        """Raise ConfigError naming the table, the field, its value and the allowed range."""
        where = f"table {self.name!r}"
        if not self.name:
            raise ConfigError("a table has no name")
        if self.num_embeddings < 0:
            raise ConfigError(f"{where}: num_embeddings is {self.num_embeddings}; it must be >= 0 (0: dynamic)")
        if not 1 <= self.embedding_dim <= DIM_MAX:
            raise ConfigError(f"{where}: embedding_dim is {self.embedding_dim}; it must be in [1, {DIM_MAX}]")
        if self.data_type not in ROW_DTYPE_BYTES:
            allowed = ", ".join(d.value for d in ROW_DTYPE_BYTES)
            raise ConfigError(f"{where}: data_type {self.data_type} cannot be trained; use one of {allowed}")
        if self.num_blocks < 1 or self.num_blocks & (self.num_blocks - 1) or self.num_blocks > 1 << 16:
            raise ConfigError(f"{where}: num_blocks is {self.num_blocks}; it must be a power of two in [1, 65536]")
        if not (math.isfinite(self.init_min) and math.isfinite(self.init_max) and self.init_min <= self.init_max):
            raise ConfigError(f"{where}: init range [{self.init_min}, {self.init_max}) is empty or not finite")
        last_column = self.first_column + self.embedding_dim
        if self.columns and not (0 <= self.first_column < last_column <= self.logical_dim <= DIM_MAX):
            raise ConfigError(
                f"{where}: columns [{self.first_column}, {last_column}) are not in [0, {self.logical_dim}), or the "
                f"table is wider than {DIM_MAX}"
            )
        self.optimizer.validate(f"{where}: optimizer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """One lookup: a feature read from a KeyedJaggedTensor, the table it reads and how its bags are pooled.

    The same feature name may occur several times (a feature read by several tables or collections). A feature that
    reads a table cut into columns is one of these per column block, one after the other in column order: together they
    are its columns of the output.
    """

    name: str
    #: Index into the step plan's list of tables.
    table: int
    #: Index of the collection (nn.Module) whose output this lookup is part of.
    collection: int
    pooling: PoolingType = PoolingType.SUM
    #: Whether per-sample weights scale the rows.
    is_weighted: bool = False
    policy: IdPolicy = IdPolicy.ERROR
