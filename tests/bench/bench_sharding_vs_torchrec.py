"""A step minus its dense part by sharding type, beside TorchRec's, two workers of one thread each over Gloo there.

The sharding types are those that TorchRec has on CPUs: pooled tables table-wise and column-wise (two column shards),
and sequences row-wise. The pooled model is bench_step_vs_torchrec's DLRM with the same dense code on both sides. The
sequence model has one table of the same rows for all features, and no dense part: the loss is the sum of squares of all
rows.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
import numpy as np
import torch
import torch.distributed as dist
from bench_step_vs_torchrec import _in_step

EXPECTATION = (
    "Table-wise: a third of TorchRec's, as in step_vs_torchrec. Column-wise TorchRec does all twice for half the "
    "columns; ours de-duplicates once, and sums of squares take one more exchange (optimizer_scope table; with shard, "
    "TorchRec's own semantics, it has none). Sequences row-wise: TorchRec sends every occurrence of an id and its row, "
    "ours each id of a batch once."
)
WORLD, ROUNDS, NUM_BATCHES = 2, 16, 16
SHARE_MAX = 1 / 3


class TorchRecSequences:
    """A row-wise EmbeddingCollection of one table, row-wise Adagrad fused in backward."""

    def __init__(self, workload: Any) -> None:
        import torchrec
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

        table = torchrec.EmbeddingConfig(
            name="t", embedding_dim=workload.embedding_dim, num_embeddings=workload.num_embeddings,
            feature_names=list(workload.feature_names),
        )  # fmt: skip
        collection = torchrec.EmbeddingCollection(tables=[table], device=torch.device("meta"))
        apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, collection.parameters(), {"lr": 0.02})
        sharders = [EmbeddingCollectionSharder()]
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=WORLD, compute_device="cpu"),
            constraints={"t": ParameterConstraints(sharding_types=["row_wise"])},
        )
        plan = planner.collective_plan(collection, sharders, dist.group.WORLD)
        self.model = DistributedModelParallel(collection, device=torch.device("cpu"), plan=plan, sharders=sharders)

    def step_over(self, batches: Sequence[Any]) -> Callable[[], None]:
        from step_torchrec import torchrec_batch

        raws = itertools.cycle(batches)

        def step() -> None:
            found = self.model(torchrec_batch(next(raws)).sparse_features)
            sum((jagged.values() ** 2).sum() for jagged in found.values()).backward()

        return step


class ShoalSequences:
    """The same over our session, the table's row blocks on both ranks."""

    def __init__(self, workload: Any, rank: int, store_port: int, epoch: int) -> None:
        from step_shoal import ROWWISE_ADAGRAD

        from shoal.actors.embedding import EmbeddingCollection, lazy_tables
        from shoal.actors.groups import GroupSpec, form, run_hash
        from shoal.actors.session import Session
        from shoal.actors.sharded import describe_model
        from shoal.kernels.exchange import Exchange
        from shoal.kernels.frame import Identity
        from shoal.kernels.plan import StepPlan
        from shoal.kernels.rowstore import RowStore
        from shoal.kernels.tables import EmbeddingConfig, table_seed, table_spec

        config = EmbeddingConfig(
            name="t", embedding_dim=workload.embedding_dim, num_embeddings=workload.num_embeddings,
            feature_names=list(workload.feature_names),
        )  # fmt: skip
        with lazy_tables():
            self.model = EmbeddingCollection([config])
        tables = describe_model(
            self.model,
            lambda c: (table_spec(c, seed=table_seed(0, c.name), optimizer=ROWWISE_ADAGRAD, num_blocks=64),),
            {},
        )
        groups = form(
            GroupSpec(run="bench", epoch=epoch, rank=rank, hosts=("h",) * WORLD, store_port=store_port)
        )
        owners = [(np.arange(64) % WORLD).astype(np.uint16)]
        store = RowStore(tables.tables, num_threads=1, undo_steps=0)
        for block in np.nonzero(owners[0] == rank)[0]:
            store.add_block(0, int(block))
        plan = StepPlan(store, tables.tables, tables.features, owners, rank=rank, world_size=WORLD)
        identity = Identity(
            run=run_hash("bench"), epoch=epoch, rank=rank, world_size=WORLD, plan_hash=plan.hash, num_tables=1
        )
        self.groups = groups
        self.session = Session(tables, store, plan, Exchange(groups.transport, identity, timeout_s=60.0))
        self._rates, self._step = np.full(1, 0.02, np.float32), 0

    def step_over(self, batches: Sequence[Any]) -> Callable[[], None]:
        from shoal.kernels.jagged import KeyedJaggedTensor

        raws = itertools.cycle(batches)

        def step() -> None:
            raw = next(raws)
            kjt = KeyedJaggedTensor(keys=raw.keys, values=raw.values, lengths=raw.lengths)
            self.session.begin(self._step, kjt, is_training=True, loss_weight=1.0)
            found = self.model(kjt)
            sum((jagged.values() ** 2).sum() for jagged in found.values()).backward()
            self.session.end(dense_grad=None, learning_rates=self._rates)
            self._step += 1

        return step


