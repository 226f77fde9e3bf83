"""Ranks that are threads, each with a model, a row store and a session: the whole step without workers or processes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from thread_ranks import Switch, ThreadTransport, run_ranks

from shoal.actors.dense import DenseOptimizerSpec, DenseReplica
from shoal.actors.session import Session
from shoal.actors.sharded import ModelTables, describe_model
from shoal.actors.trainer import LoopSpec, Trainer
from shoal.kernels.batch import Batch
from shoal.kernels.exchange import Exchange
from shoal.kernels.frame import Identity
from shoal.kernels.plan import StepPlan
from shoal.kernels.row_exchange import FlatRows, HierarchicalRows, host_numbers
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import TableSpec, WireCodecs


@dataclasses.dataclass
class Rank:
    rank: int
    model: nn.Module
    tables: ModelTables
    store: RowStore
    session: Session
    dense: DenseReplica

    @property
    def rates(self) -> np.ndarray:
        """The learning rates of the tables' optimizers."""
        return np.array([table.optimizer.lr for table in self.tables.tables], np.float32)


def build_ranks(
    hosts: str,
    build_model: Callable[[], nn.Module],
    make_table: Callable[[Any], TableSpec | Sequence[TableSpec]],
    *,
    owners: Callable[[TableSpec], Sequence[int]] | None = None,
    is_hierarchical: bool = False,
    codecs: Mapping[str, WireCodecs] | None = None,
    mirrored: Sequence[str] = (),
    seed: int = 0,
    dense_optimizer: DenseOptimizerSpec | None = None,
) -> list[Rank]:
    """One rank per letter of ``hosts``, a letter a host. Blocks go round the ranks unless ``owners`` says where."""
    world = len(hosts)
    numbers = host_numbers(hosts)
    switch, switches = Switch(world), {host: Switch(hosts.count(host)) for host in hosts}
    ranks = []
    for rank in range(world):
        torch.manual_seed(seed)
        model = build_model()
        described = describe_model(model, make_table, {})
        tables = described.tables
        placement = [
            np.array(owners(table) if owners else np.arange(table.num_blocks) % world, np.uint16) for table in tables
        ]
        store = RowStore(tables, undo_steps=0)
        for t, where in enumerate(placement):
            for block in np.nonzero(where == rank)[0]:
                store.add_block(t, int(block))
        plan = StepPlan(
            store, tables, described.features, placement, rank=rank, world_size=world,
            hosts=numbers if is_hierarchical else (),
            codecs=[(codecs or {}).get(table.name, WireCodecs()) for table in tables],
            mirrored=[t for t, table in enumerate(tables) if table.name in mirrored],
        )  # fmt: skip
        near = [r for r in range(world) if hosts[r] == hosts[rank]]
        identity = Identity(
            run=1, epoch=0, rank=rank, world_size=world, plan_hash=plan.hash, num_tables=len(described.tables)
        )
        exchange = Exchange(ThreadTransport(switch, rank, world, frozenset(near)), identity)
        rows: FlatRows | HierarchicalRows = FlatRows(exchange, plan)
        if is_hierarchical:
            local = dataclasses.replace(identity, rank=near.index(rank), world_size=len(near))
            transport = ThreadTransport(switches[hosts[rank]], local.rank, local.world_size)
            rows = HierarchicalRows(exchange, Exchange(transport, local), plan)
        session = Session(described, store, plan, exchange, rows=rows)
        dense = DenseReplica(model, dense_optimizer or DenseOptimizerSpec(kind="sgd", lr=0.1))
        ranks.append(Rank(rank, model, described, store, session, dense))
    return ranks


def on_ranks(ranks: Sequence[Rank], body: Callable[[Rank], Any]) -> list[Any]:
    """``body`` on every rank at once; its results in rank order."""
    return run_ranks(len(ranks), lambda rank: body(ranks[rank]))


def rows_of(ranks: Sequence[Rank]) -> dict[str, dict[int, tuple[np.ndarray, np.ndarray]]]:
    """Table -> {id: (weights, optimizer slots)} over all ranks."""
    found: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {}
    for rank in ranks:
        for t, table in enumerate(rank.tables.tables):
            mine = found.setdefault(table.name, {})
            for block in rank.store.owned_blocks(t):
                part = rank.store.export_block(t, block)
                for i, row_id in enumerate(part.ids.tolist()):
                    assert row_id not in mine
                    mine[row_id] = (part.weights[i].float().numpy().copy(), part.slots[i].numpy().copy())
    return found


@dataclasses.dataclass
class ListFeed:
    """This rank's batches, by step."""

    batches: Sequence[Batch]

    def is_ready(self, step: int, timeout_s: float) -> bool:
        return True

    def next_batch(self, step: int) -> Batch:
        return self.batches[step]

    def reassign(self, assignment: Any, step: int) -> None:
        raise AssertionError("nothing changes here")

    def keep_from(self, step: int) -> None:
        return

    def close(self) -> None:
        return


@dataclasses.dataclass
class SameRates:
    """The learning rates of the optimizers, at every step."""

    table_rates: np.ndarray
    dense_rate: float

    def tables(self, step: int) -> np.ndarray:
        return self.table_rates

    def dense(self, step: int) -> float:
        return self.dense_rate


def trainer_of(rank: Rank, batches: Sequence[Batch], **loop: Any) -> Trainer:
    """A trainer over this rank's ``batches``; ``loop``: fields of LoopSpec."""
    return Trainer(
        LoopSpec(seed=1, total_steps=len(batches), log_every_steps=10**9, **loop),
        model=rank.model,
        session=rank.session,
        dense=rank.dense,
        feed=ListFeed(batches),
        eval_feed=None,
        learning_rates=SameRates(rank.rates, 0.1),
    )
