"""Many small tables, each cut, updated, pooled and sent in its own way, trained at once by ranks that are threads, and
the same tables in plain torch."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

from session_ranks import Rank, build_ranks, on_ranks

from shoal.actors.embedding import EmbeddingBagCollection, EmbeddingCollection
from shoal.kernels.column_blocks import column_widths, cut_columns
from shoal.kernels.jagged import KeyedJaggedTensor
from shoal.kernels.rowstore import initial_rows
from shoal.kernels.spec import Flow, OptimizerKind, OptimizerSpec, PoolingType, TableSpec, WireCodecs
from shoal.kernels.tables import EmbeddingBagConfig, EmbeddingConfig, table_seed, table_spec
from shoal.platform.placement import plan_placement
from shoal.platform.sharding import ShardingType


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One table."""

    sharding: ShardingType
    optimizer: OptimizerKind = OptimizerKind.SGD
    pooling: PoolingType = PoolingType.SUM
    flow: Flow = Flow.ROWS
    is_weighted: bool = False
    num_rows: int = 24
    dim: int = 6
    num_blocks: int = 4
    column_blocks: int = 2
    num_features: int = 1

    def __post_init__(self) -> None:
        assert self.flow is Flow.ROWS or self.can_pool

    @property
    def can_pool(self) -> bool:
        return self.pooling is not PoolingType.NONE and self.sharding is not ShardingType.DATA_PARALLEL

    @property
    def spec(self) -> OptimizerSpec:
        return OptimizerSpec(kind=self.optimizer, lr=0.05, initial_accumulator=0.05)


@dataclasses.dataclass(frozen=True)
class GlobalBatch:
    """Bags of every feature: lengths [F, B], ids and weights of all bags, feature by feature."""

    lengths: np.ndarray
    ids: list[np.ndarray]
    weights: list[np.ndarray]

    def part(self, names: Sequence[str], start: int, stop: int) -> KeyedJaggedTensor:
        """Samples [start, stop)."""
        values, weights = [], []
        for lengths, ids, scale in zip(self.lengths, self.ids, self.weights):
            first, last = int(lengths[:start].sum()), int(lengths[:stop].sum())
            values.append(ids[first:last])
            weights.append(scale[first:last])
        return KeyedJaggedTensor(
            keys=list(names),
            values=torch.from_numpy(np.concatenate(values)),
            weights=torch.from_numpy(np.concatenate(weights)),
            lengths=torch.from_numpy(self.lengths[:, start:stop].reshape(-1)),
            stride=stop - start,
        )


