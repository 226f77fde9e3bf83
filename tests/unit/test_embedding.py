"""EmbeddingBagCollection and EmbeddingCollection alone and attached; against TorchRec's where it is installed."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from session_ranks import build_ranks, on_ranks, trainer_of

from shoal.actors.embedding import EmbeddingBagCollection, EmbeddingCollection, lazy_tables
from shoal.kernels.batch import Batch
from shoal.kernels.errors import ConfigError, DataError
from shoal.kernels.jagged import JaggedTensor, KeyedJaggedTensor
from shoal.kernels.rowstore import initial_rows
from shoal.kernels.tables import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType, table_seed, table_spec

try:
    import torchrec
except ImportError:
    torchrec = None

needs_torchrec = pytest.mark.skipif(torchrec is None, reason="TorchRec (extra peers) is the oracle here")


def bag_tables(pooling=PoolingType.SUM, kind=EmbeddingBagConfig, **changes) -> list:
    return [
        kind(num_embeddings=20, embedding_dim=3, name="t1", feature_names=["f1", "f2"], pooling=pooling, **changes),
        kind(num_embeddings=10, embedding_dim=5, name="t2", feature_names=["f2"], pooling=pooling, **changes),
    ]


def sequence_tables() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(num_embeddings=20, embedding_dim=4, name="t1", feature_names=["f1", "f2"]),
        EmbeddingConfig(num_embeddings=10, embedding_dim=4, name="t2", feature_names=["f2"]),
    ]


def batch(module=None, *, is_weighted=False, **changes) -> KeyedJaggedTensor:
    """Keys f2, f1 (not the tables' order), 4 samples with empty and repeated ids."""
    arguments = {
        "keys": ["f2", "f1"],
        "values": torch.tensor([9, 1, 1, 0, 3, 19, 19, 4, 0]),
        "lengths": torch.tensor([2, 0, 1, 1, 0, 4, 0, 1]),
        "weights": torch.linspace(0.1, 0.9, 9) if is_weighted else None,
    }
    kind = KeyedJaggedTensor if module is None else module.KeyedJaggedTensor
    return kind(**(arguments | changes))


def test_rows_start_as_the_row_store_would_create_them():
    for data_type in (DataType.FP32, DataType.FP16, DataType.BF16):
        ebc = EmbeddingBagCollection(bag_tables(data_type=data_type), seed=5)
        for config in ebc.embedding_bag_configs():
            spec = table_spec(config, seed=table_seed(5, config.name))
            expected = initial_rows(spec, torch.arange(config.num_embeddings))
            assert torch.equal(ebc.embedding_bags[config.name].weight.float(), expected)
            assert expected.unique().numel() > expected.numel() // 2
    ec = EmbeddingCollection(sequence_tables(), seed=5)
    assert not torch.equal(ec.embeddings["t2"].weight[:, :3], ebc.embedding_bags["t2"].weight[:, :3].float())


def test_output_names_order_and_state_dict_keys():
    ebc = EmbeddingBagCollection(bag_tables())
    output = ebc(batch())
    assert output.keys() == ["f1", "f2@t1", "f2@t2"] and output.values().shape == (4, 11)
    assert list(ebc.state_dict()) == ["embedding_bags.t1.weight", "embedding_bags.t2.weight"]
    weight = ebc.embedding_bags["t2"].weight
    assert torch.equal(output["f2@t2"], torch.stack([weight[9] + weight[1], 0 * weight[0], weight[1], weight[0]]))
    ec = EmbeddingCollection(sequence_tables(), need_indices=True)
    sequences = ec(batch())
    assert (
        list(sequences)
        == ["f1", "f2@t1", "f2@t2"]
        == [name for names in ec.embedding_names_by_table() for name in names]
    )
    assert sequences["f1"].values().shape == (5, 4) and sequences["f2@t2"].weights().tolist() == [9, 1, 1, 0]
    assert list(ec.state_dict()) == ["embeddings.t1.weight", "embeddings.t2.weight"]


@needs_torchrec
@pytest.mark.parametrize("pooling", ["SUM", "MEAN", "weighted", "VBE"])
def test_pooled_outputs_and_gradients_are_torchrecs(pooling):
    is_weighted = pooling == "weighted"
    name = pooling if pooling == "MEAN" else "SUM"
    ebc = EmbeddingBagCollection(bag_tables(PoolingType[name]), is_weighted=is_weighted)
    peer = torchrec.EmbeddingBagCollection(
        tables=bag_tables(torchrec.PoolingType[name], torchrec.EmbeddingBagConfig), is_weighted=is_weighted
    )
    peer.load_state_dict(ebc.state_dict())
    changes = {}
    if pooling == "VBE":
        changes = {
            "stride_per_key_per_rank": [[3], [5]],
            "inverse_indices": (["f2", "f1"], torch.tensor([[2, 0, 1, 1, 0, 2], [4, 4, 0, 1, 2, 3]])),
        }
    left = ebc(batch(is_weighted=is_weighted, **changes))
    right = peer(batch(torchrec, is_weighted=is_weighted, **changes))
    assert left.keys() == right.keys() and left.length_per_key() == right.length_per_key()
    torch.testing.assert_close(left.values(), right.values(), rtol=0, atol=0)
    for output in (left, right):
        (output.values() ** 2).sum().backward()
    for (key, ours), (other, theirs) in zip(ebc.named_parameters(), peer.named_parameters()):
        assert key == other
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)


