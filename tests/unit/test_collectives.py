"""The number of collectives of a step is a constant (S6): ranks that are threads, counted."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from session_ranks import Rank, build_ranks, on_ranks, trainer_of

from shoal.actors.embedding import EmbeddingBagCollection, EmbeddingCollection
from shoal.kernels.batch import Batch
from shoal.kernels.frame import Kind
from shoal.kernels.jagged import KeyedJaggedTensor
from shoal.kernels.spec import Codec, OptimizerKind, OptimizerSpec, WireCodecs
from shoal.kernels.tables import EmbeddingBagConfig, EmbeddingConfig, table_seed, table_spec

KINDS = tuple(OptimizerKind)
STEPS = 4


@dataclasses.dataclass(frozen=True)
class Build:
    """A model of ``num_tables`` tables of several widths, optimizers and codecs; every fourth one is of sequences."""

    num_tables: int

    def __call__(self) -> nn.Module:
        return Model(self.num_tables)


class Model(nn.Module):
    def __init__(self, num_tables: int) -> None:
        super().__init__()
        # The tables of a collection of sequences are of one width.
        widths = [5 if t % 4 == 3 else 2 + t % 5 for t in range(num_tables)]
        shapes = [{"num_embeddings": 20, "embedding_dim": w, "name": f"t{t}"} for t, w in enumerate(widths)]
        self.bags = EmbeddingBagCollection([EmbeddingBagConfig(**s) for t, s in enumerate(shapes) if t % 4 != 3])
        words = [EmbeddingConfig(**s) for t, s in enumerate(shapes) if t % 4 == 3]
        self.words = EmbeddingCollection(words) if words else None
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, batch: Batch) -> Tensor:
        losses = self.bags(batch.sparse_features).values().square().sum(dim=1) * self.scale.sum()
        if self.words is not None:
            losses = losses + sum(jagged.values().sum() for jagged in self.words(batch.sparse_features).values())
        return losses


def _table(config):
    optimizer = OptimizerSpec(kind=KINDS[int(config.name[1:]) % len(KINDS)], lr=0.01)
    return table_spec(config, seed=table_seed(0, config.name), optimizer=optimizer, num_blocks=2)


def _batch(num_tables: int, seed: int, size: int = 5) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 3, num_tables * size)
    ids = torch.from_numpy(rng.integers(0, 20, int(lengths.sum())))
    kjt = KeyedJaggedTensor(
        keys=[f"t{t}" for t in range(num_tables)], values=ids, lengths=torch.from_numpy(lengths), stride=size
    )
    return Batch(torch.empty(size, 0), kjt, torch.zeros(size))


def _per_step(num_tables: int, hosts: str, *, is_hierarchical: bool, **loop) -> dict[Kind, float]:
    """Collectives among all ranks of a step after the first, by kind; equal on all ranks."""
    codecs = {f"t{t}": WireCodecs(Codec(t % 4), Codec((t + 1) % 4)) for t in range(num_tables)}
    ranks = build_ranks(hosts, Build(num_tables), _table, is_hierarchical=is_hierarchical, codecs=codecs)

    def body(rank: Rank) -> dict[Kind, float]:
        batches = [_batch(num_tables, 10 * rank.rank + step) for step in range(STEPS)]
        trainer = trainer_of(rank, batches, **loop)
        trainer.train_step()
        before = {kind: count.num_collectives for kind, count in rank.session.exchange.counts.items()}
        for _ in range(STEPS - 1):
            trainer.train_step()
        after = {kind: count.num_collectives for kind, count in rank.session.exchange.counts.items()}
        return {kind: (count - before.get(kind, 0)) / (STEPS - 1) for kind, count in after.items()}

    found = on_ranks(ranks, body)
    assert all(counts == found[0] for counts in found)
    return {kind: count for kind, count in found[0].items() if count}


@pytest.mark.parametrize(("hosts", "is_hierarchical"), [("a", False), ("aab", False), ("aab", True)])
def test_s6_neither_tables_nor_micro_batches_change_the_number_and_clipping_adds_one(hosts, is_hierarchical):
    one = _per_step(1, hosts, is_hierarchical=is_hierarchical)
    assert 2 <= sum(one.values()) <= 5
    assert _per_step(200, hosts, is_hierarchical=is_hierarchical) == one
    assert _per_step(200, hosts, is_hierarchical=is_hierarchical, accumulation_steps=8) == one
    clipped = _per_step(200, hosts, is_hierarchical=is_hierarchical, clip_grad_norm=0.1)
    assert clipped == {**one, Kind.NORM: 1.0}