def run_rank(rank: int, torch_port: int, result_path: str) -> None:
    """One process: TorchRec's default group, our own groups beside it, every side once per round."""
    import step_torchrec
    from step_shoal import SameDense, ShoalRank

    from shoal.jobs import workloads

    own_store, port = step_torchrec.join(rank, WORLD, torch_port)
    workload = workloads.dlrm_step()
    batches = [step_torchrec.Raw(workload, 1000 * rank + index) for index in range(NUM_BATCHES)]

    def ours(epoch: int, **options: Any) -> Callable[[], Any]:
        return ShoalRank(SameDense, workload, rank, WORLD, port, epoch, **options).step_over(batches)

    sides: dict[str, Callable[[], Any]] = {
        "dense": step_torchrec.dense_step(workload, batches, False),
        "torchrec table_wise": step_torchrec.TorchRecModel(workload, WORLD).plain_step(batches),
        "ours table_wise": ours(0),
        "torchrec column_wise": step_torchrec.TorchRecModel(workload, WORLD, "column_wise").plain_step(batches),
        "ours column_wise": ours(1, column_blocks=2),
        "ours column_wise, scope shard": ours(2, column_blocks=2, optimizer_scope="shard"),
        "torchrec sequence row_wise": TorchRecSequences(workload).step_over(batches),
        "ours sequence row_wise": ShoalSequences(workload, rank, port, 3).step_over(batches),
    }
    # Rows are created at their first step: all batches once before timing, so that timed steps create none.
    for name, step in sides.items():
        for _ in range(NUM_BATCHES if name.startswith("ours") else 1):
            step()
    times = harness.alternate(
        {name: _in_step(step) for name, step in sides.items()}, ROUNDS, warmup=3, before=dist.barrier
    )
    if rank == 0:
        Path(result_path).write_text(json.dumps({"times": times, "workload": workload.describe()}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    del own_store


def main() -> list[dict[str, Any]]:
    """Measure and write results/sharding_vs_torchrec.json."""
    record = harness.record_of_ranks(run_rank, WORLD)
    times = record["times"]
    dense = statistics.median(times["dense"])
    cases = []
    for name, theirs in (
        ("table_wise", "table_wise"),
        ("column_wise", "column_wise"),
        ("column_wise, scope shard", "column_wise"),
        ("sequence row_wise", "sequence row_wise"),
    ):
        less = 0.0 if name.startswith("sequence") else dense
        share = [(a - less) / (b - less) for a, b in zip(times[f"ours {name}"], times[f"torchrec {theirs}"])]
        cases.append(
            harness.case(
                f"{name}: step minus dense, ours / TorchRec's", "share", share, None, f"torchrec {theirs}", SHARE_MAX,
                higher_is_better=False,
                ours_ms=round(1e3 * (statistics.median(times[f"ours {name}"]) - less), 2),
                baseline_ms=round(1e3 * (statistics.median(times[f"torchrec {theirs}"]) - less), 2),
                dense_ms=round(1e3 * less, 2), workload=record["workload"],
            )
        )  # fmt: skip
    return harness.write("sharding_vs_torchrec", cases, EXPECTATION)


if __name__ == "__main__":
    main()
