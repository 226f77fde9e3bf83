"""A fleet of stores with checkpoint writers, trained in one thread: the checkpoint protocol without processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from shoal.actors.messages import SnapshotPart
from shoal.actors.partfile import concatenate, take
from shoal.actors.restore import load_rows
from shoal.actors.snapshot_writer import SnapshotWriter
from shoal.kernels.cut import BlockRows
from shoal.kernels.hashing import row_blocks
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import OptimizerKind, OptimizerSpec, TableSpec
from shoal.platform import checkpoint
from shoal.platform.chain import decide_base
from shoal.platform.checkpoint import decide_resume, list_checkpoints
from shoal.platform.epochs import claim_epoch
from shoal.platform.loadplan import plan_load
from shoal.platform.manifest import CheckpointName, Manifest
from shoal.platform.storage import Storage

FIELDS = ("ids", "weights", "slots", "last_step", "count")
TABLES = (
    TableSpec(name="user", num_embeddings=0, embedding_dim=4, num_blocks=8),
    TableSpec(
        name="item",
        num_embeddings=400,
        embedding_dim=3,
        num_blocks=4,
        optimizer=OptimizerSpec(kind=OptimizerKind.ADAM),
    ),
    TableSpec(name="idle", num_embeddings=9, embedding_dim=2, num_blocks=2),
)
#: More than any history has: every step can be undone.
UNDO_STEPS = 64


class Worker:
    """A store, what it owns, and its checkpoint writer, as in a worker process; parts are collected in a list."""

    def __init__(self, storage: Storage) -> None:
        self.tables = TABLES
        self.store = RowStore(TABLES, undo_steps=UNDO_STEPS)
        self.owned: dict[str, tuple[int, ...]] = {}
        self.parts: list[SnapshotPart] = []
        dense: Any = SimpleNamespace(state_tensors=lambda: {"w": torch.ones(2)}, optimizer_kind="sgd")
        host: Any = self
        self.writer = SnapshotWriter(
            host, dense, storage, lambda e, s: CheckpointName(e, s).directory, 0.0, self.parts.append
        )


class Fleet:
    """Workers that train, lose, move and go back, in one thread, with one controller that writes manifests."""

    def __init__(self, root: Path | str, num_workers: int, seed: int, full_every: int = 4) -> None:
        self.storage = Storage(str(root))
        self.rng = np.random.default_rng(seed)
        self.workers = [Worker(self.storage) for _ in range(num_workers)]
        self.full_every = full_every
        self.step = self.epoch = 0
        self.base: int | None = None
        self.owners = {(t, b): b % num_workers for t, spec in enumerate(TABLES) for b in range(spec.num_blocks)}
        for (table, block), rank in self.owners.items():
            self.workers[rank].store.add_block(table, block)
        self.assign()
        claim_epoch(self.storage, 0, 0)

    def assign(self) -> None:
        for rank, worker in enumerate(self.workers):
            worker.owned = {
                spec.name: tuple(b for b in range(spec.num_blocks) if self.owners[t, b] == rank)
                for t, spec in enumerate(TABLES)
            }

    def owned_ids(self, worker: Worker, table: int, ids: np.ndarray) -> torch.Tensor:
        mask = np.isin(row_blocks(ids, TABLES[table].num_blocks), worker.owned[TABLES[table].name])
        return torch.from_numpy(ids[mask])

    def train(self, num_steps: int = 1, deletes: int = 0) -> None:
        for _ in range(num_steps):
            self.step += 1
            draws = {t: np.unique(self.rng.integers(0, 300, 40)) for t in (0, 1)}
            gone = {t: np.unique(self.rng.integers(0, 300, deletes)) for t in (0, 1)}
            for worker in self.workers:
                worker.store.begin_step(self.step)
                for table in (0, 1):
                    ids = self.owned_ids(worker, table, draws[table])
                    gradients = torch.from_numpy(self.rng.normal(size=(len(ids), TABLES[table].embedding_dim)))
                    worker.store.apply(table, ids, gradients.float(), step=self.step, lr=0.1)
                    if deletes:
                        worker.store.delete(table, self.owned_ids(worker, table, gone[table]))

    def roll_back(self, step: int) -> None:
        """Replicated recovery: everybody back to ``step``, which a new epoch goes on from (F4)."""
        for worker in self.workers:
            worker.writer.cancel()
            for undone in range(self.step, step, -1):
                worker.store.undo(undone)
        self.step = step
        self.new_epoch()

    def new_epoch(self) -> None:
        self.epoch += 1
        claim_epoch(self.storage, self.epoch, self.step)
        self.set_base()

    def move(self, table: int, block: int, target: int) -> None:
        """A row block changes its owner, rows as they are. Steps so far can no longer be undone."""
        for worker in self.workers:
            worker.store.commit(self.step)
        source = self.workers[self.owners[table, block]]
        rows = source.store.export_block(table, block)
        source.store.drop_block(table, block)
        self.workers[target].store.add_block(table, block)
        self.workers[target].store.import_block(table, block, rows)
        self.owners[table, block] = target
        self.assign()

    def set_base(self, only: int | None = None) -> None:
        self.base = decide_base(list_checkpoints(self.storage), self.full_every, TABLES).step
        for rank, worker in enumerate(self.workers):
            if only is None or rank == only:
                worker.writer.set_base(self.base)

    def write_parts(self) -> tuple[CheckpointName, list[SnapshotPart]]:
        metrics: Any = SimpleNamespace(state_dict=dict, compute=dict)
        for rank, worker in enumerate(self.workers):
            worker.writer.start(self.step, self.epoch, rank, metrics, {"samples": 1}, 60)
            worker.writer.wait(60)
        return CheckpointName(self.epoch, self.step), [worker.parts.pop() for worker in self.workers]

    def save(self, *, keep: int | None = None, set_base: bool = True) -> Manifest:
        name, parts = self.write_parts()
        assert [part.error for part in parts] == [None] * len(parts)
        manifest = checkpoint.complete(self.storage, name, parts, TABLES, run="r", world_size=len(parts))
        if keep is not None:
            checkpoint.collect(self.storage, keep)
        if set_base:
            self.set_base()
        return manifest

    def stores(self) -> list[RowStore]:
        return [worker.store for worker in self.workers]


def gathered(stores: Sequence[RowStore], table: int) -> BlockRows:
    """All rows of a table, sorted by id as uint64."""
    whole = concatenate([s.export_block(table, block) for s in stores for block in s.owned_blocks(table)])
    return take(whole, torch.from_numpy(np.argsort(whole.ids.numpy().view(np.uint64), kind="stable")))


def assert_bit_equal(found: BlockRows, expected: BlockRows) -> None:
    for field in FIELDS:
        assert torch.equal(getattr(found, field), getattr(expected, field)), field


def newest(storage: Storage) -> Manifest:
    manifest = decide_resume(list_checkpoints(storage), "must").manifest
    assert manifest is not None
    return manifest


def load(
    storage: Storage, manifest: Manifest, world_size: int, tables: tuple[TableSpec, ...] = TABLES
) -> list[RowStore]:
    stores = [RowStore(tables) for _ in range(world_size)]
    for rank, store in enumerate(stores):
        owned = {spec.name: [b for b in range(spec.num_blocks) if b % world_size == rank] for spec in tables}
        for table, spec in enumerate(tables):
            for block in owned[spec.name]:
                store.add_block(table, block)
        load_rows(store, tables, owned, plan_load(manifest, tables, owned), storage)
    return stores


def assert_saved(fleet: Fleet, world_size: int = 2) -> None:
    """The newest checkpoint holds exactly the fleet's present rows."""
    loaded = load(fleet.storage, newest(fleet.storage), world_size)
    for table in range(len(TABLES)):
        assert_bit_equal(gathered(loaded, table), gathered(fleet.stores(), table))


def reload(fleet: Fleet, manifest: Manifest) -> None:
    """Checkpoint recovery: every worker loads its blocks, and a new epoch goes on from there."""
    fleet.step = manifest.name.step
    for worker in fleet.workers:
        worker.writer.cancel()
        fresh = RowStore(TABLES, undo_steps=UNDO_STEPS)
        for table, spec in enumerate(TABLES):
            for block in worker.owned[spec.name]:
                fresh.add_block(table, block)
        worker.store = fresh
        load_rows(fresh, TABLES, worker.owned, plan_load(manifest, TABLES, worker.owned), fleet.storage)
        for table, spec in enumerate(TABLES):  # as ShardHost.restore does
            for block in worker.owned[spec.name]:
                fresh.deletions.mark_known(table, block, fleet.step)
    fleet.new_epoch()
