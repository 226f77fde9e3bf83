"""1,000 tables of 16 columns, batch 256: the embedding path of a step against TorchRec on one rank.

Both sides take a KeyedJaggedTensor's arrays and end with updated rows (row-wise Adagrad). TorchRec: an
EmbeddingBagCollection under DistributedModelParallel, all tables TABLE_WISE on this rank, optimizer in backward.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
import tempfile
import time
import warnings
from collections.abc import Callable

import harness
import numpy as np
import torch

from shoal.jobs.workloads import NUM_BATCHES, IdWorkload, many_tables
from shoal.kernels.plan import StepPlan
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import FeatureSpec, OptimizerKind, OptimizerSpec, TableSpec

EXPECTATION = (
    "256,000 ids a batch, 16-column rows: per-table overheads dominate the peer (dispatch, splits, per-table updates);"
    " ours is one native call per phase, so its Python time must not depend on the number of tables: <= 200 us a step."
    " Cold caches; the store keeps no undo log, as in production (undo_steps=0); a case of its own keeps one."
)
ROUNDS, LR, EPS = 15, 0.02, 1e-8
NO_PEERS = np.zeros(1, dtype=np.int64)


class Ours:
    def __init__(self, work: IdWorkload, undo_steps: int) -> None:
        optimizer = OptimizerSpec(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=LR, eps=EPS)
        tables = [
            TableSpec(
                name=f"t{t}",
                num_embeddings=work.num_embeddings,
                embedding_dim=work.embedding_dim,
                init_min=-0.01,
                init_max=0.01,
                optimizer=optimizer,
                seed=t,
            )
            for t in range(work.num_features)
        ]
        store = RowStore(tables, undo_steps=undo_steps)
        every_id = torch.arange(work.num_embeddings)
        tiny = torch.full((work.num_embeddings, work.embedding_dim), 1e-3)
        for t in range(len(tables)):  # every row exists before timing
            store.add_block(t, 0)
            store.apply(t, every_id, tiny, step=1, lr=LR)
        store.commit(1)
        features = [FeatureSpec(name=name, table=t, collection=0) for t, name in enumerate(work.feature_names)]
        self.plan = StepPlan(store, tables, features, [np.zeros(1, np.uint16)] * len(tables), rank=0, world_size=1)
        self.lookup = self.plan.new_lookup()
        self.columns = np.arange(len(features), dtype=np.int32)
        self.lrs = np.full(len(tables), LR, dtype=np.float32)
        self.offsets, self.batch_size, self.step_number = torch.from_numpy(work.offsets()), work.batch_size, 1

    def step(self, ids: torch.Tensor, grad: torch.Tensor) -> None:
        self.step_number += 1
        lookup = self.lookup
        lookup.route(ids, self.offsets, None, self.columns, self.batch_size)
        lookup.id_bytes()
        lookup.resolve(NO_PEERS, NO_PEERS)
        lookup.row_bytes_out()
        lookup.row_bytes_in()
        lookup.pool(NO_PEERS, lookup.new_outputs())
        lookup.segment_sum([grad], NO_PEERS)
        self.plan.apply([lookup], [NO_PEERS], self.step_number, self.lrs)
        self.plan.store.commit(self.step_number)


def torchrec_step(work: IdWorkload) -> Callable[[torch.Tensor, torch.Tensor], None]:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch.distributed as dist
    import torchrec
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    if not dist.is_initialized():
        rendezvous = f"file://{tempfile.mkdtemp(prefix='torchrec-')}/store"
        dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
        os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0", WORLD_SIZE="1", RANK="0")
    names = work.feature_names
    model = torch.nn.Module()
    model.ebc = torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(
                name=f"t{t}", embedding_dim=work.embedding_dim, num_embeddings=work.num_embeddings, feature_names=[name]
            )
            for t, name in enumerate(names)
        ],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, model.ebc.parameters(), {"lr": LR, "eps": EPS})
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model.ebc,
        {f"t{t}": table_wise(rank=0) for t in range(len(names))},
        world_size=1,
        local_size=1,
        device_type="cpu",
        sharder=sharder,
    )
    wrapped = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"ebc": plan}),
        sharders=[sharder],
        init_data_parallel=False,
    )
    ebc, keys, lengths = wrapped.module.ebc, list(names), torch.from_numpy(work.lengths())

    def step(ids: torch.Tensor, grad: torch.Tensor) -> None:
        out = ebc(torchrec.KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths))
        out.values().backward(grad)

    return step


def python_microseconds(ours: Ours, work: IdWorkload) -> list[float]:
    """Python time of one step: the same calls on an empty batch of the same plan (native work per table remains)."""
    empty, grad = torch.zeros(0, dtype=torch.int64), torch.zeros(0, work.num_features * work.embedding_dim)
    offsets, batch_size = ours.offsets, ours.batch_size
    ours.offsets, ours.batch_size = torch.zeros(1, dtype=torch.int64), 0
    times = []
    for _ in range(200):
        start = time.perf_counter()
        ours.step(empty, grad)
        times.append((time.perf_counter() - start) * 1e6)
    ours.offsets, ours.batch_size = offsets, batch_size
    return times[50:]


def main() -> list[dict]:
    torch.set_num_threads(1)
    work = many_tables()
    batches = [torch.from_numpy(work.values(index)) for index in range(NUM_BATCHES)]
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(work.batch_size, work.num_features * work.embedding_dim, generator=generator) * 1e-3
    ours, logged, theirs = Ours(work, 0), Ours(work, 2), torchrec_step(work)
    turn = {"ours": 0, "logged": 0, "torchrec": 0}

    def side(name: str, step: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[[], None]:
        def run() -> None:
            turn[name] += 1
            step(batches[turn[name] % NUM_BATCHES], grad)

        return run

    sides = {
        "ours": side("ours", ours.step),
        "torchrec": side("torchrec", theirs),
        "logged": side("logged", logged.step),
    }
    times = harness.alternate(sides, ROUNDS, warmup=3, before=harness.flush_caches)
    cases = [
        harness.case(
            "1,000 tables x 16, batch 256",
            "ms",
            times["ours"],
            times["torchrec"],
            "TorchRec DMP table-wise",
            3.0,
            value_scale=1e3,
            **work.describe(),
        ),
        harness.case(
            "1,000 tables x 16, batch 256, undo log",
            "ms",
            times["logged"],
            times["torchrec"],
            "TorchRec DMP table-wise",
            None,
            value_scale=1e3,
        ),
        harness.case(
            "Python in the embedding path, 1,000 tables (step of an empty batch)",
            "us",
            python_microseconds(ours, work),
            None,
            None,
            200.0,
            higher_is_better=False,
        ),
    ]
    return harness.write("many_tables", cases, EXPECTATION)


if __name__ == "__main__":
    main()
