"""A step of several micro-batches is one batch, whatever the batch (issue 4.4): ranks that are threads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from session_ranks import Rank, build_ranks, on_ranks, rows_of, trainer_of

from shoal.actors.embedding import EmbeddingBagCollection, EmbeddingCollection
from shoal.actors.trainer import Trainer
from shoal.kernels.batch import Batch
from shoal.kernels.errors import ShoalError
from shoal.kernels.exchange import KindCount
from shoal.kernels.jagged import KeyedJaggedTensor
from shoal.kernels.spec import Codec, Flow, OptimizerKind, OptimizerSpec, PoolingType, WireCodecs
from shoal.kernels.tables import EmbeddingBagConfig, EmbeddingConfig, table_seed, table_spec

NUM_IDS = 30


class Model(nn.Module):
    """Bags of SUM and MEAN, a sequence, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(num_embeddings=NUM_IDS, embedding_dim=4, name="sum", feature_names=["a"]),
                EmbeddingBagConfig(
                    num_embeddings=NUM_IDS, embedding_dim=3, name="mean", feature_names=["b"], pooling=PoolingType.MEAN
                ),
            ]
        )
        self.words = EmbeddingCollection(
            [EmbeddingConfig(num_embeddings=NUM_IDS, embedding_dim=5, name="words", feature_names=["s"])]
        )
        self.over = nn.Linear(4 + 3 + 5, 1)

    def logits(self, batch: Batch) -> Tensor:
        pooled = self.bags(batch.sparse_features).values()
        words = self.words(batch.sparse_features)["s"]
        bags = torch.repeat_interleave(torch.arange(len(batch)), words.lengths().long())
        first = torch.zeros(len(batch), 5).index_add(0, bags, words.values() ** 2)
        return self.over(torch.cat([pooled, first], dim=1)).squeeze(1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.logits(batch)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return losses, torch.sigmoid(logits)


class NotFinite(Model):
    """Its loss is not a number where the batch says so."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        losses, predictions = super().forward(batch)
        return losses + batch.extras["poison"].float().log() * 0.0, predictions


def _table(config):
    optimizer = OptimizerSpec(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=0.1, initial_accumulator=0.1)
    return table_spec(config, seed=table_seed(0, config.name), optimizer=optimizer, num_blocks=4)


def _batch(size: int, seed: int, poison: tuple[int, ...] = ()) -> Batch:
    """``poison``: samples whose loss is not a number in ``NotFinite``."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, (3, size))
    values = torch.from_numpy(rng.integers(0, NUM_IDS, int(lengths.sum())))
    kjt = KeyedJaggedTensor(
        keys=["a", "b", "s"], values=values, lengths=torch.from_numpy(lengths.reshape(-1)), stride=size
    )
    labels = torch.from_numpy(rng.integers(0, 2, size).astype(np.float32))
    healthy = torch.tensor([0 if sample in poison else 1 for sample in range(size)], dtype=torch.int64)
    return Batch(torch.empty(size, 0), kjt, labels, extras={"poison": healthy})


def _train(
    batches: list[list[Batch]],
    parts: int,
    *,
    model: Callable[[], nn.Module] = Model,
    codecs: dict[str, WireCodecs] | None = None,
    **loop,
) -> tuple[list[Rank], list[Trainer]]:
    """``batches``: by rank, by step."""
    ranks = build_ranks("a" * len(batches), model, _table, codecs=codecs)

    def body(rank: Rank) -> Trainer:
        trainer = trainer_of(rank, batches[rank.rank], accumulation_steps=parts, **loop)
        for _ in batches[0]:
            trainer.train_step()
        return trainer

    return ranks, on_ranks(ranks, body)


def _num_counted(trainers: list[Trainer]) -> int:
    """Samples in the metrics of all ranks."""
    return sum(int(trainer.metrics.state_dict()["bins"].sum()) for trainer in trainers) >> 24


def _close(a: list[Rank], b: list[Rank], atol: float = 1e-6) -> None:
    ours, theirs = rows_of(a), rows_of(b)
    assert {name: rows.keys() for name, rows in ours.items()} == {name: rows.keys() for name, rows in theirs.items()}
    for name, rows in ours.items():
        for row_id, parts in rows.items():
            for mine, other in zip(parts, theirs[name][row_id]):
                np.testing.assert_allclose(mine, other, rtol=1e-5, atol=atol, err_msg=f"{name} {row_id}")
    for rank in a:
        torch.testing.assert_close(rank.dense.flat, b[0].dense.flat, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("parts", [2, 8])
def test_fewer_samples_than_micro_batches(parts):
    """Some micro-batches are empty, on some ranks all of them."""
    sizes = [[3, 0, 9], [0, 0, 1]]
    batches = [[_batch(size, 10 * rank + step) for step, size in enumerate(row)] for rank, row in enumerate(sizes)]
    one, several = _train(batches, 1), _train(batches, parts)
    _close(one[0], several[0])
    assert _num_counted(one[1]) == _num_counted(several[1]) == 13
    assert [t.num_samples for t in several[1]] == [13, 13]


CODECS = {
    "lossy": {name: WireCodecs(Codec.INT8, Codec.FP16) for name in ("sum", "mean", "words")},
    "pooled": {"sum": WireCodecs(flow=Flow.POOLED), "mean": WireCodecs(flow=Flow.POOLED_BY_OWNER)},
    "lossy and pooled": {"sum": WireCodecs(Codec.FP16, Codec.BF16, Flow.POOLED)},
}


@pytest.mark.parametrize("codecs", CODECS.values(), ids=CODECS)
def test_micro_batches_equal_one_batch_whatever_the_codec_and_the_flow(codecs):
    batches = [[_batch(7, 10 * rank + step) for step in range(4)] for rank in range(2)]
    one, several = _train(batches, 1, codecs=codecs), _train(batches, 3, codecs=codecs)
    # A gradient that differs in its last bit may be rounded to another int8 or half; these bounds hold such steps.
    _close(one[0], several[0], atol=1e-6 if codecs is CODECS["pooled"] else 2e-3)


def test_s4_a_step_with_one_micro_batch_that_is_not_finite_counts_none_of_its_samples():
    """Nor do the ranks count it whose own losses were finite: at any world size the same samples are counted."""
    batches = [
        [_batch(6, 1), _batch(6, 2, poison=(5,)), _batch(6, 3)],
        [_batch(4, 4), _batch(4, 5), _batch(4, 6)],
    ]
    healthy = [[row[0], row[2]] for row in batches]
    for parts in (1, 3):
        ranks, trainers = _train(batches, parts, model=NotFinite, max_skipped_steps=1)
        others, plain = _train(healthy, parts, model=NotFinite)
        assert [trainer.skipped_steps for trainer in trainers] == [1, 1]
        assert _num_counted(trainers) == _num_counted(plain) == 20
        for trainer, other in zip(trainers, plain):
            assert trainer._window.loss_sum == other._window.loss_sum
        _close(ranks, others, atol=0.0)


class Dropped(Model):
    """Remembers the masks that its dropout drew."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self.masks.append(nn.functional.dropout(torch.ones(64)))
        return super().forward(batch)


def test_s9_dropout_is_drawn_anew_for_each_micro_batch_and_the_same_when_repeated():
    batches = [[_batch(6, step) for step in range(3)]]
    runs = [_train(batches, 2, model=Dropped)[0][0].model.masks for _ in range(2)]
    assert len(runs[0]) == 6
    assert all(torch.equal(a, b) for a, b in zip(*runs))
    assert len({tuple(mask.tolist()) for mask in runs[0]}) == 6


def _vbe_batch() -> Batch:
    """Keys of 2, 3 and 4 bags that stand for 4 samples."""
    kjt = KeyedJaggedTensor(
        keys=["a", "b", "s"],
        values=torch.tensor([1, 8, 0, 3, 3, 5, 7, 2, 2]),
        lengths=torch.tensor([2, 1, 0, 2, 1, 1, 0, 2, 0]),
        stride_per_key_per_rank=[[2], [3], [4]],
        inverse_indices=(["a", "b", "s"], torch.tensor([[1, 0, 0, 1], [2, 1, 0, 1], [0, 1, 2, 3]])),
    )
    return Batch(torch.empty(4, 0), kjt, torch.tensor([0.0, 1.0, 1.0, 0.0]))


def test_a_batch_with_a_variable_stride_per_key_runs_on_micro_batches():
    one, several = _train([[_vbe_batch()]], 1), _train([[_vbe_batch()]], 3)
    _close(one[0], several[0])
    assert _num_counted(several[1]) == 4


class LearnedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(num_embeddings=NUM_IDS, embedding_dim=4, name="w", feature_names=["a"])
        self.bags = EmbeddingBagCollection([config], is_weighted=True)

    def forward(self, batch: Batch) -> Tensor:
        return self.bags(batch.sparse_features).values().sum(dim=1)


def test_learned_weights_are_refused_on_all_ranks_with_the_option_to_change():
    def weighted(seed: int) -> Batch:
        kjt = _batch(5, seed).sparse_features
        weights = torch.ones(kjt.values().numel(), requires_grad=True)
        kjt = KeyedJaggedTensor(kjt.keys(), kjt.values(), weights=weights, lengths=kjt.lengths(), stride=5)
        return Batch(torch.empty(5, 0), kjt, torch.zeros(5))

    ranks = build_ranks("aa", LearnedWeights, _table)

    def body(rank: Rank) -> str:
        trainer = trainer_of(rank, [weighted(rank.rank)], accumulation_steps=2)
        with pytest.raises(ShoalError) as caught:
            trainer.train_step()
        return str(caught.value)

    first, second = on_ranks(ranks, body)
    assert first == second
    assert "ConfigError" in first and "gradient_accumulation_steps 1" in first


def test_s6_the_number_of_collectives_is_that_of_one_batch():
    batches = [[_batch(5, 10 * rank + step) for step in range(3)] for rank in range(2)]
    counts: list[dict[int, KindCount]] = []
    for parts in (1, 8):
        ranks, _ = _train(batches, parts)
        counts.append({kind: count.num_collectives for kind, count in ranks[0].session.exchange.counts.items()})
    assert counts[0] == counts[1]
