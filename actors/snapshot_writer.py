"""SnapshotWriter: writes one rank's parts of checkpoints in the background, one at a time (PROTOCOLS K1, K3).

A part leaves out rows that the *base* has: the complete checkpoint that the controller named last (``set_base``). Ranks
need not hear of it at the same time: each part says since when it left rows out, and the manifest's parent is the
newest of these. What was updated since is read off the rows themselves, wherever they have been in the meantime; what
was deleted is known for blocks that this worker has owned, unreplaced, since then. Other blocks are written whole:
those that came from another worker or, in a partial recovery, from a checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from torch import Tensor

from shoal.actors.datafile import METRICS_PREFIX, FileEntry
from shoal.actors.dense import DenseReplica
from shoal.actors.messages import SnapshotPart
from shoal.actors.shard_host import ShardHost
from shoal.actors.snapshot import (
    Delta,
    PendingSnapshot,
    RateLimiter,
    SnapshotCancelledError,
    write_dense,
    write_in_background,
    write_snapshot,
)
from shoal.kernels import faults
from shoal.kernels.errors import StorageError
from shoal.kernels.metrics import BinaryMetrics


class SnapshotWriter:
    """Writes this rank's part of checkpoints from cuts, one at a time, while training goes on (K1)."""

    def __init__(
        self,
        host: ShardHost,
        dense: DenseReplica,
        storage: Any,
        directory_of: Callable[[int, int], str],
        bytes_per_s: float,
        on_part: Callable[[SnapshotPart], None],
    ) -> None:
        self._host = host
        self._dense = dense
        self._storage = storage
        self._directory_of = directory_of
        self._bytes_per_s = bytes_per_s
        self._on_part = on_part
        self._pending: PendingSnapshot[None] | None = None
        self._step = -1
        self._base: int | None = None

    def set_base(self, step: int | None) -> None:
        """The next checkpoints build on the complete one of ``step`` (``chain.decide_base``); None: they are full.

        From any thread.
        """
        self._base = step

    @property
    def is_writing(self) -> bool:
        """Whether a snapshot is in progress, its part not yet delivered."""
        pending = self._pending
        return pending is not None and not pending.done()

    def start(
        self,
        step: int,
        epoch: int,
        rank: int,
        metrics: BinaryMetrics,
        counters: Mapping[str, int],
        timeout_s: float,
    ) -> None:
        """Cut the store and write it in the background. Waits for the previous snapshot first (C3: then steps wait).

        Args:
            step: applied steps.
            epoch, rank: of the present view; the files keep them when the view changes meanwhile.
            metrics: bins of this rank; rank 0's are those of all ranks.
            counters: totals over all ranks, such as samples, kept for the run that resumes from this checkpoint.
        """
        self.wait(timeout_s)
        self._step = step
        host, directory, owned = self._host, self._directory_of(epoch, step), self._host.owned
        tensors: dict[str, Tensor] = {}
        if rank == 0:
            tensors = self._dense.state_tensors()
            tensors |= {f"{METRICS_PREFIX}{name}": tensor for name, tensor in metrics.state_dict().items()}
        summary: Mapping[str, Any] = {"step": step, "metrics": metrics.compute() if rank == 0 else {}}
        metadata = {"optimizer": self._dense.optimizer_kind, **counters}
        since, delta = self._build_on(step)
        cut = host.store.cut()
        self._log_cut(step, since)

        def write_files(limiter: RateLimiter) -> tuple[FileEntry, ...]:
            try:
                files = list(
                    write_snapshot(
                        cut, owned, host.tables, self._storage, directory, rank, delta=delta, limiter=limiter
                    )
                )
                if rank == 0:
                    files.append(write_dense(self._storage, directory, tensors, metadata))
                return tuple(files)
            finally:
                cut.release()

        def write(limiter: RateLimiter) -> None:
            files: tuple[FileEntry, ...] = ()
            failure: str | None = None
            is_cancelled = False
            try:
                files = write_files(limiter)
            except BaseException as error:  # the thread's edge: the part says what went wrong
                failure = f"{type(error).__name__}: {error}"
                is_cancelled = isinstance(error, SnapshotCancelledError)
            faults.reach("checkpoint.written")
            # Here, not in a done-callback: those run after waiters wake, and a worker that has finished waiting may be
            # polled for the last time before its part is there.
            self._on_part(
                SnapshotPart(
                    epoch=epoch,
                    step=step,
                    rank=rank,
                    files=files,
                    summary=summary if rank == 0 else None,
                    error=failure,
                    since=since,
                    is_cancelled=is_cancelled,
                )
            )

        self._pending = write_in_background(write, self._bytes_per_s)

    def wait(self, timeout_s: float) -> None:
        """Wait until the snapshot in progress, if any, is written or has failed (its part says so).

        Raises StorageError naming the step when ``timeout_s`` (checkpoint_timeout_s) passes first.
        """
        if self._pending is not None:
            try:
                self._pending.exception(timeout_s)
            except FutureTimeoutError:
                raise StorageError(
                    f"this worker's part of the checkpoint of step {self._step} was not written within "
                    f"checkpoint_timeout_s = {timeout_s:g} s; raise it, or checkpoint less often"
                ) from None
            self._pending = None

    def cancel(self, timeout_s: float = 30.0) -> None:
        """Give up the snapshot in progress, if any, its cut and its files: another rank's part of it will not come.

        For a recovery: the next checkpoint is a full one, unless ``set_base`` is called in the new epoch.
        """
        self._base = None
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancel_write()
            with contextlib.suppress(FutureTimeoutError):
                pending.exception(timeout_s)

    def _build_on(self, step: int) -> tuple[int | None, Delta | None]:
        """The step of the base, and what may be left out; None where the checkpoint of ``step`` is a full one."""
        base = self._base
        if base is None or base >= step:  # this worker has gone back behind the base since it was named
            return None, None
        return base, Delta(since=base, deleted=self._host.store.deletions.since(base))

    def _log_cut(self, step: int, since: int | None) -> None:
        """Note in the deletion log that a checkpoint of ``step`` is taken now, which builds on ``since``."""
        deletions = self._host.store.deletions
        deletions.seal(step)
        deletions.trim(step if since is None else since)
        for number, spec in enumerate(self._host.tables):
            for block in self._host.owned.get(spec.name, ()):
                deletions.mark_known(number, block, step)
