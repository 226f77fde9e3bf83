"""Models: TorchRec's DLRM with the same weights gives the same logits; shapes, batches of size 0, clear errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.actors.embedding import EmbeddingBagCollection
from shoal.jobs.models import deepfm, dlrm, logistic
from shoal.jobs.models.layers import ClickTask, perceptron, tables_from_args
from shoal.kernels.batch import Batch
from shoal.kernels.errors import ConfigError
from shoal.kernels.jagged import KeyedJaggedTensor
from shoal.kernels.spec import PoolingType
from shoal.kernels.tables import EmbeddingBagConfig

TABLES = {"user": 20, "item": {"num_embeddings": 30, "features": ["item", "last_item"], "pooling": "MEAN"}}
KEYS = ["user", "item", "last_item"]


def make_batch(size: int, num_dense: int = 3, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, len(KEYS) * size)
    values = rng.integers(0, 20, int(lengths.sum()))
    kjt = KeyedJaggedTensor.from_lengths_sync(KEYS, torch.tensor(values), torch.tensor(lengths, dtype=torch.int32))
    return Batch(
        dense_features=torch.tensor(rng.standard_normal((size, num_dense)), dtype=torch.float32),
        sparse_features=kjt,
        labels=torch.tensor(rng.integers(0, 2, size), dtype=torch.float32),
    )


def all_models():
    torch.manual_seed(0)
    return {
        "dlrm": dlrm.build(tables=TABLES, num_dense=3, embedding_dim=8, dropout=0.1),
        "deepfm": deepfm.build(tables=TABLES, num_dense=3, embedding_dim=8),
        "fm": deepfm.build(tables=TABLES, num_dense=3, embedding_dim=8, hidden=[]),
        "logistic": logistic.build(tables=TABLES, num_dense=3),
    }


@pytest.mark.parametrize("name", ["dlrm", "deepfm", "fm", "logistic"])
@pytest.mark.parametrize("size", [0, 1, 17])
def test_forward_returns_losses_and_probabilities_per_sample(name, size):
    model = all_models()[name].eval()
    batch = make_batch(size)
    losses, predictions = model(batch)
    assert losses.shape == predictions.shape == (size,)
    assert losses.dtype == predictions.dtype == torch.float32
    assert not predictions.requires_grad
    want = torch.nn.functional.binary_cross_entropy(predictions, batch.labels, reduction="none")
    assert torch.allclose(losses, want, atol=1e-5)
    losses.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", ["dlrm", "deepfm", "fm", "logistic"])
def test_training_lowers_the_loss(name):
    model = all_models()[name]
    batch = make_batch(64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    first = None
    for _ in range(30):
        loss = model(batch)[0].mean()
        first = first if first is not None else loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.8 * first


def test_dlrm_equals_torchrec():
    models = pytest.importorskip("torchrec.models.dlrm")
    from torchrec.modules.embedding_configs import EmbeddingBagConfig as PeerConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection as PeerCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor as PeerKJT

    def configs(cls):
        return [
            cls(name="t1", num_embeddings=20, embedding_dim=8, feature_names=["user"]),
            cls(name="t2", num_embeddings=30, embedding_dim=8, feature_names=["item", "last_item"]),
        ]

    torch.manual_seed(3)
    peer = models.DLRM(PeerCollection(tables=configs(PeerConfig)), 3, [16, 8], [12, 5, 1])
    ours = dlrm.DLRM(EmbeddingBagCollection(tables=configs(EmbeddingBagConfig)), 3, [16, 8], [12, 5, 1])
    theirs = dict(peer.named_parameters())
    tables = {k: v for k, v in theirs.items() if "embedding_bags" in k}
    layers = [v for k, v in theirs.items() if "embedding_bags" not in k]
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "embedding_bags" in name:
                (source,) = (v for k, v in tables.items() if k.split(".")[-2] == name.split(".")[-2])
            else:
                source = layers.pop(0)
            parameter.copy_(source)
    assert not layers
    batch = make_batch(33)
    kjt = batch.sparse_features
    peer_kjt = PeerKJT.from_lengths_sync(KEYS, kjt.values(), kjt.lengths())
    want = peer(dense_features=batch.dense_features, sparse_features=peer_kjt)
    got = ours(dense_features=batch.dense_features, sparse_features=kjt)
    assert got.shape == want.shape == (33, 1)
    assert torch.allclose(got, want, atol=1e-6)
    peer_loss, _ = models.DLRMTrain(peer)(_PeerBatch(batch.dense_features, peer_kjt, batch.labels))
    assert torch.allclose(dlrm.DLRMTrain(ours)(batch)[0].mean(), peer_loss, atol=1e-6)


class _PeerBatch:
    def __init__(self, dense_features, sparse_features, labels):
        self.dense_features, self.sparse_features, self.labels = dense_features, sparse_features, labels


def test_factorization_machine_equals_the_sum_over_pairs():
    model = all_models()["fm"].eval()
    batch = make_batch(9)
    fm = model.model
    vectors = fm.embedding_bag_collection(batch.sparse_features).values().reshape(9, 3, 8)
    pairs = sum((vectors[:, i] * vectors[:, j]).sum(1) for i in range(3) for j in range(i + 1, 3))
    linear = fm.linear(batch.dense_features, batch.sparse_features)
    got = fm(batch.dense_features, batch.sparse_features)
    assert torch.allclose(got, linear + pairs, atol=1e-5)


def test_dlrm_without_dense_features_has_a_learned_constant():
    model = dlrm.build(tables=TABLES, num_dense=0, embedding_dim=4, dense_arch=())
    assert model(make_batch(5, num_dense=0))[0].shape == (5,)


def test_same_seed_builds_the_same_model():
    def state():
        torch.manual_seed(11)
        return dlrm.build(tables=TABLES, num_dense=2).state_dict()

    first, second = state(), state()
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_meta_device_allocates_nothing():
    model = dlrm.build(tables={"huge": 10**9}, num_dense=2, device="meta")
    assert all(p.is_meta for p in model.parameters())


def test_short_table_notation():
    user, item = tables_from_args(TABLES, 8)
    assert (user.name, user.num_embeddings, user.feature_names) == ("user", 20, ["user"])
    assert user.pooling is PoolingType.SUM and item.pooling is PoolingType.MEAN
    assert item.feature_names == ["item", "last_item"] and item.embedding_dim == 8


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, "must map"),
        (["user"], "must map"),
        ({"user": "many"}, r"tables\.user is 'many'"),
        ({"user": {"num_embedings": 3}}, "did you mean 'num_embeddings'"),
        ({"user": {"features": ["u"]}}, r"user\.num_embeddings is None"),
        ({"user": -1}, "-1; it must be"),
        ({"user": {"num_embeddings": 3, "pooling": "MAX"}}, "SUM or MEAN"),
    ],
)
def test_wrong_tables_are_named(tables, message):
    with pytest.raises(ConfigError, match=message):
        tables_from_args(tables, 8)


def test_wrong_widths_are_named():
    collection = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name="a", num_embeddings=3, embedding_dim=4, feature_names=["a"]),
            EmbeddingBagConfig(name="b", num_embeddings=3, embedding_dim=8, feature_names=["b"]),
        ]
    )
    with pytest.raises(ValueError, match=r"one width.*'a': 4"):
        dlrm.DLRM(collection, 3, [4], [1])
    collection = EmbeddingBagCollection(tables_from_args(TABLES, 8))
    with pytest.raises(ValueError, match="tables' width"):
        dlrm.DLRM(collection, 3, [16, 4], [1])
    with pytest.raises(ValueError, match="width 1"):
        logistic.LogisticRegression(collection, 3)
    with pytest.raises(ConfigError, match="layer sizes"):
        perceptron(3, [])


def test_click_task_takes_any_model_of_dense_and_sparse_features():
    class Constant(torch.nn.Module):
        def forward(self, dense_features, sparse_features):
            return dense_features.new_zeros(len(dense_features), 1)

    losses, predictions = ClickTask(Constant())(make_batch(4))
    assert predictions.tolist() == [0.5] * 4
    assert torch.allclose(losses, torch.full((4,), float(np.log(2))))
