"""Checkpoint I/O against raw sequential I/O of the same bytes, and training steps during a rate-limited write.

``make bench NAME=checkpoint_io``. Both sides are synced to disk (write) and start with cold files (load).
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import harness
import numpy as np
import torch

from shoal.actors.dense import DenseOptimizerSpec, DenseReplica
from shoal.actors.embedding import lazy_tables
from shoal.actors.messages import Member, View
from shoal.actors.restore import load_rows
from shoal.actors.session import Session
from shoal.actors.shard_host import ShardHost
from shoal.actors.sharded import describe_model
from shoal.actors.snapshot import Delta, write_in_background, write_snapshot
from shoal.actors.trainer import LoopSpec, Trainer
from shoal.jobs.models import dlrm
from shoal.jobs.workloads import NUM_BATCHES, dlrm_step
from shoal.kernels.batch import Batch
from shoal.kernels.cut import BlockRows
from shoal.kernels.exchange import Exchange, Identity
from shoal.kernels.hashing import row_blocks
from shoal.kernels.keyed_jagged_tensor import KeyedJaggedTensor
from shoal.kernels.plan import StepPlan
from shoal.kernels.spec import OptimizerKind, OptimizerSpec, TableSpec
from shoal.kernels.transport import LoopbackTransport
from shoal.platform.loadplan import plan_load
from shoal.platform.manifest import CheckpointName, Manifest
from shoal.platform.storage import Storage

EXPECTATION = (
    "Bound: the disk. A write adds to raw I/O one export copy (memory speed) and one CRC-32 pass (3 GB/s a core), both "
    "in another thread than the sync of the previous part; a load adds the CRC and the import (one hash and one copy "
    "per row). On two cores >= 60 % of raw. A step beside a write limited to 100 MB/s pays for the saved versions of "
    "rows it changes first and for a few per cent of a core: <= 1.2x. An increment writes its share of the rows' "
    "bytes and reads all rows once at memory speed, which bounds the time that it saves."
)
ROUNDS = 4
STEPS = 24
RATE_BYTES_PER_S = 100e6
CHUNK_BYTES = 4 * 2**20
WORKLOAD = dlrm_step()
NUM_BLOCKS = 16
#: Steps between a checkpoint and the increment on it.
INTERVAL = 20


class PreparedBatches:
    """Batches made before timing, as KeyedJaggedTensor, in rotation."""

    def __init__(self) -> None:
        keys = list(WORKLOAD.feature_names)
        lengths = torch.from_numpy(WORKLOAD.lengths())
        self._batches = [
            Batch(
                dense_features=torch.from_numpy(WORKLOAD.dense(i)),
                sparse_features=KeyedJaggedTensor(keys, torch.from_numpy(WORKLOAD.values(i)), lengths=lengths),
                labels=torch.from_numpy(WORKLOAD.labels(i)),
                weights=None,
                extras={},
                position=0,
            )
            for i in range(NUM_BATCHES)
        ]

    def is_ready(self, step: int, timeout_s: float) -> bool:
        return True

    def next_batch(self, step: int) -> Batch:
        return self._batches[step % len(self._batches)]

    def close(self) -> None:
        pass


class ConstantRates:
    def __init__(self, num_tables: int) -> None:
        self._tables = np.full(num_tables, 0.01, dtype=np.float32)

    def tables(self, step: int) -> np.ndarray:
        return self._tables

    def dense(self, step: int) -> float:
        return 1.0


def make_view(tables: tuple[TableSpec, ...]) -> View:
    return View(
        run="bench",
        epoch=0,
        members=(Member(rank=0, worker_id="w0", host="h", share=1.0),),
        placement={t.name: (0,) * t.num_blocks for t in tables},
        transport="auto",
        store_host="",
        store_port=0,
    )


def make_host(tables: tuple[TableSpec, ...]) -> ShardHost:
    host = ShardHost(tables, num_threads=1)
    host.assign(make_view(tables).owned_by(0))
    return host


def make_trainer() -> tuple[Trainer, ShardHost]:
    """One worker's trainer on DLRM over 26 tables x 200 k x 32, every row written."""

    def make_table(config) -> TableSpec:  # type: ignore[no-untyped-def]
        return TableSpec(
            name=config.name,
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            optimizer=OptimizerSpec(kind=OptimizerKind.ROWWISE_ADAGRAD),
            init_min=-0.01,
            init_max=0.01,
            num_blocks=NUM_BLOCKS,
        )

    args = {name: {"num_embeddings": WORKLOAD.num_embeddings} for name in WORKLOAD.feature_names}
    with lazy_tables():
        model = dlrm.build(
            tables=args,
            num_dense=WORKLOAD.num_dense,
            embedding_dim=WORKLOAD.embedding_dim,
            dense_arch=(512, 256),
            over_arch=(512, 256),
        )
    described = describe_model(model, make_table, {})
    view = make_view(described.tables)
    host = make_host(described.tables)
    fill(host)
    owners = [view.owners(t.name) for t in described.tables]
    plan = StepPlan(host.store, described.tables, described.features, owners, rank=0, world_size=1)
    identity = Identity(run=1, epoch=0, rank=0, world_size=1, plan_hash=plan.hash, num_tables=len(described.tables))
    session = Session(described, host.store, plan, Exchange(LoopbackTransport(), identity, timeout_s=60))
    trainer = Trainer(
        LoopSpec(seed=0, total_steps=10**9),
        model=model,
        session=session,
        dense=DenseReplica(model, DenseOptimizerSpec()),
        feed=PreparedBatches(),
        eval_feed=None,
        learning_rates=ConstantRates(len(described.tables)),
    )
    return trainer, host


