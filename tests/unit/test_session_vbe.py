"""A session of one rank fed with a VBE batch: the same outputs and updates as the module alone on the same batch."""

import numpy as np
import pytest
import torch
from torch import nn

from shoal.actors.embedding import EmbeddingBagCollection
from shoal.actors.groups import GroupSpec, form, run_hash
from shoal.actors.session import Session
from shoal.actors.sharded import describe_model
from shoal.kernels.errors import DataError
from shoal.kernels.exchange import Exchange, Identity
from shoal.kernels.jagged import KeyedJaggedTensor
from shoal.kernels.plan import StepPlan
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import OptimizerKind, OptimizerSpec
from shoal.kernels.tables import EmbeddingBagConfig, table_seed, table_spec


def collection() -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name="t1", feature_names=["a"]),
        EmbeddingBagConfig(num_embeddings=9, embedding_dim=3, name="t2", feature_names=["b"]),
    ]
    return EmbeddingBagCollection(tables)


def vbe_batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([1, 8, 0, 3, 3, 5]),
        lengths=torch.tensor([2, 1, 0, 2, 1]),
        stride_per_key_per_rank=[[2], [3]],
        inverse_indices=(["a", "b"], torch.tensor([[1, 0, 0, 1], [2, 1, 0, 1]])),
    )


def one_rank(model: nn.Module) -> tuple[Session, RowStore]:
    optimizer = OptimizerSpec(kind=OptimizerKind.SGD, lr=0.5)
    described = describe_model(model, lambda c: table_spec(c, seed=table_seed(0, c.name), optimizer=optimizer), {})
    store = RowStore(described.tables, undo_steps=0)
    store.add_all_blocks()
    owners = [np.zeros(1, dtype=np.uint16)] * 2
    plan = StepPlan(store, described.tables, described.features, owners, rank=0, world_size=1)
    groups = form(GroupSpec(run="vbe", epoch=0, rank=0, hosts=("h",)))
    identity = Identity(run=run_hash("vbe"), epoch=0, rank=0, world_size=1, plan_hash=plan.hash, num_tables=2)
    return Session(described, store, plan, Exchange(groups.transport, identity, timeout_s=10.0)), store


def test_a_vbe_batch_without_inverse_indices_is_an_error_of_the_step():
    session, _ = one_rank(nn.ModuleDict({"ebc": collection()}))
    batch = vbe_batch()
    batch._inverse_indices = None
    with pytest.raises(DataError, match="no inverse indices"):
        session.begin(0, batch, is_training=True)


def test_a_vbe_batch_trains_like_the_module_alone():
    alone, model = collection(), nn.ModuleDict({"ebc": collection()})
    session, store = one_rank(model)
    batch, factor = vbe_batch(), torch.arange(28.0).view(4, 7)
    session.begin(0, batch, is_training=True, loss_weight=4.0)
    collectives = session.exchange.num_collectives()
    output = model["ebc"](batch).values()
    assert session.exchange.num_collectives() == collectives, "the forward must find what begin has looked up"
    expected = alone(vbe_batch()).values()
    torch.testing.assert_close(output, expected)
    for result in (output, expected):
        (result * factor).sum().backward()
    session.end(dense_grad=None, learning_rates=np.full(2, 0.5, dtype=np.float32))
    for index, name in enumerate(("t1", "t2")):
        weight = alone.embedding_bags[name].weight
        rows = store.lookup(index, torch.arange(9))
        torch.testing.assert_close(rows, weight.detach() - 0.5 * weight.grad)
