"""EmbeddingBagCollection and EmbeddingCollection: TorchRec's modules, which a session can attach to sharded tables.

On its own a collection is an ordinary module with dense weights (``embedding_bags.<table>.weight`` or
``embeddings.<table>.weight``), initialised by the same function of (seed, id, column) as the rows of a sharded table:
an unsharded model is the oracle of a sharded one. Attached, it holds no weights, and its forward asks the session.

Source of the interface: TorchRec 1.9.2, ``torchrec/modules/embedding_modules.py``; the bodies are our own.

Shape letters: B batch, D width, N ids of one feature.
"""
# TorchScript and TorchRec's schema test compare annotations literally, so the `typing` spellings stay.
# ruff: noqa: UP006, UP032, UP035, UP045

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.fx
from torch import nn

from shoal.kernels.errors import ConfigError
from shoal.kernels.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from shoal.kernels.rowstore import initial_rows
from shoal.kernels.spec import TableSpec
from shoal.kernels.tables import (
    BaseEmbeddingConfig,
    DefaultInit,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    row_dtype,
    table_seed,
)
from shoal.kernels.vbe import expand_inverse_indices, pad_strides

_POOLING_MODES = {PoolingType.SUM: "sum", PoolingType.MEAN: "mean"}

#: Rows initialised at once: bounds the temporary float32 copy.
_INIT_ROWS_AT_ONCE = 1 << 16

_is_lazy: contextvars.ContextVar[bool] = contextvars.ContextVar("shoal_lazy_tables", default=False)


@contextlib.contextmanager
def lazy_tables() -> Iterator[None]:
    """Collections constructed inside take no memory for their tables: the weights are on the meta device."""
    token = _is_lazy.set(True)
    try:
        yield
    finally:
        _is_lazy.reset(token)


def get_embedding_names_by_table(tables: List[EmbeddingBagConfig] | List[EmbeddingConfig]) -> List[List[str]]:
    """Output names per table: the feature's, or ``feature@table`` everywhere if several tables read the feature."""
    num_readers: Dict[str, int] = {}
    for config in tables:
        for name in config.feature_names:
            num_readers[name] = num_readers.get(name, 0) + 1
    return [
        [name if num_readers[name] == 1 else f"{name}@{config.name}" for name in config.feature_names]
        for config in tables
    ]


def reset_rows(module: nn.Module, config: BaseEmbeddingConfig, seed: int) -> None:
    """Give the rows of a module's weight [num_embeddings, D] their initial values, unless it is on the meta device.

    With the default initialiser they are those of the row store for the table seed of ``seed``, bit for bit.
    """
    weight = module.get_parameter("weight")
    if weight.device.type == "meta":
        return
    with torch.no_grad():
        if config.init_fn is not None and not isinstance(config.init_fn, DefaultInit):
            config.init_fn(weight)
            return
        spec = TableSpec(
            name=config.name,
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            data_type=config.data_type,
            init_min=config.get_weight_init_min(),
            init_max=config.get_weight_init_max(),
            seed=table_seed(seed, config.name),
        )
        for start in range(0, config.num_embeddings, _INIT_ROWS_AT_ONCE):
            end = min(start + _INIT_ROWS_AT_ONCE, config.num_embeddings)
            weight[start:end].copy_(initial_rows(spec, torch.arange(start, end)))


@torch.fx.wrap
def _bags_of(features: Dict[str, JaggedTensor], name: str) -> JaggedTensor:
    """The bags of a feature; KeyError naming the features there are."""
    if name not in features:
        raise KeyError("the batch has no feature '{}'; it has {}".format(name, list(features.keys())))
    return features[name]


@torch.fx.wrap
def _inverse_rows(inverse_indices: Optional[Tuple[List[str], torch.Tensor]], feature_names: List[str]) -> torch.Tensor:
    """Rows of the inverse indices in the order of ``feature_names``; an empty tensor without inverse indices."""
    if inverse_indices is None:
        return torch.empty(0, dtype=torch.int64)
    rows = {name: i for i, name in enumerate(inverse_indices[0])}
    picks = torch.tensor([rows[name] for name in feature_names], device=inverse_indices[1].device)
    return torch.index_select(inverse_indices[1], 0, picks)


