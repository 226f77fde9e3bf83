"""ShardHost: the shards one rank owns in a view, and how they reach and leave storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shoal.actors.datafile import FileEntry
from shoal.actors.dense import DenseReplica
from shoal.actors.messages import SnapshotPart, View
from shoal.actors.restore import load_rows, read_dense
from shoal.actors.snapshot import PendingSnapshot, RateLimiter, write_dense, write_in_background, write_snapshot
from shoal.kernels.metrics import BinaryMetrics
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import TableSpec

_METRICS = "metrics."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restore:
    """What one rank reads of a checkpoint; the controller plans it from the manifest and the placement."""

    #: Steps applied when it was taken: training goes on with this step.
    step: int
    directory: str
    parts: tuple[FileEntry, ...]
    dense: FileEntry


class ShardHost:
    """The row store of one rank, filled with the row blocks the view gives it."""

    def __init__(self, tables: Sequence[TableSpec], view: View, rank: int, *, num_threads: int) -> None:
        self.tables = tuple(tables)
        self.rank = rank
        # No undo log: a failed step ends the run, and a skipped one never reaches the rows.
        self.store = RowStore(self.tables, num_threads=num_threads, undo_steps=0)
        self.owned: dict[str, tuple[int, ...]] = {}
        for index, table in enumerate(self.tables):
            blocks = tuple(b for b, owner in enumerate(view.placement[table.name]) if owner == rank)
            for block in blocks:
                self.store.add_block(index, block)
            self.owned[table.name] = blocks

    def restore(self, restore: Restore, storage: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Load this rank's rows; returns (dense state tensors, metric state tensors) of the checkpoint."""
        load_rows(self.store, self.tables, self.owned, restore.parts, storage, restore.directory)
        tensors, _ = read_dense(storage, restore.directory, restore.dense)
        metrics = {name[len(_METRICS) :]: t for name, t in tensors.items() if name.startswith(_METRICS)}
        return {name: t for name, t in tensors.items() if not name.startswith(_METRICS)}, metrics


class SnapshotWriter:
    """Writes this rank's part of checkpoints from cuts, one at a time, while training goes on (K1)."""

    def __init__(
        self,
        host: ShardHost,
        dense: DenseReplica,
        storage: Any,
        directory_of: Callable[[int, int], str],
        epoch: int,
        bytes_per_s: float,
        on_part: Callable[[SnapshotPart], None],
    ) -> None:
        self._host = host
        self._dense = dense
        self._storage = storage
        self._directory_of = directory_of
        self._epoch = epoch
        self._bytes_per_s = bytes_per_s
        self._on_part = on_part
        self._pending: PendingSnapshot[Any] | None = None

    def start(self, step: int, metrics: BinaryMetrics, timeout_s: float) -> None:
        """Cut the store and write it in the background. Waits for the previous snapshot first (C3: then steps wait)."""
        self.wait(timeout_s)
        host, directory = self._host, self._directory_of(self._epoch, step)
        tensors: dict[str, Tensor] = {}
        if host.rank == 0:
            tensors = self._dense.state_tensors()
            tensors |= {f"{_METRICS}{name}": tensor for name, tensor in metrics.state_dict().items()}
        summary: Mapping[str, Any] = {"step": step, "metrics": metrics.compute() if host.rank == 0 else {}}
        cut = host.store.cut()

        def write(limiter: RateLimiter) -> tuple[FileEntry, ...]:
            try:
                files = list(
                    write_snapshot(cut, host.owned, host.tables, self._storage, directory, host.rank, limiter=limiter)
                )
                if host.rank == 0:
                    files.append(write_dense(self._storage, directory, tensors))
                return tuple(files)
            finally:
                cut.release()

        def report(done: Any) -> None:
            error = done.exception()
            self._on_part(
                SnapshotPart(
                    epoch=self._epoch,
                    step=step,
                    rank=host.rank,
                    files=() if error is not None else done.result(),
                    summary=summary if host.rank == 0 else None,
                    error=None if error is None else f"{type(error).__name__}: {error}",
                )
            )

        self._pending = write_in_background(write, self._bytes_per_s)
        self._pending.add_done_callback(report)

    def wait(self, timeout_s: float) -> None:
        """Wait until the snapshot in progress, if any, is written or has failed (its part says so)."""
        if self._pending is not None:
            self._pending.exception(timeout_s)
            self._pending = None
