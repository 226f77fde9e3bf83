"""One table's whole embedding work in a step, cold, against FBGEMM's CPU tables.

Ours: dedup + id lookup + pooled forward + backward + fused row-wise Adagrad through the production StepPlan, on a store
without an undo log, as a worker builds it; one more case keeps the log. Baseline:
``SplitTableBatchedEmbeddingBagsCodegen`` with EXACT_ROWWISE_ADAGRAD, forward and backward (its update runs inside
backward), ids as table rows.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")

import time
from collections.abc import Callable

import harness
import numpy as np
import torch

from shoal.jobs.workloads import NUM_BATCHES, IdWorkload, embedding_op
from shoal.kernels.plan import StepPlan
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import FeatureSpec, OptimizerKind, OptimizerSpec, TableSpec

EXPECTATION = (
    "Bound: memory. Uniform ids, U ~ 79 k of 82 k distinct: rows are read forward, read and written backward (3 x U x"
    " 256 B), bags written and their gradients read (2 x B x 256 B), ids and optimizer state on top: ~103 MB at pooling"
    " 1. Against memcpy (reads plus writes counted) at most 2x, since every row also costs an id-map line and a record"
    " header. No undo log, as in production (undo_steps=0); a log copies every updated record once more, a case of its"
    " own. FBGEMM's CPU backward is a sort and scattered updates: at least 3x uniform, 2x Zipf."
)
ROUNDS, LR, EPS = 9, 0.02, 1e-8
NO_PEERS = np.zeros(1, dtype=np.int64)
PHASES = ("route", "resolve", "pool", "segment_sum", "apply")


class Ours:
    """The production path of one rank."""

    def __init__(self, work: IdWorkload, num_threads: int, undo_steps: int) -> None:
        optimizer = OptimizerSpec(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=LR, eps=EPS)
        table = TableSpec(
            name="t",
            num_embeddings=work.num_embeddings,
            embedding_dim=work.embedding_dim,
            optimizer=optimizer,
            init_min=-0.01,
            init_max=0.01,
        )
        store = RowStore([table], num_threads=num_threads, undo_steps=undo_steps)
        store.add_block(0, 0)
        self.plan = StepPlan(
            store,
            [table],
            [FeatureSpec(name="c1", table=0, collection=0)],
            [np.zeros(1, np.uint16)],
            rank=0,
            world_size=1,
            num_threads=num_threads,
        )
        self.lookup = self.plan.new_lookup()
        self.step_number = 1
        ids = torch.randperm(work.num_embeddings, generator=torch.Generator().manual_seed(1))
        for part in ids.split(65_536):  # every row exists before timing
            store.apply(0, part, torch.full((len(part), work.embedding_dim), 1e-3), step=1, lr=LR)
        store.commit(1)
        self.offsets = torch.from_numpy(work.offsets())
        self.columns = np.zeros(1, dtype=np.int32)
        self.lrs = np.array([LR], dtype=np.float32)
        self.batch_size = work.batch_size
        self.phases: dict[str, list[float]] = {name: [] for name in PHASES}

    def step(self, ids: torch.Tensor, grad: torch.Tensor) -> None:
        lookup, marks = self.lookup, [time.perf_counter()]
        self.step_number += 1
        lookup.route(ids, self.offsets, None, self.columns, self.batch_size)
        marks.append(time.perf_counter())
        lookup.resolve(NO_PEERS, NO_PEERS)
        marks.append(time.perf_counter())
        lookup.pool(NO_PEERS, lookup.new_outputs())
        marks.append(time.perf_counter())
        lookup.segment_sum([grad], NO_PEERS)
        marks.append(time.perf_counter())
        self.plan.apply([lookup], [NO_PEERS], self.step_number, self.lrs)
        self.plan.store.commit(self.step_number)
        marks.append(time.perf_counter())
        for name, begin, end in zip(PHASES, marks, marks[1:]):
            self.phases[name].append(end - begin)


def fbgemm_step(work: IdWorkload) -> Callable[[torch.Tensor, torch.Tensor], None]:
    import fbgemm_gpu  # noqa: F401
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    specs = [(work.num_embeddings, work.embedding_dim, EmbeddingLocation.HOST, ComputeDevice.CPU)]
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        specs, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=LR, eps=EPS, pooling_mode=PoolingMode.SUM
    )
    tables.init_embedding_weights_uniform(-0.01, 0.01)
    offsets = torch.from_numpy(work.offsets())

    def step(ids: torch.Tensor, grad: torch.Tensor) -> None:
        tables(ids, offsets).backward(grad)

    return step


def memcpy_bytes_per_s() -> float:
    """Bytes read plus bytes written per second by one thread's memcpy of cold memory."""
    source, target = np.ones(16 << 20, dtype=np.float32), np.ones(16 << 20, dtype=np.float32)
    best = 0.0
    for _ in range(5):
        harness.flush_caches()
        start = time.perf_counter()
        np.copyto(target, source)
        best = max(best, 2 * source.nbytes / (time.perf_counter() - start))
    return best