@torch.fx.wrap
def _concat_pooled(pooled: List[torch.Tensor], inverse_rows: torch.Tensor) -> torch.Tensor:
    """Pooled features side by side, after every sample has picked its bag where bags are shared (VBE)."""
    if inverse_rows.numel() > 0:
        expanded: List[torch.Tensor] = []
        for i, tensor in enumerate(pooled):
            expanded.append(torch.index_select(tensor, 0, inverse_rows[i]))
        pooled = expanded
    return torch.cat(pooled, dim=1)


def _meta_weight(config: BaseEmbeddingConfig, device: Optional[torch.device]) -> Optional[torch.Tensor]:
    """The weight of a table that takes no memory. torch would draw its initial values, for which it imports its
    compiler (1.6 s of CPU time; torch 2.13). None: torch makes the weight."""
    if device is None or torch.device(device).type != "meta":
        return None
    size = (config.num_embeddings, config.embedding_dim)
    return torch.empty(size, device="meta", dtype=row_dtype(config))


def _add_table(modules: nn.ModuleDict, config: BaseEmbeddingConfig, module: nn.Module) -> None:
    if config.name in modules:
        raise ConfigError(f"Duplicate table name {config.name!r}: give every table of a collection its own name")
    try:
        modules[config.name] = module
    except KeyError as error:
        raise ConfigError(f"table name {config.name!r} cannot be used: {error.args[0]}") from error


