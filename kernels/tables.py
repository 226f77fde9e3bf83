"""Table configs with TorchRec's names and fields, and their translation into the data plane's ``TableSpec``.

Source of the fields: TorchRec 1.9.2, ``torchrec/modules/embedding_configs.py``. Fields that Shoal does not implement
are accepted, so that TorchRec code runs, and refused by name in ``table_spec``, before anything is trained.
"""
# TorchRec's schema test compares annotations literally, so the `typing` spellings stay.
# ruff: noqa: UP006, UP035, UP045

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any, Callable, List, Optional

import torch

from shoal.kernels.errors import ConfigError
from shoal.kernels.spec import ROW_DTYPE_BYTES, DataType, OptimizerSpec, PoolingType, TableSpec

__all__ = [
    "BaseEmbeddingConfig",
    "DataType",
    "DefaultInit",
    "EmbeddingBagConfig",
    "EmbeddingConfig",
    "PoolingType",
    "VirtualTableEvictionPolicy",
    "row_dtype",
    "table_seed",
    "table_spec",
]

_ROW_DTYPES = {DataType.FP32: torch.float32, DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}

#: Fields of TorchRec's configs that change what is trained and that Shoal does not implement, with what to do instead.
_UNSUPPORTED_FIELDS = {
    "num_embeddings_post_pruning": "prune when you export for serving",
    "need_pos": "pass position weights as per-sample weights",
    "input_dim": "leave it out: ids are looked up as they are",
    "total_num_buckets": "row blocks are set in the job's sharding options",
    "use_virtual_table": "every table stores only the rows it has trained",
    "virtual_table_eviction_policy": "rows are not evicted",
    "enable_embedding_update": "rows change through the optimizer only",
    "stash_weights": "rows are not moved off their device",
}


@dataclass
class VirtualTableEvictionPolicy:
    """TorchRec's base class of eviction policies; present for its signatures, refused by ``table_spec``."""


@dataclass(frozen=True)
class DefaultInit:
    """TorchRec's default initialiser, uniform in [low, high): marks a config whose rows Shoal may initialise by id."""

    low: float
    high: float

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.init.uniform_(weight, a=self.low, b=self.high)


@dataclass
class BaseEmbeddingConfig:
    """One table: ids 0 .. num_embeddings-1, ``embedding_dim`` wide, read by the features ``feature_names``.

    Rows start uniform in [weight_init_min, weight_init_max), by default +-sqrt(1 / num_embeddings). A custom
    ``init_fn(weight)`` works in unsharded modules only.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: List[str] = field(default_factory=list)
    weight_init_max: Optional[float] = None
    weight_init_min: Optional[float] = None
    num_embeddings_post_pruning: Optional[int] = None
    init_fn: Optional[Callable[[torch.Tensor], Optional[torch.Tensor]]] = None
    need_pos: bool = False
    input_dim: Optional[int] = None
    total_num_buckets: Optional[int] = None
    use_virtual_table: bool = False
    virtual_table_eviction_policy: Optional[VirtualTableEvictionPolicy] = None
    enable_embedding_update: bool = False
    stash_weights: bool = False

    def __post_init__(self) -> None:
        if self.init_fn is None:
            self.init_fn = DefaultInit(self.get_weight_init_min(), self.get_weight_init_max())

    def get_weight_init_max(self) -> float:
        """Upper bound of the initial weights. ConfigError for a table without rows and without given bounds."""
        return self._default_bound() if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """Lower bound of the initial weights. ConfigError for a table without rows and without given bounds."""
        return -self._default_bound() if self.weight_init_min is None else self.weight_init_min

    def _default_bound(self) -> float:
        if self.num_embeddings < 1:
            raise ConfigError(
                f"table {self.name!r}: num_embeddings is {self.num_embeddings}; it must be >= 1, or give "
                "weight_init_min and weight_init_max"
            )
        return math.sqrt(1 / self.num_embeddings)

    def num_features(self) -> int:
        """Number of features that read this table."""
        return len(self.feature_names)


@dataclass
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """A table whose rows are pooled per bag: SUM or MEAN."""

    pooling: PoolingType = PoolingType.SUM


@dataclass
class EmbeddingConfig(BaseEmbeddingConfig):
    """A table whose rows are returned one by one (a sequence)."""


def row_dtype(config: BaseEmbeddingConfig) -> torch.dtype:
    """Torch dtype of the table's rows. ConfigError for a type that cannot be trained."""
    if config.data_type not in ROW_DTYPE_BYTES:
        allowed = ", ".join(data_type.value for data_type in ROW_DTYPE_BYTES)
        raise ConfigError(
            f"table {config.name!r}: data_type {config.data_type} cannot be trained; use one of {allowed} "
            "(the others are serving formats)"
        )
    return _ROW_DTYPES[config.data_type]


def table_seed(run_seed: int, name: str) -> int:
    """Seed of a table in [0, 2^63): a function of the run's seed and the table's name, the same in every process.

    Source: the first 8 bytes of BLAKE2b("<run seed>:<name>").
    """
    digest = hashlib.blake2b(f"{run_seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def table_spec(
    config: BaseEmbeddingConfig, *, seed: int, optimizer: Optional[OptimizerSpec] = None, num_blocks: int = 1
) -> TableSpec:
    """The data plane's description of a table. ``seed`` is the table's, see ``table_seed``.

    Raises ConfigError naming the table and the field for what Shoal does not implement or allow.
    """
    row_dtype(config)
    fresh: Any = type(config)(num_embeddings=1, embedding_dim=1)
    for name, advice in _UNSUPPORTED_FIELDS.items():
        value = getattr(config, name)
        if value != getattr(fresh, name):
            raise ConfigError(f"table {config.name!r}: {name}={value!r} is not supported; {advice}")
    if config.init_fn is not None and not isinstance(config.init_fn, DefaultInit):
        raise ConfigError(
            f"table {config.name!r}: init_fn cannot be used in a sharded table, whose rows are created one by one at "
            "their first use; set weight_init_min and weight_init_max"
        )
    spec = TableSpec(
        name=config.name,
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        data_type=config.data_type,
        optimizer=optimizer if optimizer is not None else OptimizerSpec(),
        init_min=config.get_weight_init_min(),
        init_max=config.get_weight_init_max(),
        seed=seed,
        num_blocks=num_blocks,
    )
    spec.validate()
    return spec