@needs_torchrec
def test_sequences_and_gradients_are_torchrecs():
    ec = EmbeddingCollection(sequence_tables(), need_indices=True)
    tables = [
        torchrec.EmbeddingConfig(
            num_embeddings=c.num_embeddings, embedding_dim=4, name=c.name, feature_names=c.feature_names
        )
        for c in ec.embedding_configs()
    ]
    peer = torchrec.EmbeddingCollection(tables=tables, need_indices=True)
    peer.load_state_dict(ec.state_dict())
    left, right = ec(batch()), peer(batch(torchrec))
    assert list(left) == list(right)
    for name in left:
        for read in ("values", "lengths", "weights"):
            assert torch.equal(getattr(left[name], read)(), getattr(right[name], read)())
        for output in (left, right):
            (output[name].values() ** 2).sum().backward(retain_graph=True)
    for ours, theirs in zip(ec.parameters(), peer.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)


@needs_torchrec
def test_modules_trace_and_script_like_torchrecs():
    from torchrec.fx import symbolic_trace

    ebc = EmbeddingBagCollection(bag_tables(), is_weighted=True)
    kjt = batch(is_weighted=True)
    traced = symbolic_trace(ebc)
    assert torch.equal(torch.jit.script(traced)(kjt).values(), ebc(kjt).values())
    ec = EmbeddingCollection(sequence_tables())
    assert torch.equal(torch.jit.script(ec)(kjt)["f1"].values(), ec(kjt)["f1"].values())
    assert torch.equal(symbolic_trace(ec)(kjt)["f1"].values(), ec(kjt)["f1"].values())


def test_batch_of_no_samples():
    nothing = {"values": torch.empty(0, dtype=torch.int64), "lengths": torch.empty(0, dtype=torch.int64)}
    assert EmbeddingBagCollection(bag_tables())(batch(**nothing)).values().shape == (0, 11)
    assert EmbeddingCollection(sequence_tables())(batch(**nothing))["f1"].values().shape == (0, 4)


def test_attached_collections_have_no_weights_and_ask_the_session():
    ebc, ec = EmbeddingBagCollection(bag_tables()), EmbeddingCollection(sequence_tables(), need_indices=True)
    seen = []

    def pooled(collection, kjt):
        seen.append((collection, kjt))
        return [torch.arange(44.0).view(4, 11)]

    ebc.attach(pooled)
    kjt = batch()
    output = ebc(kjt)
    assert list(ebc.parameters()) == [] and seen[0][0] is ebc and seen[0][1] is kjt
    assert output["f2@t2"].tolist() == torch.arange(44.0).view(4, 11)[:, 6:].tolist()
    ec.attach(lambda collection, kjt: [torch.zeros(5, 4), torch.ones(4, 4), torch.ones(4, 4)])
    sequences = ec(kjt)
    assert isinstance(sequences["f2@t1"], JaggedTensor) and sequences["f1"].weights().tolist() == [3, 19, 19, 4, 0]
    ebc.detach()
    ec.detach()
    assert ebc.embedding_bags["t1"].weight.is_meta and list(ec.state_dict()) == [
        "embeddings.t1.weight",
        "embeddings.t2.weight",
    ]


def test_detach_gives_back_weights_that_were_kept():
    ebc = EmbeddingBagCollection(bag_tables())
    expected = ebc(batch()).values()
    ebc.attach(lambda collection, kjt: [], keep_weights=True)
    assert ebc.is_attached() and list(ebc.parameters()) == []
    ebc.detach()
    assert torch.equal(ebc(batch()).values(), expected)


