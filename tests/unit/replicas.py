"""What the tests of replication share: tables, stores that train by themselves, views, and several Replicators."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from shoal.actors.messages import BlockSet, Member, View
from shoal.actors.replication import Replicator
from shoal.kernels.cut import BlockRows
from shoal.kernels.hashing import row_blocks
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import DataType, OptimizerKind, OptimizerSpec, TableSpec

RUN = "run"
WAIT_S = 20.0


def make_tables(num_blocks: int = 4, dim: int = 8, names: str = "ab") -> tuple[TableSpec, ...]:
    types = (DataType.FP32, DataType.BF16)
    kinds = (OptimizerKind.ADAGRAD, OptimizerKind.SGD)
    return tuple(
        TableSpec(
            name=name, num_embeddings=0, embedding_dim=dim, num_blocks=num_blocks, seed=seed, init_min=-1, init_max=1,
            data_type=types[seed % 2], optimizer=OptimizerSpec(kind=kinds[seed % 2]),
        )
        for seed, name in enumerate(names)
    )  # fmt: skip


def make_view(
    workers: Sequence[tuple[str, str]], owners: Sequence[int], buddies: Sequence[int] = (), *, epoch: int = 1,
    names: str = "ab",
) -> View:  # fmt: skip
    """A view of (worker id, address); every table's block b belongs to rank owners[b]."""
    return View(
        run=RUN,
        epoch=epoch,
        members=tuple(
            Member(rank=rank, worker_id=worker, host=f"host-{rank}", share=1 / len(workers), address=address)
            for rank, (worker, address) in enumerate(workers)
        ),
        placement={name: tuple(owners) for name in names},
        transport="gloo",
        store_host="",
        store_port=0,
        buddies=tuple(buddies),
    )


class Peer:
    """A worker without a trainer: its rows, and its replicator."""

    def __init__(self, worker_id: str, tables: Sequence[TableSpec], **options) -> None:
        self.worker_id = worker_id
        self.store = RowStore(tables, undo_steps=0)
        self.tables = tables
        self.repl = Replicator(worker_id, RUN, self.store, tables, **{"timeout_s": 5.0, **options})
        self.step = 0

    @property
    def place(self) -> tuple[str, str]:
        return self.worker_id, self.repl.address

    def own(self, view: View) -> None:
        rank = view.rank_of(self.worker_id)
        for name, block in view.owned_by(rank):
            self.store.add_block([t.name for t in self.tables].index(name), block)

    def train(self, num_ids: int = 200, num_steps: int = 1, deletes: bool = True) -> None:
        """Update some rows of every owned block, make some and delete a few; the same for the same step."""
        for _ in range(num_steps):
            self.step += 1
            self.store.begin_step(self.step)
            for table, spec in enumerate(self.tables):
                generator = torch.Generator().manual_seed(1000 * table + self.step)
                ids = torch.unique(torch.randint(0, 20 * num_ids, (num_ids,), generator=generator))
                blocks = block_of(ids, spec.num_blocks)
                owned = torch.tensor([self.store.owns(table, b) for b in range(spec.num_blocks)])
                ids = ids[owned[blocks]]
                gradients = torch.randn(len(ids), spec.embedding_dim, generator=generator)
                self.store.apply(table, ids, gradients, step=self.step, lr=0.1)
                if deletes:
                    self.store.delete(table, ids[::17])
            self.store.commit(self.step)

    def rows(self, table: int, block: int) -> tuple[bytes, ...]:
        return columns_of(self.store.export_block(table, block))


def block_of(ids: torch.Tensor, num_blocks: int) -> torch.Tensor:
    return torch.from_numpy(np.asarray(row_blocks(ids.numpy(), num_blocks), dtype=np.int64))


def columns_of(rows: BlockRows) -> tuple[bytes, ...]:
    columns = (rows.ids, rows.weights, rows.slots, rows.last_step, rows.count)
    return tuple(bytes(c.reshape(-1).view(torch.uint8).numpy()) for c in columns)


def all_keys(tables: Sequence[TableSpec]) -> Iterator[tuple[int, int]]:
    return ((t, b) for t, spec in enumerate(tables) for b in range(spec.num_blocks))


def until(condition: Callable[[], object], what: str = "condition") -> None:
    """Poll until ``condition()``; fails after WAIT_S."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come true"
        time.sleep(0.002)


@contextmanager
def peers(*names: str, tables: Sequence[TableSpec] | None = None, **options) -> Iterator[list[Peer]]:
    with ExitStack() as stack:
        made = []
        for name in names:
            made.append(Peer(name, tables or make_tables(), **options))
            stack.callback(made[-1].repl.close)
        yield made


def start(view: View, members: Sequence[Peer], step: int = 0) -> None:
    """All members join the first view; waits until every buddy has its copies."""
    for peer in members:
        peer.repl.expect(view)
        peer.own(view)
    for peer in members:
        peer.repl.set_view(view, view.rank_of(peer.worker_id), step, f"{peer.worker_id}@{step}".encode())
    for peer in members:
        until(lambda peer=peer: peer.repl.unprotected_bytes == 0 and is_synced(peer), "the first copies")


def is_synced(peer: Peer) -> bool:
    channel = peer.repl._buddy
    return channel is None or channel.is_current(peer.repl.last_snapshot)


def snapshot_all(members: Sequence[Peer], *, protect: bool = True) -> int:
    """A snapshot of every member at its boundary; waits for the acknowledgements. Returns the step."""
    step = members[0].step
    for peer in members:
        assert peer.step == step
        peer.repl.snapshot(step, f"{peer.worker_id}@{step}".encode())
    for peer in members:
        until(lambda peer=peer: peer.repl.acked >= step, f"{peer.worker_id} acked {step}")
    if protect:
        for peer in members:
            peer.repl.protect(step)
    return step


def assert_copy(holder: Peer, owner: Peer, blocks: BlockSet) -> None:
    """Every block is at the holder what it is at the owner, bit for bit."""
    for key in owner.repl.copies.keys_of(blocks):
        assert holder.rows(*key) == owner.rows(*key), f"block {key}"
