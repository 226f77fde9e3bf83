"""Our side of the step benchmark: one rank of a session, built as the worker builds it, stepping over batches in turn.

Legend: B batch, F features, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from step_torchrec import DENSE_LAYERS, LR, OVER_LAYERS, Raw, TorchRecDense
from torch import Tensor, nn

from shoal.actors.dense import DenseOptimizerSpec, DenseReplica
from shoal.actors.embedding import EmbeddingBagCollection, lazy_tables
from shoal.actors.groups import GroupSpec, form, run_hash
from shoal.actors.look_ahead import StepInput
from shoal.actors.session import Session
from shoal.actors.sharded import describe_model
from shoal.jobs.models.dlrm import DLRM
from shoal.jobs.workloads import IdWorkload
from shoal.kernels.column_blocks import column_widths, cut_columns
from shoal.kernels.exchange import Exchange, Identity
from shoal.kernels.frame import Flag
from shoal.kernels.jagged import KeyedJaggedTensor
from shoal.kernels.plan import StepPlan
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import OptimizerKind, OptimizerSpec
from shoal.kernels.tables import EmbeddingBagConfig, table_seed, table_spec

ROWWISE_ADAGRAD = OptimizerSpec(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=LR)


class SameDense(nn.Module):
    """Our collection under the dense layers of TorchRec's DLRM: the same dense code on both sides."""

    def __init__(self, workload: IdWorkload, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.collection, self.dense = collection, TorchRecDense(workload, is_native=False)
        self._shape = (workload.num_features, workload.embedding_dim)

    def forward(self, dense_features: Tensor, kjt: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        embeddings = self.collection(kjt).values().reshape(-1, *self._shape)
        return self.dense(dense_features, embeddings, labels)


class ShippedDense(nn.Module):
    """The DLRM that Shoal ships."""

    def __init__(self, workload: IdWorkload, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        layers = [*DENSE_LAYERS, workload.embedding_dim]
        self.dlrm = DLRM(collection, workload.num_dense, layers, list(OVER_LAYERS))
        self.loss = nn.BCEWithLogitsLoss(reduction="none")

    def forward(self, dense_features: Tensor, kjt: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        return self.loss(self.dlrm(dense_features, kjt).squeeze(-1), labels)


class _Ahead:
    """A LookAhead over batches in turn."""

    def __init__(self, batches: Sequence[Raw]) -> None:
        self._batches = batches
        self.offered: dict[int, KeyedJaggedTensor] = {}

    def may_follow(self, step: int, flags: Flag) -> bool:
        return True

    def offer(self, step: int) -> StepInput:
        raw = self._batches[step % len(self._batches)]
        kjt = KeyedJaggedTensor(keys=raw.keys, values=raw.values, lengths=raw.lengths)
        self.offered[step] = kjt
        return StepInput(kjt, float(len(raw.labels)))


class ShoalRank:
    """One rank: model, store, plan, exchange and session; tables whole on the ranks in turn (table-wise), or the
    ``column_blocks`` of each.

    ``store_port`` is that of a TCPStore that all ranks can reach; ``epoch`` tells several sessions of a run apart.
    ``optimizer_scope`` as in a job's config: TorchRec's is "shard". ``groups``: what the GroupSpec says beyond that.
    """

    def __init__(
        self,
        make_model: Callable[[IdWorkload, EmbeddingBagCollection], nn.Module],
        workload: IdWorkload,
        rank: int,
        world_size: int,
        store_port: int,
        epoch: int,
        *,
        column_blocks: int = 1,
        optimizer_scope: str = "table",
        groups: Mapping[str, Any] | None = None,
    ) -> None:
        configs = [
            EmbeddingBagConfig(
                name=f"t_{name}",
                embedding_dim=workload.embedding_dim,
                num_embeddings=workload.num_embeddings,
                feature_names=[name],
            )
            for name in workload.feature_names
        ]
        torch.manual_seed(0)
        with lazy_tables():
            self.model = make_model(workload, EmbeddingBagCollection(configs))

        def make_spec(config: Any) -> Any:
            spec = table_spec(config, seed=table_seed(0, config.name), optimizer=ROWWISE_ADAGRAD)
            widths = column_widths(spec.embedding_dim, column_blocks, table=spec.name)
            return cut_columns(spec, widths, has_own_statistic=optimizer_scope == "shard")

        tables = describe_model(self.model, make_spec, {})
        near = {"run": "bench", "rank": rank, "hosts": ("h",) * world_size, "store_port": store_port}
        self._groups = form(GroupSpec(epoch=epoch, **(groups or near)))
        owners = [np.array([index % world_size], dtype=np.uint16) for index in range(len(tables.tables))]
        store = RowStore(tables.tables, num_threads=1, undo_steps=0)
        for index, owner in enumerate(owners):
            if owner[0] == rank:
                store.add_block(index, 0)
        plan = StepPlan(store, tables.tables, tables.features, owners, rank=rank, world_size=world_size)
        identity = Identity(
            run=run_hash("bench"),
            epoch=epoch,
            rank=rank,
            world_size=world_size,
            plan_hash=plan.hash,
            num_tables=len(tables.tables),
        )
        exchange = Exchange(
            self._groups.transport, identity, timeout_s=60.0, payload_transport=self._groups.payload_transport
        )
        self.session = Session(tables, store, plan, exchange)
        self.dense = DenseReplica(self.model, DenseOptimizerSpec(kind="adagrad", lr=LR))
        self._rates = np.full(len(tables.tables), LR, dtype=np.float32)
        self._step = 0
        self.phases: list[dict[str, float]] = []

    def step_over(self, batches: Sequence[Raw], *, overlap: bool = False) -> Callable[[], Any]:
        """A training step over the batches in turn, as the trainer does it, without feed and metrics."""
        ahead = _Ahead(batches) if overlap else None

        def step() -> None:
            raw, session, dense = batches[self._step % len(batches)], self.session, self.dense
            session.clock.take()
            if ahead is not None and session.is_open(self._step):
                kjt = ahead.offered.pop(self._step)
                head = session.resume(self._step, ahead)
            else:
                kjt = KeyedJaggedTensor(keys=raw.keys, values=raw.values, lengths=raw.lengths)
                weight = float(len(raw.labels))
                head = session.begin(self._step, kjt, is_training=True, loss_weight=weight, ahead=ahead)
            session.clock.start()
            dense.zero_grad()
            loss = self.model(raw.dense, kjt, raw.labels).sum() / head.loss_weight
            loss.backward()
            dense.rebind_grads()
            session.clock.mark("dense")
            session.end(dense_grad=dense.grad, learning_rates=self._rates)
            dense.step(LR)
            session.clock.mark("optimizer")
            self.phases.append(session.clock.take())
            self._step += 1

        return step

    def close(self) -> None:
        """Leave the run together: a closing exchange, then the groups."""
        self.session.close(self._step)
        self.session.detach()
        self._groups.destroy()
