"""The workload of the parity tests and its oracle: the same model in plain single-process torch."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.actors.dense import DenseOptimizerSpec
from shoal.actors.embedding import EmbeddingBagCollection, EmbeddingCollection
from shoal.actors.trainer import LoopSpec
from shoal.actors.worker_spec import Seat, WorkerSpec
from shoal.kernels.batch import Batch
from shoal.kernels.rowstore import initial_rows
from shoal.kernels.spec import OptimizerKind, OptimizerSpec, PoolingType, TableSpec
from shoal.kernels.tables import EmbeddingBagConfig, EmbeddingConfig, table_seed
from shoal.platform.config import DataConfig, JobConfig, TrainConfig
from shoal.platform.job import Source, checkpoint_directory, open_source
from shoal.platform.storage import Storage

NUM_DENSE = 3
BAGS = {"user": (500, 8), "item": (800, 12), "genre": (20, 4)}


class TinyModel(nn.Module):
    """Bags (SUM, MEAN, a table read by two features), a sequence, a small dense part with dropout off."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name="user", num_embeddings=500, embedding_dim=8, feature_names=["user"]),
                EmbeddingBagConfig(name="item", num_embeddings=800, embedding_dim=12, feature_names=["item", "recent"]),
                EmbeddingBagConfig(
                    name="genre", num_embeddings=20, embedding_dim=4, feature_names=["genre"], pooling=PoolingType.MEAN
                ),
            ]
        )
        self.sequence = EmbeddingCollection(
            tables=[EmbeddingConfig(name="word", num_embeddings=300, embedding_dim=8, feature_names=["words"])]
        )
        width = 8 + 12 + 12 + 4 + 8 + NUM_DENSE
        self.over = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pooled = self.bags(batch.sparse_features).values()
        words = self.sequence(batch.sparse_features)["words"]
        lengths = words.lengths()
        bag = torch.repeat_interleave(torch.arange(len(batch)), lengths.long())
        # Squares make the sequence more than a sum-pooled bag.
        first = torch.zeros(len(batch), 8).index_add(0, bag, words.values() ** 2)
        logits = self.over(torch.cat([pooled, first, batch.dense_features], dim=1)).squeeze(1)
        losses = F.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return losses, torch.sigmoid(logits)


