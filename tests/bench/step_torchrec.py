"""TorchRec's side of the step benchmark, and the dense part alone: its own classes do the work.

Legend: B batch, F features, D width.
"""

from __future__ import annotations

import itertools
import logging
import os
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.jobs.workloads import IdWorkload
from shoal.kernels.interaction import dot_interaction

DENSE_LAYERS = (64,)
OVER_LAYERS = (128, 64, 1)
LR = 0.02


def join(rank: int, world_size: int, torch_port: int) -> tuple[object, int]:
    """TorchRec's default group over Gloo and one thread, and beside it a store for our own groups: (store, its port).

    The store, rank 0's, must be kept; the port is the same on all ranks.
    """
    from shoal.actors.groups import host_store

    quieten()
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", torch_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    own_store, _, port = host_store() if rank == 0 else (None, "", 0)
    ports = [port]
    dist.broadcast_object_list(ports, src=0)
    return own_store, ports[0]


class NativeInteraction(nn.Module):
    """Our native dot interaction in the place of TorchRec's ``InteractionArch``."""

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        return dot_interaction(dense_features, sparse_features)


class Raw:
    """A batch before it is anybody's class: the tensors, built once; the KJT is built anew in every step."""

    def __init__(self, workload: IdWorkload, index: int) -> None:
        self.keys = list(workload.feature_names)
        self.values = torch.from_numpy(workload.values(index))
        self.lengths = torch.from_numpy(workload.lengths())
        self.dense = torch.from_numpy(workload.dense(index))
        self.labels = torch.from_numpy(workload.labels(index))


class TorchRecModel:
    """A DistributedModelParallel DLRM, of one sharding type over Gloo, row-wise Adagrad fused in backward."""

    def __init__(self, workload: IdWorkload, world_size: int, sharding_type: str = "table_wise") -> None:
        import torchrec
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
        from torchrec.models.dlrm import DLRM, DLRMTrain
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

        tables = [
            torchrec.EmbeddingBagConfig(
                name=f"t_{name}",
                embedding_dim=workload.embedding_dim,
                num_embeddings=workload.num_embeddings,
                feature_names=[name],
            )
            for name in workload.feature_names
        ]
        collection = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        layers = [*DENSE_LAYERS, workload.embedding_dim]
        cpu = torch.device("cpu")
        model = DLRMTrain(DLRM(collection, workload.num_dense, layers, list(OVER_LAYERS), dense_device=cpu))
        rowwise = torchrec.optim.RowWiseAdagrad
        apply_optimizer_in_backward(rowwise, model.model.sparse_arch.parameters(), {"lr": LR})
        sharders = [EmbeddingBagCollectionSharder()]
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=world_size, compute_device="cpu"),
            constraints={
                # Two column shards where the columns are cut.
                table.name: ParameterConstraints(
                    sharding_types=[sharding_type], min_partition=workload.embedding_dim // 2
                )
                for table in tables
            },
        )
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
        self._dlrm = model.model
        self._interactions = {False: model.model.inter_arch, True: NativeInteraction()}
        self.model = DistributedModelParallel(model, device=cpu, plan=plan, sharders=sharders)
        dense = [p for name, p in self.model.named_parameters() if "sparse" not in name]
        self.optimizer = torch.optim.Adagrad(dense, lr=LR)

    def use_native_interaction(self, is_native: bool) -> None:
        self._dlrm.inter_arch = self._interactions[is_native]

    def plain_step(self, batches: Sequence[Raw]) -> Callable[[], None]:
        """A step of plain DistributedModelParallel over the batches in turn."""
        raws = itertools.cycle(batches)

        def step() -> None:
            loss, _ = self.model(torchrec_batch(next(raws)))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

        return step

    def pipelined_step(self, batches: Sequence[Raw]) -> Callable[[], None]:
        """A step of TrainPipelineSparseDist: the input of the next batch is exchanged during this one."""
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        cpu = torch.device("cpu")
        pipeline = TrainPipelineSparseDist(self.model, self.optimizer, cpu, execute_all_batches=True)
        stream = map(torchrec_batch, itertools.cycle(batches))
        return lambda: pipeline.progress(stream)


def torchrec_batch(raw: Raw):  # type: ignore[no-untyped-def]
    """TorchRec's batch, with a KeyedJaggedTensor that has computed nothing yet."""
    import torchrec
    from torchrec.datasets.utils import Batch

    kjt = torchrec.KeyedJaggedTensor(keys=raw.keys, values=raw.values, lengths=raw.lengths)
    return Batch(dense_features=raw.dense, sparse_features=kjt, labels=raw.labels)


class TorchRecDense(nn.Module):
    """The dense layers of TorchRec's DLRM, from its own classes; losses [B] of embeddings [B, F, D]."""

    def __init__(self, workload: IdWorkload, is_native: bool) -> None:
        super().__init__()
        from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch

        num_features, dim = workload.num_features, workload.embedding_dim
        self.dense_arch = DenseArch(workload.num_dense, [*DENSE_LAYERS, dim])
        self.inter_arch = NativeInteraction() if is_native else InteractionArch(num_features)
        self.over_arch = OverArch(dim + num_features * (num_features + 1) // 2, list(OVER_LAYERS))
        self.loss = nn.BCEWithLogitsLoss(reduction="none")

    def forward(self, dense_features: Tensor, embeddings: Tensor, labels: Tensor) -> Tensor:
        joined = self.inter_arch(dense_features=self.dense_arch(dense_features), sparse_features=embeddings)
        return self.loss(self.over_arch(joined).squeeze(-1), labels)


def dense_step(workload: IdWorkload, batches: Sequence[Raw], is_native: bool) -> Callable[[], None]:
    """Forward, backward and optimizer of the dense layers alone, on fixed embeddings that take a gradient."""
    model = TorchRecDense(workload, is_native)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    embeddings = torch.randn(workload.batch_size, workload.num_features, workload.embedding_dim) * 0.01
    raws = itertools.cycle(batches)

    def step() -> None:
        raw = next(raws)
        leaf = embeddings.requires_grad_(True)
        leaf.grad = None
        loss = model(raw.dense, leaf, raw.labels).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def quieten() -> None:
    """TorchRec logs and warns a lot at set-up."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
