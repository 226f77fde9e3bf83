"""A small model trained by ranks that are threads, with and without overlap, and everything it ends with."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from thread_ranks import Switch, ThreadTransport, run_ranks

from shoal.actors.dense import DenseOptimizerSpec, DenseReplica
from shoal.actors.embedding import EmbeddingBagCollection, EmbeddingCollection
from shoal.actors.session import Session
from shoal.actors.sharded import ModelTables, describe_model
from shoal.actors.trainer import LoopSpec, Trainer
from shoal.kernels.batch import Batch
from shoal.kernels.errors import DataError
from shoal.kernels.exchange import Exchange
from shoal.kernels.frame import Identity
from shoal.kernels.jagged import KeyedJaggedTensor
from shoal.kernels.plan import StepPlan
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import Flow, OptimizerKind, OptimizerSpec, TableSpec, WireCodecs
from shoal.kernels.tables import EmbeddingBagConfig, EmbeddingConfig, table_spec

#: Table -> its optimizer: all there are.
OPTIMIZERS = {
    "user": OptimizerKind.ROWWISE_ADAGRAD,
    "item": OptimizerKind.ADAM,
    "words": OptimizerKind.ADAGRAD,
    "genre": OptimizerKind.SGD,
}
NUM_ROWS = 30
NUM_BLOCKS = 4
KEYS = ("a", "b", "c", "g", "s")


class Model(nn.Module):
    """``computes_ids``: the model looks up a KeyedJaggedTensor of its own, too."""

    def __init__(self, *, computes_ids: bool) -> None:
        super().__init__()
        self._computes_ids = computes_ids
        bags = [("user", ["a", "b"], 4), ("item", ["c"], 8), ("genre", ["g"], 3)]
        self.bags = EmbeddingBagCollection(
            [EmbeddingBagConfig(num_embeddings=NUM_ROWS, embedding_dim=d, name=n, feature_names=f) for n, f, d in bags]
        )
        words = EmbeddingConfig(num_embeddings=NUM_ROWS, embedding_dim=4, name="words", feature_names=["s"])
        self.words = EmbeddingCollection([words])
        self.over = nn.Linear(4 + 4 + 8 + 3 + 1 + 1, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch.sparse_features
        bags = self.bags(ids).values()
        if self._computes_ids:
            other = KeyedJaggedTensor(
                keys=ids.keys(), values=(ids.values() + 1) % NUM_ROWS, lengths=ids.lengths(), stride=ids.stride()
            )
            bags = bags + self.bags(other).values()
        words = self.words(batch.sparse_features)["s"]
        total = torch.zeros(len(batch), 4).index_add(
            0, torch.repeat_interleave(torch.arange(len(batch)), words.lengths()), words.values()
        )
        logits = self.over(torch.cat([bags, total[:, :1], batch.dense_features], 1)).squeeze(1)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return losses, torch.sigmoid(logits)


@dataclasses.dataclass(frozen=True)
class Trouble:
    """What goes wrong at (step, rank)."""

    #: Batches that are not there the first so many times they are asked for.
    late: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    bad_ids: frozenset[tuple[int, int]] = frozenset()
    nan: frozenset[tuple[int, int]] = frozenset()
    feed_errors: frozenset[tuple[int, int]] = frozenset()


def make_batch(step: int, rank: int, trouble: Trouble) -> Batch:
    rng = np.random.default_rng([step, rank, 5])
    size = int(rng.integers(0, 6)) if rank else int(rng.integers(0, 2)) * 5
    if (step, rank) in trouble.bad_ids | trouble.nan:
        size = 3
    lengths = rng.integers(0, 4, (len(KEYS), size))
    values = rng.zipf(1.3, int(lengths.sum())) % NUM_ROWS
    if (step, rank) in trouble.bad_ids:
        lengths[0, 0] += 1
        values = np.concatenate([[NUM_ROWS + 7], values])
    dense = torch.from_numpy(rng.normal(size=(size, 1)).astype(np.float32))
    if (step, rank) in trouble.nan:
        dense[0] = float("nan")
    kjt = KeyedJaggedTensor(
        keys=list(KEYS),
        values=torch.from_numpy(values.astype(np.int64)),
        lengths=torch.from_numpy(lengths.reshape(-1).astype(np.int32)),
        stride=size,
    )
    labels = torch.from_numpy(rng.integers(0, 2, size).astype(np.float32))
    return Batch(dense_features=dense, sparse_features=kjt, labels=labels)


class Feed:
    """A BatchSource that may be late."""

    def __init__(self, rank: int, trouble: Trouble, offset: int = 0) -> None:
        self._rank, self._trouble, self._offset = rank, trouble, offset
        self._late = dict(trouble.late)
        self.asked: list[int] = []

    def is_ready(self, step: int, timeout_s: float) -> bool:
        left = self._late.get((step, self._rank), 0)
        self._late[step, self._rank] = left - 1
        return left <= 0

    def next_batch(self, step: int) -> Batch:
        self.asked.append(step)
        if (step, self._rank) in self._trouble.feed_errors:
            raise DataError(f"file {step} is broken")
        return make_batch(step + self._offset, self._rank, self._trouble)

    def reassign(self, assignment: Any, step: int) -> None: ...

    def keep_from(self, step: int) -> None: ...

    def close(self) -> None: ...


class Rates:
    def tables(self, step: int) -> np.ndarray:
        return np.full(len(OPTIMIZERS), 0.1 / (1 + step), np.float32)

    def dense(self, step: int) -> float:
        return 0.05


@dataclasses.dataclass
class Rank:
    """One rank: what it trains with, and what it ends with."""

    trainer: Trainer
    tables: ModelTables
    store: RowStore
    feed: Feed
    records: list[Any]
    checkpoints: list[int]
    error: BaseException | None = None

    def rows(self) -> dict[tuple[int, int], tuple[bytes, bytes, int]]:
        found = {}
        for t in range(len(self.tables.tables)):
            for block in self.store.owned_blocks(t):
                part = self.store.export_block(t, block)
                for i, row_id in enumerate(part.ids.tolist()):
                    bits = part.weights[i].numpy().tobytes(), part.slots[i].numpy().tobytes()
                    found[t, row_id] = (*bits, int(part.count[i]))
        return found

    def counts(self) -> dict[str, int]:
        return {kind.name: count.num_collectives for kind, count in self.trainer.session.exchange.counts.items()}


def make_session(
    tables: ModelTables, store: RowStore, switch: Switch, rank: int, world: int, epoch: int, mirrored: tuple[int, ...]
) -> Session:
    plan = StepPlan(
        store,
        tables.tables,
        tables.features,
        [np.arange(NUM_BLOCKS, dtype=np.uint16) % world] * len(tables.tables),
        rank=rank,
        world_size=world,
        mirrored=mirrored,
        codecs=[WireCodecs(flow=Flow.POOLED) if t.name == "item" else WireCodecs() for t in tables.tables],
    )
    identity = Identity(run=1, epoch=epoch, rank=rank, world_size=world, plan_hash=plan.hash)
    exchange = Exchange(ThreadTransport(switch, rank, world), identity, timeout_s=5.0)
    return Session(tables, store, plan, exchange)


def train(
    world: int,
    spec: LoopSpec,
    *,
    trouble: Trouble = Trouble(),
    mirrored: tuple[int, ...] = (),
    computes_ids: bool = False,
    body: Callable[[Rank, int, Callable[[int], Session]], None] = lambda rank, number, session: rank.trainer.run(),
) -> list[Rank]:
    """Every rank, after ``body(rank, number, session of an epoch)``; what it raises is kept."""
    switches = [Switch(world) for _ in range(3)]
    torch.manual_seed(3)
    models = [Model(computes_ids=computes_ids) for _ in range(world)]
    for model in models:
        model.over.load_state_dict(models[0].over.state_dict())

    def make_spec(config: Any) -> TableSpec:
        optimizer = OptimizerSpec(kind=OPTIMIZERS[config.name], lr=0.1, eps=1e-3)
        return dataclasses.replace(table_spec(config, seed=9, optimizer=optimizer), num_blocks=NUM_BLOCKS)

    def work(number: int) -> Rank:
        model = models[number]
        tables = describe_model(model, make_spec, {})
        store = RowStore(tables.tables, undo_steps=0)
        for t in range(len(tables.tables)):
            for block in range(number, NUM_BLOCKS, world):
                store.add_block(t, block)
        sessions = lambda epoch: make_session(tables, store, switches[epoch], number, world, epoch, mirrored)  # noqa: E731
        records: list[Any] = []
        checkpoints: list[int] = []
        feed = Feed(number, trouble)
        session = sessions(0)
        trainer = Trainer(
            spec,
            model=model,
            session=session,
            dense=DenseReplica(model, DenseOptimizerSpec(kind="adam")),
            feed=feed,
            eval_feed=lambda: Feed(number, Trouble(), 1000),
            learning_rates=Rates(),
            on_progress=records.append,
            on_checkpoint=checkpoints.append,
        )
        rank = Rank(trainer, tables, store, feed, records, checkpoints)
        try:
            body(rank, number, sessions)
        except Exception as error:
            rank.error = error
        return rank

    return run_ranks(world, work)


def state_of(ranks: list[Rank]) -> dict[str, Any]:
    """Everything that must not depend on overlap."""
    rows: dict[Any, Any] = {}
    for rank in ranks:
        rows |= rank.rows()
    differing = ("_per_s", "_ms", "phase_ms", "bytes")
    return {
        "rows": rows,
        "dense": [{n: t.numpy().tobytes() for n, t in rank.trainer.dense.state_tensors().items()} for rank in ranks],
        "metrics": [{n: t.numpy().tobytes() for n, t in rank.trainer.metrics.state_dict().items()} for rank in ranks],
        "steps": [(r.trainer.step, r.trainer.skipped_steps, r.trainer.num_samples, r.checkpoints) for r in ranks],
        "errors": [f"{type(rank.error).__name__}: {rank.error}" for rank in ranks],
        "records": [
            (record.kind, record.step, {k: v for k, v in record.values.items() if not any(t in k for t in differing)})
            for record in ranks[0].records
        ],
    }