def bytes_touched(work: IdWorkload, num_unique: float) -> float:
    """Bytes that the work cannot avoid: rows three times, bags and gradients, ids, optimizer state twice."""
    row = 4 * work.embedding_dim
    return num_unique * (3 * row + 2 * 4) + 2 * work.batch_size * row + 8 * work.ids_per_batch


def run_case(
    distribution: str, pooling: int, num_threads: int, target: float | None, bandwidth: float, undo_steps: int = 0
) -> list[dict]:
    work = embedding_op(distribution, pooling)
    torch.set_num_threads(num_threads)
    batches = [torch.from_numpy(work.values(index)) for index in range(NUM_BATCHES)]
    grad = torch.randn(work.batch_size, work.embedding_dim, generator=torch.Generator().manual_seed(0)) * 1e-3
    ours, theirs = Ours(work, num_threads, undo_steps), fbgemm_step(work)
    counters = {"ours": 0, "fbgemm": 0}

    def side(name: str, step: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[[], None]:
        def run() -> None:
            counters[name] += 1
            step(batches[counters[name] % NUM_BATCHES], grad)

        return run

    sides = {"ours": side("ours", ours.step), "fbgemm": side("fbgemm", theirs)}
    times = harness.alternate(sides, rounds=ROUNDS, warmup=2, before=harness.flush_caches)
    facts = work.describe()
    name = f"{distribution} pooling {pooling}" + ("" if num_threads == 1 else f", {num_threads} threads")
    name += ", undo log" if undo_steps else ""
    phases = {f"{p}_ms": round(float(np.median(t[2:])) * 1e3, 3) for p, t in ours.phases.items()}
    cases = [
        harness.case(
            name,
            "ms",
            times["ours"],
            times["fbgemm"],
            "FBGEMM CPU TBE",
            target,
            value_scale=1e3,
            phases=phases,
            **facts,
        )
    ]
    if target is not None and distribution == "uniform":
        floor = bytes_touched(work, float(facts["unique_ids_per_batch"])) / bandwidth
        cases.append(
            harness.case(
                f"{name}: time / (bytes touched / memcpy bandwidth)",
                "x",
                [t / floor for t in times["ours"]],
                None,
                None,
                2.0,
                higher_is_better=False,
                memcpy_gb_per_s=round(bandwidth / 1e9, 2),
                megabytes_touched=round(floor * bandwidth / 1e6, 1),
            )
        )
    return cases


def main() -> list[dict]:
    bandwidth = memcpy_bytes_per_s()
    cases = []
    for num_threads in (1, 2):
        for distribution, target in (("uniform", 3.0), ("zipf", 2.0)):
            for pooling in (1, 20):
                cases += run_case(distribution, pooling, num_threads, target if num_threads == 1 else None, bandwidth)
    cases += run_case("uniform", 1, 1, None, bandwidth, undo_steps=2)
    return harness.write("embedding_op", cases, EXPECTATION)


if __name__ == "__main__":
    main()
