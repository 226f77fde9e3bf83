"""TorchRec's own training of one table, table-wise or column-wise over two ranks, on given batches (a process each)."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist

# TorchRec does not cut into widths that are no multiple of 4.
ROWS, DIM, BATCH, STEPS, LR = 60, 16, 16, 25, 0.1


def first_weights() -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)) * 0.1


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [BATCH] and the outputs [BATCH, DIM] that the loss asks for; uneven over columns."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(0, ROWS, (BATCH,), generator=generator)
    return ids, torch.randn(BATCH, DIM, generator=generator) * torch.linspace(0.1, 2, DIM)


def train(rank: int, port: int, out: Any) -> None:
    """Rank 0 answers {"table_wise": weights, "column_wise": weights}, numpy [ROWS, DIM]."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = {kind: _train(kind, rank) for kind in ("table_wise", "column_wise")}
    if rank == 0:
        out.put(found)
    dist.barrier()
    dist.destroy_process_group()


def _train(kind: str, rank: int) -> Any:
    import torchrec
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    config = torchrec.EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"])
    model = torch.nn.ModuleDict({"ebc": torchrec.EmbeddingBagCollection(tables=[config], device=torch.device("cpu"))})
    apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, model.parameters(), {"lr": LR, "eps": 1e-8})
    sharders = [EmbeddingBagCollectionSharder()]
    how = table_wise(rank=0) if kind == "table_wise" else column_wise(ranks=[0, 1])
    plan = construct_module_sharding_plan(
        model["ebc"], {"t": how}, world_size=2, local_size=2, device_type="cpu", sharder=sharders[0]
    )
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan(plan={"ebc": plan}), sharders=sharders
    )
    for shard, piece in _shards(sharded, first_weights()):
        shard.copy_(piece)
    for step in range(STEPS):
        ids, wanted = batch_of(step, rank)
        kjt = torchrec.KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.ones(BATCH, dtype=torch.int32))
        output = sharded.module["ebc"](kjt).wait().values()
        ((output - wanted) ** 2).mean().backward()
    whole = torch.zeros(ROWS, DIM)
    for shard, piece in _shards(sharded, whole):
        piece.copy_(shard)
    dist.all_reduce(whole)
    return whole.numpy()


def _shards(sharded: Any, whole: torch.Tensor) -> Any:
    """(this rank's shard, its place in ``whole``), for each of its shards."""
    for parameter in sharded.state_dict().values():
        for shard in parameter.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            yield shard.tensor, whole[row : row + rows, column : column + columns]
