"""What a run under faults must have kept, read from its folder afterwards: the trained state, epochs, lineage, faults.

Each check returns the lines of what is wrong; none where the promise held.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.actors.messages import BlockSet
from shoal.actors.shard_host import Restore, ShardHost
from shoal.kernels.cut import BlockRows
from shoal.kernels.errors import CheckpointError
from shoal.kernels.faults import Schedule, read_fired
from shoal.platform.chain import CheckpointState
from shoal.platform.checkpoint import list_checkpoints
from shoal.platform.epochs import epoch_first_steps
from shoal.platform.loadplan import plan_load
from shoal.platform.storage import Storage

#: Differences listed in full before the rest is only counted.
SHOWN_MAX = 5


@dataclasses.dataclass(frozen=True)
class TrainedState:
    """Everything that training has made, as a checkpoint holds it."""

    step: int
    #: Table name -> all its rows, in order of their ids.
    rows: Mapping[str, BlockRows]
    #: Dense parameters, optimizer state and buffers, by name.
    dense: Mapping[str, Tensor]
    #: Bins of the training metrics.
    metrics: Mapping[str, Tensor]
    #: Counters and optimizer state that are no tensors.
    metadata: Mapping[str, Any]


def read_state(run_dir: str) -> TrainedState:
    """The state in a run's newest complete checkpoint, wherever its files and parents are."""
    storage = Storage(run_dir)
    infos = [info for info in list_checkpoints(storage) if info.state is CheckpointState.COMPLETE]
    if not infos or infos[-1].manifest is None:
        raise CheckpointError(f"{storage.shown_uri} has no complete checkpoint")
    manifest = infos[-1].manifest
    dense = manifest.find("dense")
    if dense is None:
        raise CheckpointError(f"{manifest.name}: its manifest names no dense state")
    everything = BlockSet.of({table.name: range(table.num_blocks) for table in manifest.tables})
    host = ShardHost(manifest.tables, num_threads=1)
    host.assign(everything)
    restore = Restore(
        step=manifest.name.step,
        directory=manifest.name.directory,
        parts=tuple(plan_load(manifest, manifest.tables, everything.as_dict())),
        dense=dense,
    )
    tensors, metrics, metadata = host.restore(restore, storage)
    rows = {table.name: _rows_of(host, number) for number, table in enumerate(manifest.tables)}
    return TrainedState(manifest.name.step, rows, tensors, metrics, metadata)


def _rows_of(host: ShardHost, number: int) -> BlockRows:
    blocks = [host.store.export_block(number, block) for block in host.owned[host.tables[number].name]]
    columns = zip(*((rows.ids, rows.weights, rows.slots, rows.last_step, rows.count) for rows in blocks))
    joined = [torch.cat(parts) for parts in columns]
    order = joined[0].argsort()
    return BlockRows(*(column[order] for column in joined))


def compare_states(expected: TrainedState, found: TrainedState) -> list[str]:
    """Where two states differ by a single bit."""
    problems = [] if expected.step == found.step else [f"step {found.step} instead of {expected.step}"]
    for table, rows in expected.rows.items():
        problems += _compare_rows(table, rows, found.rows[table])
    for what, mine, theirs in (("dense", expected.dense, found.dense), ("metric", expected.metrics, found.metrics)):
        for name in sorted(mine.keys() | theirs.keys()):
            if name not in mine or name not in theirs or not _is_equal(mine[name], theirs[name]):
                problems.append(f"{what} {name!r} differs")
    if dict(expected.metadata) != dict(found.metadata):
        problems.append(f"metadata {dict(found.metadata)} instead of {dict(expected.metadata)}")
    return problems


def _compare_rows(table: str, expected: BlockRows, found: BlockRows) -> list[str]:
    if not torch.equal(expected.ids, found.ids):
        return [f"table {table!r} has {len(found)} rows instead of {len(expected)}, or others"]
    problems = []
    for name in ("weights", "slots", "last_step", "count"):
        mine, theirs = getattr(expected, name), getattr(found, name)
        differs = (mine != theirs).reshape(len(mine), -1).any(1) if mine.numel() else torch.zeros(0, dtype=torch.bool)
        if not _is_equal(mine, theirs):
            ids = expected.ids[differs][:SHOWN_MAX].tolist()
            problems.append(f"table {table!r}: {name} of {int(differs.sum())} rows differ, such as those of ids {ids}")
    return problems


def _is_equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def check_fired(schedule: Schedule) -> list[str]:
    """Faults that never happened: such a schedule proves nothing."""
    happened = {fired.index for fired in read_fired(schedule)}
    return [
        f"{fault.action.value} at {fault.point} in {fault.role} never happened"
        for index, fault in enumerate(schedule.faults)
        if index not in happened
    ]


def check_events(events: Sequence[Mapping[str, Any]], kind: str = "view") -> list[str]:
    """Epochs of decided views rise in the order of the events."""
    epochs = [int(event["epoch"]) for event in events if event.get("kind") == kind and "epoch" in event]
    return [f"epoch {b} was decided after epoch {a}" for a, b in itertools.pairwise(epochs) if b <= a]


def check_lineage(run_dir: str) -> list[str]:
    """One history in storage: of two usable checkpoints the later one belongs to no older epoch, and none that counts
    lies beyond the first step of a later epoch (K2)."""
    storage = Storage(run_dir)
    first_steps = epoch_first_steps(storage)
    usable = [info.name for info in list_checkpoints(storage) if info.state is CheckpointState.COMPLETE]
    by_step = sorted(usable, key=lambda name: (name.step, name.epoch))
    problems = [f"{b} is older than {a}" for a, b in itertools.pairwise(by_step) if b.epoch < a.epoch]
    for name in usable:
        later = [epoch for epoch, step in first_steps.items() if epoch > name.epoch and step < name.step]
        problems += [f"{name} counts although epoch {later[0]} went on before it"] if later else []
    damaged = [info for info in list_checkpoints(storage) if info.state is CheckpointState.DAMAGED]
    return problems + [f"{info.name} is damaged: {info.reason}" for info in damaged]
