"""SnapshotWriter: writes one rank's parts of checkpoints in the background, one at a time (PROTOCOLS K1)."""

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
from shoal.actors.snapshot import PendingSnapshot, RateLimiter, write_dense, write_in_background, write_snapshot
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
        cut = host.store.cut()

        def write_files(limiter: RateLimiter) -> tuple[FileEntry, ...]:
            try:
                files = list(write_snapshot(cut, owned, host.tables, self._storage, directory, rank, limiter=limiter))
                if rank == 0:
                    files.append(write_dense(self._storage, directory, tensors, metadata))
                return tuple(files)
            finally:
                cut.release()

        def write(limiter: RateLimiter) -> None:
            files: tuple[FileEntry, ...] = ()
            failure: str | None = None
            try:
                files = write_files(limiter)
            except BaseException as error:  # the thread's edge: the part says what went wrong
                failure = f"{type(error).__name__}: {error}"
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
        """Give up the snapshot in progress, if any, and its cut: another rank's part of it will not come."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancel_write()
            with contextlib.suppress(FutureTimeoutError):
                pending.exception(timeout_s)