def test_attached_vbe_batch_reaches_the_session_expanded():
    ebc = EmbeddingBagCollection(bag_tables())
    kjt = batch(
        stride_per_key_per_rank=[[3], [5]],
        inverse_indices=(["f2", "f1"], torch.tensor([[2, 0], [4, 4]])),
    )
    expected = ebc(kjt).values()
    plain = EmbeddingBagCollection(bag_tables())
    ebc.attach(lambda collection, expanded: [plain(expanded).values()])
    assert torch.equal(ebc(kjt).values(), expected)
    with pytest.raises(DataError, match="inverse indices"):
        ebc(batch(stride_per_key_per_rank=[[3], [5]]))


def test_lazy_and_meta_tables_take_no_memory():
    with lazy_tables():
        lazy = EmbeddingBagCollection(
            [EmbeddingBagConfig(num_embeddings=1 << 40, embedding_dim=64, name="huge")], device=torch.device("cpu")
        )
    assert lazy.embedding_bags["huge"].weight.is_meta
    assert lazy.embedding_bag_configs()[0].feature_names == ["huge"]
    with torch.device("meta"):
        assert EmbeddingCollection(sequence_tables()).embeddings["t1"].weight.is_meta
    assert EmbeddingBagCollection(bag_tables()).device == torch.device("cpu")


@pytest.mark.parametrize(
    ("tables", "is_weighted", "message"),
    [
        ([bag_tables()[0]] * 2, False, "Duplicate table name 't1'"),
        (bag_tables(PoolingType.MEAN), True, "MEAN pooling with per-sample weights"),
        (bag_tables(PoolingType.NONE), False, "does not pool"),
        (bag_tables(data_type=DataType.INT4), False, "cannot be trained"),
        ([EmbeddingBagConfig(num_embeddings=1, embedding_dim=1, name="a.b")], False, "table name 'a.b' cannot be used"),
        ([EmbeddingBagConfig(num_embeddings=1, embedding_dim=1)], False, "table name '' cannot be used"),
    ],
)
def test_bad_tables_are_refused_by_name(tables, is_weighted, message):
    with pytest.raises(ConfigError, match=message):
        EmbeddingBagCollection(tables, is_weighted=is_weighted)


def test_sequences_need_one_width():
    tables = sequence_tables()
    tables[1].embedding_dim = 5
    with pytest.raises(ConfigError, match="table 't2': embedding_dim is 5"):
        EmbeddingCollection(tables)


def test_missing_feature_is_named():
    with pytest.raises(KeyError, match="no feature 'f1'; it has"):
        EmbeddingBagCollection(bag_tables())(batch(keys=["f2", "f3"]))


class EmptyCollections(nn.Module):
    """Collections without tables, beside one with a table, or alone."""

    def __init__(self, num_tables: int) -> None:
        super().__init__()
        table = EmbeddingBagConfig(num_embeddings=20, embedding_dim=3, name="t", feature_names=["f1"])
        self.bags = EmbeddingBagCollection([table][:num_tables])
        self.no_bags, self.no_words = EmbeddingBagCollection([]), EmbeddingCollection([])
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, batch: Batch) -> torch.Tensor:
        assert self.no_words(batch.sparse_features) == {}
        nothing = self.no_bags(batch.sparse_features)
        assert nothing.keys() == [] and nothing.values().shape == (len(batch), 0)
        return self.bags(batch.sparse_features).values().sum(dim=1) + self.bias


@pytest.mark.parametrize("num_tables", [0, 1])
def test_collections_without_tables_train_with_the_others(num_tables):
    ranks = build_ranks("ab", lambda: EmptyCollections(num_tables), lambda c: table_spec(c, seed=1, num_blocks=2))

    def train(rank):
        sizes = (3, 0 if rank.rank else 2)
        features = [KeyedJaggedTensor(keys=["f1"], values=torch.arange(n), lengths=torch.ones(n).int()) for n in sizes]
        batches = [Batch(dense_features=torch.empty(n, 0), sparse_features=f, labels=torch.zeros(n))
                   for n, f in zip(sizes, features)]  # fmt: skip
        trainer = trainer_of(rank, batches)
        for _ in batches:
            trainer.train_step()
        return rank.model.bias.item(), rank.store.num_rows()

    (bias, rows), other = on_ranks(ranks, train)
    # The loss of a sample has gradient 1 by the bias, and samples of a batch weigh 1 together: -0.1 per step.
    assert (bias, other[0]) == (pytest.approx(-0.2), bias) and rows + other[1] == 3 * num_tables