class EmbeddingBagCollection(nn.Module):
    """Pooled embeddings of several features from several tables.

    ``forward(KeyedJaggedTensor) -> KeyedTensor`` of values [B, sum of D], float32: tables in order, features in order
    within a table, keys as ``get_embedding_names_by_table`` names them.

    Args:
        tables: one config per table; an empty ``feature_names`` becomes [name].
        is_weighted: scale rows by the batch's weights; with SUM pooling only.
        device: where dense weights go; "meta" allocates none.
        seed: the run's seed, from which each table's seed follows.

    Raises: ConfigError for duplicate or unusable table names, a data type that cannot be trained, no pooling, or
        MEAN with weights.
    """

    def __init__(
        self,
        tables: List[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: Optional[torch.device] = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._is_weighted = is_weighted
        self._seed = seed
        self._lookup: Any = None
        self._parked: Any = None
        self.embedding_bags: nn.ModuleDict = nn.ModuleDict()
        self._embedding_bag_configs = tables
        self._lengths_per_embedding: List[int] = []
        if _is_lazy.get():
            device = torch.device("meta")
        for config in tables:
            _check_pooling(config, is_weighted)
            bag = nn.EmbeddingBag(
                num_embeddings=config.num_embeddings,
                embedding_dim=config.embedding_dim,
                mode=_POOLING_MODES[config.pooling],
                device=device,
                include_last_offset=True,
                dtype=row_dtype(config),
                _weight=_meta_weight(config, device),
            )
            _add_table(self.embedding_bags, config, bag)
            if device is None:
                device = bag.weight.device
            if not config.feature_names:
                config.feature_names = [config.name]
            self._lengths_per_embedding.extend([config.embedding_dim] * len(config.feature_names))
        self._device: torch.device = torch.device(device) if device is not None else torch.device("cpu")
        self._embedding_names: List[str] = [name for names in get_embedding_names_by_table(tables) for name in names]
        self._feature_names: List[List[str]] = [config.feature_names for config in tables]
        self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows of every feature, [B, sum of D]. KeyError for a feature that the batch lacks."""
        if self._lookup is not None:
            return self._forward_attached(features)
        feature_names: List[str] = []
        for names in self._feature_names:
            feature_names.extend(names)
        inverse_rows = _inverse_rows(features.inverse_indices_or_none(), feature_names)
        bags = features.to_dict()
        pooled: List[torch.Tensor] = []
        for i, embedding_bag in enumerate(self.embedding_bags.values()):
            for name in self._feature_names[i]:
                jagged = _bags_of(bags, name)
                pooled.append(
                    embedding_bag(
                        input=jagged.values(),
                        offsets=jagged.offsets(),
                        per_sample_weights=jagged.weights() if self._is_weighted else None,
                    ).float()
                )
        if len(pooled) == 0:
            pooled.append(torch.empty((features.stride(), 0), device=features.device()))
        return KeyedTensor(
            keys=self._embedding_names,
            values=_concat_pooled(pooled, inverse_rows),
            length_per_key=self._lengths_per_embedding,
        )

    @torch.jit.unused
    def _forward_attached(self, features: KeyedJaggedTensor) -> KeyedTensor:
        (values,) = self._lookup(self, expand_inverse_indices(features))
        return KeyedTensor(keys=self._embedding_names, values=values, length_per_key=self._lengths_per_embedding)

    @torch.jit.unused
    def attach(self, lookup: Callable, keep_weights: bool = False) -> None:
        """Take embeddings from ``lookup(self, kjt) -> [Tensor [B, sum of D]]`` and give up the dense weights.

        ``keep_weights`` keeps them aside for ``detach``; by default their memory is freed.
        """
        self._parked = _park(self.embedding_bags, keep_weights) if self._parked is None else self._parked
        self.embedding_bags = nn.ModuleDict()
        self._lookup = lookup

    @torch.jit.unused
    def detach(self) -> None:
        """Stand alone again, with the weights kept aside or, if they were freed, on the meta device."""
        if self._parked is not None:
            self.embedding_bags = self._parked[0]
        self._lookup = self._parked = None

    @torch.jit.unused
    def is_attached(self) -> bool:
        """Whether embeddings come from a session."""
        return self._lookup is not None

    def is_weighted(self) -> bool:
        """Whether the batch's weights scale the rows."""
        return self._is_weighted

    def embedding_bag_configs(self) -> List[EmbeddingBagConfig]:
        """The tables, in order."""
        return self._embedding_bag_configs

    @property
    def device(self) -> torch.device:
        """Where the dense weights are."""
        return self._device

    def reset_parameters(self) -> None:
        """Give all rows their initial values again."""
        for config in self._embedding_bag_configs:
            if config.name in self.embedding_bags:
                reset_rows(self.embedding_bags[config.name], config, self._seed)


class EmbeddingCollection(nn.Module):
    """One row per id, for sequence features.

    ``forward(KeyedJaggedTensor) -> {name: JaggedTensor}`` with values [N, D] float32 in the order of the ids, the
    lengths of the feature, and the ids as weights if ``need_indices``. Weights of the batch are ignored.

    Args:
        tables: one config per table, all of one width; an empty ``feature_names`` becomes [name].
        device: where dense weights go; "meta" allocates none.
        need_indices: return the ids with the rows.
        use_gather_select, use_gather_select_per_sharding: accepted for TorchRec's sake; they change no result.
        seed: the run's seed, from which each table's seed follows.

    Raises: ConfigError for duplicate or unusable table names, unequal widths, or a data type that cannot be trained.
    """

    def __init__(
        self,
        tables: List[EmbeddingConfig],
        device: Optional[torch.device] = None,
        need_indices: bool = False,
        use_gather_select: bool = False,
        use_gather_select_per_sharding: Optional[Dict[str, bool]] = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._seed = seed
        self._lookup: Any = None
        self._parked: Any = None
        self.embeddings: nn.ModuleDict = nn.ModuleDict()
        self._embedding_configs = tables
        self._embedding_dim: int = tables[0].embedding_dim if tables else -1
        self._need_indices: bool = need_indices
        self._use_gather_select: bool = use_gather_select
        self._use_gather_select_per_sharding = use_gather_select_per_sharding
        if _is_lazy.get():
            device = torch.device("meta")
        for config in tables:
            if config.embedding_dim != self._embedding_dim:
                raise ConfigError(
                    f"table {config.name!r}: embedding_dim is {config.embedding_dim}; all tables of an "
                    f"EmbeddingCollection need the same one, here {self._embedding_dim}"
                )
            embedding = nn.Embedding(
                num_embeddings=config.num_embeddings,
                embedding_dim=config.embedding_dim,
                device=device,
                dtype=row_dtype(config),
                _weight=_meta_weight(config, device),
            )
            _add_table(self.embeddings, config, embedding)
            if device is None:
                device = embedding.weight.device
            if not config.feature_names:
                config.feature_names = [config.name]
        self._device: torch.device = torch.device(device) if device is not None else torch.device("cpu")
        self._embedding_names_by_table: List[List[str]] = get_embedding_names_by_table(tables)
        self._feature_names: List[List[str]] = [config.feature_names for config in tables]
        self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> Dict[str, JaggedTensor]:
        """The rows of every feature's ids. KeyError for a feature that the batch lacks."""
        if self._lookup is not None:
            return self._forward_attached(features)
        bags = features.to_dict()
        sequences: Dict[str, JaggedTensor] = {}
        for i, embedding in enumerate(self.embeddings.values()):
            feature_names = self._feature_names[i]
            for j, output_name in enumerate(self._embedding_names_by_table[i]):
                jagged = _bags_of(bags, feature_names[j])
                sequences[output_name] = JaggedTensor(
                    values=embedding(input=jagged.values()).float(),
                    lengths=jagged.lengths(),
                    weights=jagged.values() if self._need_indices else None,
                )
        return sequences

    @torch.jit.unused
    def _forward_attached(self, features: KeyedJaggedTensor) -> Dict[str, JaggedTensor]:
        rows = self._lookup(self, pad_strides(features))
        bags = features.to_dict()
        names = [name for names in self._embedding_names_by_table for name in names]
        feature_names = [name for names in self._feature_names for name in names]
        sequences: Dict[str, JaggedTensor] = {}
        for output_name, name, values in zip(names, feature_names, rows, strict=True):
            jagged = _bags_of(bags, name)
            sequences[output_name] = JaggedTensor(
                values=values,
                lengths=jagged.lengths(),
                weights=jagged.values() if self._need_indices else None,
            )
        return sequences

    @torch.jit.unused
    def attach(self, lookup: Callable, keep_weights: bool = False) -> None:
        """Take rows from ``lookup(self, kjt) -> one Tensor [N, D] per (table, feature)`` and give up the weights.

        ``keep_weights`` keeps them aside for ``detach``; by default their memory is freed.
        """
        self._parked = _park(self.embeddings, keep_weights) if self._parked is None else self._parked
        self.embeddings = nn.ModuleDict()
        self._lookup = lookup

    @torch.jit.unused
    def detach(self) -> None:
        """Stand alone again, with the weights kept aside or, if they were freed, on the meta device."""
        if self._parked is not None:
            self.embeddings = self._parked[0]
        self._lookup = self._parked = None

    @torch.jit.unused
    def is_attached(self) -> bool:
        """Whether embeddings come from a session."""
        return self._lookup is not None

    def need_indices(self) -> bool:
        """Whether the ids are returned with the rows."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Width of all tables; -1 without tables."""
        return self._embedding_dim

    def embedding_configs(self) -> List[EmbeddingConfig]:
        """The tables, in order."""
        return self._embedding_configs

    def embedding_names_by_table(self) -> List[List[str]]:
        """Output names of each table."""
        return self._embedding_names_by_table

    @property
    def device(self) -> torch.device:
        """Where the dense weights are."""
        return self._device

    def reset_parameters(self) -> None:
        """Give all rows their initial values again."""
        for config in self._embedding_configs:
            if config.name in self.embeddings:
                reset_rows(self.embeddings[config.name], config, self._seed)

    def use_gather_select(self) -> bool:
        """As constructed."""
        return self._use_gather_select

    def use_gather_select_per_sharding(self) -> Optional[Dict[str, bool]]:
        """As constructed."""
        return self._use_gather_select_per_sharding


def _check_pooling(config: EmbeddingBagConfig, is_weighted: bool) -> None:
    if config.pooling not in _POOLING_MODES:
        raise ConfigError(
            f"table {config.name!r}: pooling {config.pooling} does not pool; use SUM or MEAN, or an EmbeddingCollection"
        )
    if is_weighted and config.pooling is PoolingType.MEAN:
        raise ConfigError(
            f"table {config.name!r}: MEAN pooling with per-sample weights is not defined; use SUM, and divide the "
            "weights by their sum where you want a weighted mean"
        )


def _park(modules: nn.ModuleDict, keep_weights: bool) -> Tuple[nn.ModuleDict]:
    """The modules in a tuple, so that the collection does not register them; without memory unless kept."""
    return (modules if keep_weights else modules.to("meta"),)