def fill(host: ShardHost) -> None:
    """Write every row of every table, so that no time is spent on fresh memory later."""
    ids = np.arange(WORKLOAD.num_embeddings)
    blocks = row_blocks(ids, NUM_BLOCKS)
    for number, spec in enumerate(host.tables):
        for block in range(NUM_BLOCKS):
            mine = torch.from_numpy(ids[blocks == block])
            rows = BlockRows.empty(spec, len(mine))
            rows.ids.copy_(mine)
            rows.weights.uniform_(-0.01, 0.01)
            rows.slots.uniform_(0, 1)
            rows.last_step.fill_(1)
            rows.count.fill_(1)
            host.store.import_block(number, block, rows)


def drop_from_cache(folder: Path) -> None:
    """Sync and forget every file of ``folder``, so that the next read comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure_io(host: ShardHost, folder: Path) -> list[dict]:
    """Write and load, each beside a raw sequential pass over as many bytes."""
    storage = Storage(str(folder))
    raw = folder / "raw"
    buffer = bytearray(np.random.default_rng(0).integers(0, 256, CHUNK_BYTES, dtype=np.uint8).tobytes())
    entries: list = []
    name = CheckpointName(0, 1)

    def write_ours() -> None:
        with host.store.cut() as cut:
            entries[:] = write_snapshot(cut, host.owned, host.tables, storage, name.directory, 0)

    def write_raw() -> None:
        left = size_bytes()
        with open(raw, "wb", buffering=0) as file:
            while left > 0:
                left -= file.write(memoryview(buffer)[: min(left, CHUNK_BYTES)])
            os.fsync(file.fileno())

    def size_bytes() -> int:
        return sum(entry.size_bytes for entry in entries)

    def clean() -> None:
        os.sync()

    def remove() -> None:
        shutil.rmtree(folder / name.directory, ignore_errors=True)
        raw.unlink(missing_ok=True)
        clean()

    write_ours()  # the first tells how many bytes there are
    times = harness.alternate({"ours": write_ours, "raw": write_raw}, ROUNDS, warmup=1, before=remove)
    write_ours()
    write_raw()
    stores: list[ShardHost] = []

    def prepare() -> None:
        stores[:] = []
        gc.collect()
        stores.append(make_host(host.tables))
        drop_from_cache(folder)

    def load_ours() -> None:
        manifest = Manifest(name=name, run="bench", world_size=1, tables=host.tables, files=tuple(entries))
        load_rows(stores[0].store, host.tables, host.owned, plan_load(manifest, host.tables, host.owned), storage)

    def load_raw() -> None:
        with open(raw, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    loads = harness.alternate({"ours": load_ours, "raw": load_raw}, ROUNDS, warmup=1, before=prepare)
    stores[:] = []
    notes = {"bytes": size_bytes(), "files": len(entries), "rows": host.store.num_rows()}
    return [
        harness.case("write, synced", "s", times["ours"], times["raw"], "raw sequential", 0.6, **notes),
        harness.case("load, cold cache", "s", loads["ours"], loads["raw"], "raw sequential", 0.6, **notes),
    ]


def measure_steps(trainer: Trainer, host: ShardHost, folder: Path) -> dict:
    """Median step alone and while a snapshot, limited to RATE_BYTES_PER_S, is being written; a fresh cut each round."""
    storage = Storage(str(folder))

    def steps(is_over: Callable[[], bool] = lambda: False) -> float:
        times: list[float] = []
        while len(times) < STEPS and not is_over():
            start = time.perf_counter()
            trainer.train_step()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def steps_beside_a_write() -> float:
        with host.store.cut() as cut:
            pending = write_in_background(
                lambda limiter: write_snapshot(
                    cut, host.owned, host.tables, storage, "steps", 0, limiter=limiter, part_bytes=8 * 2**20
                ),
                RATE_BYTES_PER_S,
            )
            seconds = steps(is_over=pending.done)
            pending.cancel_write()
            pending.exception(timeout=60)
        return seconds

    times = harness.alternate({"alone": steps, "beside": steps_beside_a_write}, ROUNDS, warmup=2)
    ratios = [b / a for a, b in zip(times["alone"], times["beside"])]
    return harness.case(
        "step during a write at 100 MB/s / step alone",
        "x",
        ratios,
        None,
        None,
        1.2,
        higher_is_better=False,
        alone_ms=1e3 * statistics.median(times["alone"]),
        beside_ms=1e3 * statistics.median(times["beside"]),
        **WORKLOAD.describe(),
    )


def measure_increment(trainer: Trainer, host: ShardHost, folder: Path) -> list[dict]:
    """What INTERVAL steps changed, beside a full checkpoint of the same cut: bytes and seconds."""
    storage = Storage(str(folder))
    for number, spec in enumerate(host.tables):
        for block in host.owned[spec.name]:
            host.store.deletions.mark_known(number, block, trainer.step)
    since = trainer.step
    for _ in range(INTERVAL):
        trainer.train_step()
    written: dict[str, list] = {}

    def write(name: str, delta: Delta | None) -> None:
        with host.store.cut() as cut:
            written[name] = write_snapshot(cut, host.owned, host.tables, storage, name, 0, delta=delta)

    def remove() -> None:
        for name in ("increment", "full"):
            shutil.rmtree(folder / name, ignore_errors=True)
        os.sync()

    delta = Delta(since=since, deleted=host.store.deletions.since(since))
    sides = {"increment": lambda: write("increment", delta), "full": lambda: write("full", None)}
    times = harness.alternate(sides, 2, warmup=1, before=remove)
    size = {name: float(sum(entry.size_bytes for entry in entries)) for name, entries in written.items()}
    rows = {name: sum(entry.num_rows for entry in entries) for name, entries in written.items()}
    changed = rows["increment"] / rows["full"]
    notes = {"steps": INTERVAL, "rows": rows["increment"], "rows_full": rows["full"], "share_of_rows": changed}
    bytes_target = 0.9 / changed
    return [
        harness.case(
            "increment's bytes / a full checkpoint's",
            "bytes",
            [size["increment"]],
            [size["full"]],
            "full checkpoint",
            bytes_target,
            **notes,
        ),
        harness.case(
            "write an increment, synced", "s", times["increment"], times["full"], "full checkpoint", 1.5, **notes
        ),
    ]


def main() -> list[dict]:
    torch.set_num_threads(1)
    trainer, host = make_trainer()
    # On the disk of the checkout; /tmp may be memory.
    build = Path(__file__).parents[2] / "build"
    build.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-io-", dir=build))
    try:
        cases = [*measure_io(host, folder), measure_steps(trainer, host, folder)]
        cases += measure_increment(trainer, host, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return harness.write("checkpoint_io", cases, EXPECTATION)


if __name__ == "__main__":
    main()