def write_data(folder: Path, num_rows: int = 700, num_files: int = 3, seed: int = 0) -> Path:
    """Parquet with every kind of column: scalar ids, lists with empty ones, weights of samples, dense values."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(np.array_split(np.arange(num_rows), num_files)):
        n = len(part)

        def lists(high: int, longest: int, n: int = n) -> list[list[int]]:
            return [rng.integers(0, high, rng.integers(0, longest + 1)).tolist() for _ in range(n)]

        columns: dict[str, Any] = {
            "label": rng.integers(0, 2, n).astype(np.int8),
            "weight": rng.uniform(0.5, 2.0, n).astype(np.float32),
            "user": (rng.zipf(1.3, n) % 500).astype(np.int64),
            "item": (rng.zipf(1.2, n) % 800).astype(np.int32),
            "recent": pa.array(lists(800, 5), pa.list_(pa.int64())),
            "genre": pa.array(lists(20, 3), pa.list_(pa.int64())),
            "words": pa.array(lists(300, 4), pa.list_(pa.int64())),
            **{f"d{i}": rng.normal(size=n).astype(np.float32) for i in range(NUM_DENSE)},
        }
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet", row_group_size=64)
    return folder


def job_config(folder: Path, *, batch_size: int = 50, max_steps: int = 50, epochs: int = 10) -> JobConfig:
    return JobConfig(
        data=DataConfig(
            train=(str(folder),),
            weight="weight",
            dense=tuple(f"d{i}" for i in range(NUM_DENSE)),
            sparse=("user", "item", "recent", "genre", "words"),  # type: ignore[arg-type]
            batch_size=batch_size,
            window_rows=200,
        ),
        train=TrainConfig(epochs=epochs, max_steps=max_steps, seed=1),
    )


@dataclasses.dataclass(frozen=True)
class MakeTable:
    """TableSpec of a test table: several row blocks, the given optimizer."""

    optimizer: OptimizerSpec
    seed: int
    num_blocks: int = 4

    def __call__(self, config: Any) -> TableSpec:
        bound = config.num_embeddings**-0.5
        return TableSpec(
            name=config.name,
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            optimizer=self.optimizer,
            init_min=-bound,
            init_max=bound,
            seed=table_seed(self.seed, config.name),
            num_blocks=self.num_blocks,
        )


class ConstantRates:
    """Learning rates that never change."""

    def __init__(self, dense: float, tables: Any) -> None:
        self._dense, self._tables = dense, np.array([t.optimizer.lr for t in tables], dtype=np.float32)

    def tables(self, step: int) -> np.ndarray:
        return self._tables

    def dense(self, step: int) -> float:
        return self._dense


def worker_spec(
    run: str, source: Source, optimizer: OptimizerSpec, storage: Path, *, model: Any = TinyModel, **loop: Any
) -> WorkerSpec:
    """The spec of a worker that trains TinyModel from ``source``."""
    total = loop.pop("total_steps", source.num_steps)
    return WorkerSpec(
        run=run,
        build_model=model,
        make_table=MakeTable(optimizer, source.order.spec.seed),
        policies={},
        learning_rates=functools.partial(ConstantRates, 0.05),
        dense_optimizer=DenseOptimizerSpec(kind="adagrad", lr=0.05),
        loop=LoopSpec(seed=source.order.spec.seed, total_steps=total, log_every_steps=10, **loop),
        train_feed=source.local_feed,
        eval_feed=None,
        storage=Storage(str(storage)),
        checkpoint_directory=checkpoint_directory,
        op_timeout_s=30.0,
    )


def source_of(config: JobConfig) -> Source:
    return open_source(config, config.data.train, is_training=True)


# ---- the oracle ---------------------------------------------------------------------------------------------------


class _PlainBags(nn.Module):
    """nn.functional.embedding_bag over dense weights, one call per feature."""

    def __init__(self, configs: Any, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.configs, self.weights = configs, weights

    def forward(self, kjt: Any) -> Any:
        pieces = []
        for config in self.configs:
            for feature in config.feature_names:
                jagged = kjt[feature]
                mode = "mean" if config.pooling is PoolingType.MEAN else "sum"
                offsets = jagged.offsets()[:-1].long()
                pieces.append(F.embedding_bag(jagged.values().long(), self.weights[config.name], offsets, mode=mode))
        values = torch.cat(pieces, dim=1)
        return type("Pooled", (), {"values": lambda self: values})()


class _PlainSequences(nn.Module):
    def __init__(self, configs: Any, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.configs, self.weights = configs, weights

    def forward(self, kjt: Any) -> dict[str, Any]:
        out = {}
        for config in self.configs:
            for feature in config.feature_names:
                jagged = kjt[feature]
                values = F.embedding(jagged.values().long(), self.weights[config.name])
                out[feature] = type(jagged)(values=values, lengths=jagged.lengths())
        return out


def oracle(
    source: Source, optimizer: OptimizerSpec, num_steps: int, *, clip_norm: float | None = None
) -> dict[str, Any]:
    """Train TinyModel in plain torch on whole global batches: {table: (weights, slots, touched)}, dense tensors."""
    seed = source.order.spec.seed
    torch.manual_seed(seed)
    from shoal.actors.embedding import lazy_tables

    with lazy_tables():
        model = TinyModel()
    make = MakeTable(optimizer, seed)
    configs = [*model.bags.embedding_bag_configs(), *model.sequence.embedding_configs()]
    specs = {config.name: make(config) for config in configs}
    weights = {
        name: initial_rows(spec, torch.arange(spec.num_embeddings)).requires_grad_(True) for name, spec in specs.items()
    }
    model.bags = _PlainBags(model.bags.embedding_bag_configs(), weights)  # type: ignore[assignment]
    model.sequence = _PlainSequences(model.sequence.embedding_configs(), weights)  # type: ignore[assignment]
    dense = torch.optim.Adagrad(model.over.parameters(), lr=0.05)
    first = optimizer.initial_accumulator
    slots = {
        n: torch.full((s.num_embeddings, s.optimizer.slot_width(s.embedding_dim)), first) for n, s in specs.items()
    }
    touched = {name: torch.zeros(spec.num_embeddings, dtype=torch.bool) for name, spec in specs.items()}
    feed = source.local_feed(Seat(rank=0, world_size=1, shares=(1.0,), start_step=0))
    for step in range(num_steps):
        batch = feed.next_batch(step)
        losses, _ = model(batch)
        loss = (losses * batch.weights).sum() / batch.weights.sum()
        dense.zero_grad()
        for weight in weights.values():
            weight.grad = None
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([*model.over.parameters(), *weights.values()], clip_norm)
        dense.step()
        ids = {
            config.name: torch.cat([batch.sparse_features[f].values() for f in config.feature_names])
            for config in configs
        }
        for name, spec in specs.items():
            rows = ids[name].unique()
            touched[name][rows] = True
            if weights[name].grad is not None:
                _update(spec.optimizer, weights[name], slots[name], rows, step + 1)
    feed.close()
    return {
        "tables": {n: (weights[n].detach(), slots[n], touched[n]) for n in specs},
        "dense": {name: p.detach().numpy().copy() for name, p in model.over.named_parameters()},
    }


@torch.no_grad()
def _update(o: OptimizerSpec, weight: Tensor, slots: Tensor, rows: Tensor, step: int) -> None:
    """The textbook update of OptimizerSpec's docstring on some rows."""
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