class Tables:
    """The tables of ``cases``, by name, with the names of the features that read each."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = {f"t{number}": case for number, case in enumerate(cases)}
        self.features = {
            name: [f"{name}.f{feature}" for feature in range(case.num_features)] for name, case in self.cases.items()
        }
        self.names = [feature for features in self.features.values() for feature in features]

    def batch(self, size: int, rng: np.random.Generator, longest: int = 3) -> GlobalBatch:
        rows = [self.cases[name.partition(".")[0]].num_rows for name in self.names]
        lengths = rng.integers(0, longest + 1, (len(rows), size))
        ids = [rng.integers(0, num, int(own.sum())) for num, own in zip(rows, lengths)]
        weights = [rng.uniform(0.5, 1.5, len(own)).astype(np.float32) for own in ids]
        return GlobalBatch(lengths, ids, weights)

    def whole_spec(self, name: str) -> TableSpec:
        """The table before it is cut."""
        case = self.cases[name]
        config = EmbeddingBagConfig(num_embeddings=case.num_rows, embedding_dim=case.dim, name=name)
        return table_spec(config, seed=table_seed(0, name), optimizer=case.spec, num_blocks=case.num_blocks)

    def specs(self, name: str) -> tuple[TableSpec, ...]:
        """The table, or its column blocks."""
        case, whole = self.cases[name], self.whole_spec(name)
        if not case.sharding.cuts_columns:
            return (whole,)
        return cut_columns(whole, column_widths(case.dim, case.column_blocks, table=name))


class Model(nn.Module):
    """The collections of ``tables``, and a loss whose gradient differs between columns and is nowhere near 0."""

    def __init__(self, tables: Tables) -> None:
        super().__init__()
        groups: dict[str, list] = {"bags": [], "weighted": []}
        factors: dict[str, list[Tensor]] = {"bags": [], "weighted": []}
        for name, case in tables.cases.items():
            shape = {"num_embeddings": case.num_rows, "embedding_dim": case.dim, "name": name}
            if case.pooling is PoolingType.NONE:
                # The tables of a collection of sequences are of one width.
                words = groups.setdefault(f"words{case.dim}", [])
                words.append(EmbeddingConfig(feature_names=tables.features[name], **shape))
                continue
            group = "weighted" if case.is_weighted else "bags"
            groups[group].append(EmbeddingBagConfig(feature_names=tables.features[name], pooling=case.pooling, **shape))
            factors[group] += [column_factors(case.dim)] * case.num_features
        self.groups = [group for group, configs in groups.items() if configs]
        self.factors = {group: torch.cat(parts) for group, parts in factors.items() if parts}
        for group in self.groups:
            if group.startswith("words"):
                self.add_module(group, EmbeddingCollection(groups[group]))
            else:
                self.add_module(group, EmbeddingBagCollection(groups[group], is_weighted=group == "weighted"))

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        total = torch.zeros(())
        for group in self.groups:
            found = getattr(self, group)(kjt)
            if group.startswith("words"):
                for jagged in found.values():
                    total = total + loss_of(jagged.values(), column_factors(jagged.values().shape[1]))
            else:
                total = total + loss_of(found.values(), self.factors[group])
        return total


def column_factors(dim: int) -> Tensor:
    return 1.0 + 0.1 * torch.arange(dim)


def loss_of(output: Tensor, factors: Tensor) -> Tensor:
    """Its gradient depends on the output and is always positive: where it crosses 0, Adam divides noise by noise."""
    return ((output + 0.25 * torch.sin(output * factors)) * factors).sum() / 8.0


State = dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]


def train_plain(tables: Tables, batches: Sequence[GlobalBatch]) -> State:
    """Table -> (weights [rows, dim], optimizer slots [rows, slots], whether each row was touched), from plain torch."""
    weights, slots, touched = {}, {}, {}
    for name, case in tables.cases.items():
        weights[name] = initial_rows(tables.whole_spec(name), torch.arange(case.num_rows)).requires_grad_(True)
        slots[name] = torch.full((case.num_rows, case.spec.slot_width(case.dim)), case.spec.initial_accumulator)
        if case.optimizer is OptimizerKind.ADAM:
            slots[name].zero_()
        touched[name] = torch.zeros(case.num_rows, dtype=torch.bool)
    for step, batch in enumerate(batches):
        read: dict[str, list[Tensor]] = {name: [] for name in tables.cases}
        total = torch.zeros(())
        for feature, lengths, ids, scale in zip(tables.names, batch.lengths, batch.ids, batch.weights):
            name = feature.partition(".")[0]
            output, ids = _read(tables.cases[name], weights[name], lengths, torch.from_numpy(ids), scale)
            total = total + loss_of(output, column_factors(tables.cases[name].dim))
            read[name].append(ids)
        if total.requires_grad:
            total.backward()
        for name, case in tables.cases.items():
            rows = torch.cat(read[name]).unique()
            touched[name][rows] = True
            if len(rows):
                _update(case.spec, weights[name], slots[name], rows, step + 1)
            weights[name].grad = None
    return {n: (weights[n].detach().numpy(), slots[n].numpy(), touched[n].numpy()) for n in tables.cases}


def _read(case: Case, weight: Tensor, lengths: np.ndarray, ids: Tensor, scale: np.ndarray) -> tuple[Tensor, Tensor]:
    if case.pooling is PoolingType.NONE:
        return F.embedding(ids, weight), ids
    offsets = torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))[:-1]
    scales = torch.from_numpy(scale) if case.is_weighted else None
    mode = "mean" if case.pooling is PoolingType.MEAN else "sum"
    return F.embedding_bag(ids, weight, offsets, mode=mode, per_sample_weights=scales), ids


@torch.no_grad()
def _update(o: OptimizerSpec, weight: Tensor, slots: Tensor, rows: Tensor, step: int) -> None:
    """The formulas of ``OptimizerSpec`` on some rows."""
    assert weight.grad is not None
    g, w, dim = weight.grad[rows], weight[rows], weight.shape[1]
    match o.kind:
        case OptimizerKind.SGD:
            w = w - o.lr * g
        case OptimizerKind.ADAGRAD:
            slots[rows] += g * g
            w = w - o.lr * g / (slots[rows].sqrt() + o.eps)
        case OptimizerKind.ROWWISE_ADAGRAD:
            slots[rows] += (g * g).mean(dim=1, keepdim=True)
            w = w - o.lr * g / (slots[rows].sqrt() + o.eps)
        case OptimizerKind.ADAM:
            m, v = slots[rows, :dim], slots[rows, dim:]
            m, v = o.beta1 * m + (1 - o.beta1) * g, o.beta2 * v + (1 - o.beta2) * g * g
            slots[rows] = torch.cat([m, v], dim=1)
            w = w - o.lr * (m / (1 - o.beta1**step)) / ((v / (1 - o.beta2**step)).sqrt() + o.eps)
    weight[rows] = w


def train_ranks(
    tables: Tables, batches: Sequence[GlobalBatch], hosts: str, *, is_hierarchical: bool, seed: int = 0
) -> list[Rank]:
    """Train over ranks, placed by the planner; ``seed``: of how each batch is spread over them, unevenly."""
    world = len(hosts)
    names = {spec.name: name for name in tables.cases for spec in tables.specs(name)}
    specs = [spec for name in tables.cases for spec in tables.specs(name)]
    sharding = {spec: tables.cases[name].sharding for spec, name in names.items()}
    loads = plan_placement(specs, world, sharding=sharding, hosts=hosts)
    owners = {load.table: load.owners for load in loads}
    ranks = build_ranks(
        hosts,
        lambda: Model(tables),
        lambda config: tables.specs(config.name),
        owners=lambda spec: owners[spec.name],
        is_hierarchical=is_hierarchical,
        codecs={spec: WireCodecs(flow=tables.cases[name].flow) for spec, name in names.items()},
        mirrored=[name for name, case in tables.cases.items() if case.sharding is ShardingType.DATA_PARALLEL],
    )
    rng = np.random.default_rng(seed)
    sizes = [batch.lengths.shape[1] for batch in batches]
    cuts = [[0, *sorted(rng.integers(0, size + 1, world - 1).tolist()), size] for size in sizes]

    def body(rank: Rank) -> None:
        for step, (batch, bounds) in enumerate(zip(batches, cuts)):
            kjt = batch.part(tables.names, bounds[rank.rank], bounds[rank.rank + 1])
            rank.session.begin(step, kjt, is_training=True, loss_weight=1.0)
            loss = rank.model(kjt)
            if loss.requires_grad:
                loss.backward()
            rank.session.end(dense_grad=None, learning_rates=rank.rates)

    on_ranks(ranks, body)
    return ranks


def assert_close(tables: Tables, ranks: Sequence[Rank], expected: State) -> None:
    """Every column block's rows, weights and optimizer state within 1e-5 relative; no row that was not touched."""
    for t, spec in enumerate(ranks[0].tables.tables):
        weights, slots, touched = expected[spec.logical_name]
        columns = slice(spec.first_column, spec.first_column + spec.embedding_dim)
        where = f"{spec.name} {tables.cases[spec.logical_name]}"
        seen: list[int] = []
        for rank in ranks:
            for block in rank.store.owned_blocks(t):
                part = rank.store.export_block(t, block)
                ids = part.ids.numpy()
                seen += ids.tolist()
                np.testing.assert_allclose(
                    part.weights.numpy(), weights[ids, columns], rtol=1e-5, atol=2e-6, err_msg=where
                )
                wanted = slots[ids]
                if not spec.optimizer.has_row_state:
                    num_slots = len(spec.optimizer.slots(1))
                    wanted = wanted.reshape(len(ids), num_slots, spec.logical_dim)[:, :, columns]
                    wanted = wanted.reshape(len(ids), num_slots * spec.embedding_dim)
                elif spec.first_column and spec.shares_statistic:
                    wanted = part.slots.numpy()  # the statistic lives with block 0
                np.testing.assert_allclose(part.slots.numpy(), wanted, rtol=1e-5, atol=1e-10, err_msg=where)
        assert sorted(seen) == np.nonzero(touched)[0].tolist(), f"{where}: other rows exist"
